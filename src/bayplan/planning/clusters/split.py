"""`Split`: which layers of a chain are on which devices, and how a batch passes them."""

from dataclasses import dataclass

from bayplan.data.plan import Stage

__all__ = ["Split"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """What every partitioner decides, ours and those it is compared with.

    Attributes:
        stages: `first` and `last` are layers of the chain, together all of them, in order; a device
            is in one stage only.
        num_samples: of the whole batch, over all replicas and micro-batches.
        lags: by stage, how many batches its backward is behind its forward; empty for none.
        recomputed: by stage, whether it keeps only its input and repeats its forward; empty for no.
        partitioner: who made it, in a word or two.
    """

    stages: tuple[Stage, ...]
    num_samples: int
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    lags: tuple[int, ...] = ()
    recomputed: tuple[bool, ...] = ()
    partitioner: str = ""

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0].first != 0:
            raise ValueError("the first stage begins with layer 0")
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if after.first != before.last + 1:
                raise ValueError(
                    f"a stage ends with layer {before.last}, the next begins with {after.first}"
                )
        devices = [device for stage in self.stages for device in stage.devices]
        if len(set(devices)) < len(devices):
            raise ValueError(f"a device is in two places: {devices}")
        for name in ("lags", "recomputed"):
            given = getattr(self, name)
            if given and len(given) != len(self.stages):
                raise ValueError(f"{len(given)} {name} for {len(self.stages)} stages")

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of each stage, how many devices compute it.

        Example:
            >>> stage = Stage(first=0, last=3, devices=(0, 1), shares=(1, 1))
            >>> Split(stages=(stage,), num_samples=8).replicas
            (2,)
        """
        return tuple(len(stage.devices) for stage in self.stages)
