"""One training step as the planner sees it: ops that make buffers out of buffers.

A buffer is a piece of memory (a storage); views are dissolved, so to read a view is to read its
buffer. Each buffer is made by one op, or is there from the start (`inputs`). The plain order runs
the forward ops and then the backward ops, each once; every schedule keeps that order and may only
insert repeats. A repeat mostly does again what the op did first; where it can do with less, the op
says what its repeats read, make and cost.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import msgspec

__all__ = ["ARRIVAL", "Cost", "Op", "Program", "module_of"]

ARRIVAL = "arrival"  # the op that makes what other stages have sent


def module_of(place: str) -> str:
    """The module path of an op of a whole step, in which the model stands beside its loss.

    >>> module_of("model.layer1.0"), module_of("model"), module_of("loss_fn")
    ('layer1.0', '', 'loss_fn')
    """
    return "" if place == "model" else place.removeprefix("model.")


class Cost(NamedTuple):
    """What one kernel call costs; its repeats differed by `spread_seconds` when it was measured."""

    seconds: float
    workspace_bytes: int
    spread_seconds: float = 0.0

    @classmethod
    def of(cls, price: "Cost | tuple[float, int]") -> "Cost":
        """A price with or without its spread."""
        return price if isinstance(price, Cost) else cls(*price)


class Op(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel call.

    Attributes:
        name: for messages; ops of equal blocks should differ in digits only, so that the planner
            sees that they play the same role.
        can_repeat: whether a repeat gives the same bits.
        takes_over: buffers among `reads` that die here, so that the only output may reuse one.
        place: the module it runs for, `layer1.0.conv2`; empty where that is not known.
        is_callers: whether the caller runs it, out of our hands, like the loss of a model.
        repeat_reads: buffers that every execution after the first needs, which may be some that
            the first one made and no other makes again; None: as the first.
        repeat_writes: those of `writes` that every execution after the first makes again; None:
            all of them. The others cannot be made again.
        repeat_seconds: what every execution after the first costs; None: as much as the first.
        repeat_workspace_bytes: the scratch memory of these; None: as much as the first.
        spread_seconds: how far `seconds` may be off.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float
    workspace_bytes: int = 0
    can_repeat: bool = True
    takes_over: tuple[int, ...] = ()
    place: str = ""
    is_callers: bool = False
    repeat_reads: tuple[int, ...] | None = None
    repeat_writes: tuple[int, ...] | None = None
    repeat_seconds: float | None = None
    repeat_workspace_bytes: int | None = None
    spread_seconds: float = 0.0

    def again(self) -> "Op":
        """The op as every execution after the first runs it.

        One that reads or makes other buffers than the first takes no memory over.
        """
        names = ("reads", "writes", "seconds", "workspace_bytes")
        given = {name: getattr(self, f"repeat_{name}") for name in names}
        changed = {name: value for name, value in given.items() if value is not None}
        if not changed:
            return self
        if "reads" in changed or "writes" in changed:
            changed["takes_over"] = ()
        as_now = dict.fromkeys(f"repeat_{name}" for name in names)
        return msgspec.structs.replace(self, **changed, **as_now)

    def renamed(self, reads: Mapping[int, int], writes: Mapping[int, int]) -> "Op":
        """The op with other numbers for some of the buffers it reads or makes."""
        made = {buffer: writes.get(buffer, buffer) for buffer in self.writes}
        again = self.repeat_reads, self.repeat_writes
        return msgspec.structs.replace(
            self,
            reads=_numbered(self.reads, reads),
            writes=tuple(made.values()),
            takes_over=_numbered(self.takes_over, reads),
            repeat_reads=None if again[0] is None else _numbered(again[0], {**reads, **made}),
            repeat_writes=None if again[1] is None else _numbered(again[1], made),
        )


def _numbered(buffers: tuple[int, ...], numbers: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(numbers.get(buffer, buffer) for buffer in buffers)


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The ops of a step in plain order, and the buffers between them.

    Attributes:
        buffers: the bytes of each buffer.
        first_backward: the first op before which repeats may be inserted.
        inputs: buffers that are there during the whole step (parameters, the batch).
        outputs: buffers that live on to the end once made (gradients, loss, new statistics).
        resident_bytes: memory beside all buffers, during the whole step.
        object_bytes: of the bytes of each buffer that is no input, what torch's own objects take;
            they depend on no schedule.
        plain_peak_bytes: the peak of the eager step, which shares are taken of; 0 if unknown.
    """

    buffers: tuple[int, ...]
    ops: tuple[Op, ...]
    first_backward: int
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    resident_bytes: int = 0
    object_bytes: int = 0
    plain_peak_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.ops:
            raise ValueError("a program needs at least one op")
        if not 0 <= self.first_backward <= len(self.ops):
            raise ValueError(f"first_backward {self.first_backward} is not in 0..{len(self.ops)}")
        if min((*self.buffers, self.resident_bytes, self.plain_peak_bytes)) < 0:
            raise ValueError("bytes are never negative")
        unknown = (self.inputs | self.outputs) - set(range(len(self.buffers)))
        if unknown:
            raise ValueError(f"no such buffers: {sorted(unknown)}")
        made = set(self.inputs)
        for op in self.ops:
            self._check(op, made)
            made.update(op.writes)
        if len(made) < len(self.buffers):
            lost = sorted(set(range(len(self.buffers))) - made)
            raise ValueError(f"buffers {lost} have no op that makes them and are no inputs")

    def _check(self, op: Op, made: set[int]) -> None:
        early = [buffer for buffer in op.reads if buffer not in made]
        if early:
            raise ValueError(f"{op.name} reads buffers {early} before they are made")
        twice = [buffer for buffer in op.writes if buffer in made]
        if twice or len(set(op.writes)) < len(op.writes):
            raise ValueError(f"{op.name} makes buffers {twice or op.writes} a second time")
        if not all(0 <= buffer < len(self.buffers) for buffer in op.writes):
            raise ValueError(f"{op.name} makes buffers that do not exist: {op.writes}")
        if not (op.seconds >= 0 and op.workspace_bytes >= 0):
            raise ValueError(f"{op.name} has a negative cost")
        if op.takes_over:
            if len(op.writes) != 1 or not set(op.takes_over) <= set(op.reads):
                raise ValueError(f"{op.name} takes over what it does not read, or in many outputs")
            if {self.buffers[b] for b in op.takes_over} != {self.buffers[op.writes[0]]}:
                raise ValueError(f"{op.name} takes over a buffer of another size")
        self._check_repeat(op, made)

    def _check_repeat(self, op: Op, made: set[int]) -> None:
        again = op.again()
        if not set(again.writes) <= set(op.writes) or len(set(again.writes)) < len(again.writes):
            raise ValueError(f"repeats of {op.name} make {again.writes}, not some of {op.writes}")
        kept = set(op.writes).difference(again.writes)
        lost = [buffer for buffer in again.reads if buffer not in made and buffer not in kept]
        if lost:
            raise ValueError(f"repeats of {op.name} read buffers {lost}, which may not be there")
        if not (again.seconds >= 0 and again.workspace_bytes >= 0):
            raise ValueError(f"repeats of {op.name} have a negative cost")

    @cached_property
    def fingerprint(self) -> str:
        """Tells programs apart by what a schedule depends on: ops and sizes, not their costs.

        What the caller makes for itself alone is a cost, too: its loss, say.
        """
        made = {buffer for op in self.ops if op.is_callers for buffer in op.writes}
        own = (made & self.outputs).difference(*(op.reads for op in self.ops))
        shape = []
        for op, again in zip(self.ops, self.repeats, strict=True):
            writes, made_again = (
                tuple(b for b in w if b not in own) for w in (op.writes, again.writes)
            )
            shape.append(
                (op.name, op.reads, writes, op.can_repeat, op.takes_over, again.reads, made_again)
            )
        buffers = tuple(
            size - (0 if buffer in self.inputs else self.object_bytes)
            for buffer, size in enumerate(self.buffers)
            if buffer not in own
        )
        ends = (self.first_backward, sorted(self.inputs), sorted(self.outputs - own))
        return hashlib.sha256(repr((buffers, shape, ends)).encode()).hexdigest()[:24]

    @cached_property
    def repeats(self) -> tuple[Op, ...]:
        """Each op as its executions after the first run it."""
        return tuple(op.again() for op in self.ops)

    @cached_property
    def renewable(self) -> frozenset[int]:
        """The buffers that a repeat can make again."""
        return frozenset(b for op in self.repeats if op.can_repeat for b in op.writes)

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """The buffers of forward that a swap could move: ours, and gone when the step ends."""
        forward = (op for op in self.ops[: self.first_backward] if not op.is_callers)
        return tuple(b for op in forward for b in op.writes if b not in self.outputs)

    def executions(self, schedule: Iterable[int]) -> Iterator[Op]:
        """What each step of a schedule runs: an op at first, and then its repeat."""
        done: set[int] = set()
        for index in schedule:
            yield self.repeats[index] if index in done else self.ops[index]
            done.add(index)

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """The op that makes each buffer, or -1 for inputs."""
        makers = [-1] * len(self.buffers)
        for index, op in enumerate(self.ops):
            for buffer in op.writes:
                makers[buffer] = index
        return tuple(makers)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        users: list[list[int]] = [[] for _ in self.buffers]
        for index, op in enumerate(self.ops):
            for buffer in sorted(set(op.reads)):
                users[buffer].append(index)
        return tuple(map(tuple, users))

    @cached_property
    def always_bytes(self) -> int:
        """What no schedule can release: the inputs and what lies beside the buffers."""
        return self.resident_bytes + sum(self.buffers[buffer] for buffer in self.inputs)

    @cached_property
    def plain_seconds(self) -> float:
        return sum(op.seconds for op in self.ops)

    @property
    def spread_share(self) -> float:
        """How far the ops' seconds may be off, as a share of them all."""
        spread_seconds = sum(op.spread_seconds for op in self.ops)
        return spread_seconds / self.plain_seconds if self.plain_seconds else 0.0
