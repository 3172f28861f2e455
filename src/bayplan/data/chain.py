"""`Chain`: a model as layers in a row, with what each costs.

A planner for clusters needs no operators: it needs to know what lies before each place where the
model can be cut, and what a cut there sends. Published profiles say no more, and a captured step is
reduced to the same.
"""

from functools import cached_property
from itertools import accumulate

import msgspec

from bayplan.data.errors import CheckedStruct, check_at_least_1, check_not_negative

__all__ = ["Chain", "Layer"]


class Layer(CheckedStruct, frozen=True, kw_only=True):
    """What lies between two places to cut; seconds and bytes are of the chain's samples.

    Attributes:
        forward_seconds, backward_seconds: the fixed part included.
        fixed_forward_seconds, fixed_backward_seconds: of these, what does not grow with samples.
        parameter_bytes: of weights that are trained.
        held_bytes: what is kept from forward to backward if nothing is recomputed.
        passing_bytes: more than that, at the highest moment inside it.
        sent_bytes: what a cut behind it sends and gets back as gradients, with skip connections.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    fixed_forward_seconds: float = 0.0
    fixed_backward_seconds: float = 0.0
    parameter_bytes: int = 0
    held_bytes: int = 0
    passing_bytes: int = 0
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for phase, fixed, whole in (
            ("forward", self.fixed_forward_seconds, self.forward_seconds),
            ("backward", self.fixed_backward_seconds, self.backward_seconds),
        ):
            if fixed > whole:
                raise ValueError(f"fixed_{phase}_seconds is {fixed}, more than all of it: {whole}")


class Chain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Layers in a row, as they are on one kind of device.

    Attributes:
        num_samples: the batch that all figures hold for.
        device: the kind of device that they hold for, by name; empty if unknown.
        source: where they come from, in words.
        spread: the share by which the seconds may be off, either way.
    """

    schema: str = "bayplan/chain"
    version: int = 1
    name: str
    num_samples: int
    layers: tuple[Layer, ...]
    device: str = ""
    source: str
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty; a chain has at least one")
        check_at_least_1(num_samples=self.num_samples)
        check_not_negative(spread=self.spread)

    def seconds(self, first: int, last: int, num_samples: float) -> tuple[float, float]:
        """Forward and backward seconds of layers `first` to `last`, inclusive."""

        def scaled(field: str) -> float:
            fixed = self._total(f"fixed_{field}", first, last)
            whole = self._total(field, first, last)
            return fixed + (whole - fixed) * (num_samples / self.num_samples)

        return scaled("forward_seconds"), scaled("backward_seconds")

    def parameter_bytes(self, first: int, last: int) -> int:
        """Bytes of the weights of layers `first` to `last`, inclusive."""
        return int(self._total("parameter_bytes", first, last))

    def held_bytes(self, first: int, last: int, num_samples: float) -> float:
        """Bytes that layers `first` to `last`, inclusive, keep for backward."""
        return self._total("held_bytes", first, last) * num_samples / self.num_samples

    def sent_bytes(self, last: int, num_samples: float) -> float:
        """Bytes that a cut behind a layer sends."""
        return self.layers[last].sent_bytes * num_samples / self.num_samples

    def _total(self, field: str, first: int, last: int) -> float:
        before = self._before[field]
        return before[last + 1] - before[first]

    @cached_property
    def _before(self) -> dict[str, tuple[float, ...]]:
        """By field of a layer, its sum over all layers before each layer."""
        return {
            field: tuple(accumulate((getattr(layer, field) for layer in self.layers), initial=0))
            for field in Layer.__struct_fields__
            if field != "name"
        }
