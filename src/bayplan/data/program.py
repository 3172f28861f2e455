"""One training step as the planner sees it: ops that make buffers out of buffers.

A buffer is a piece of memory (a storage); views are dissolved, so to read a view is to read its
buffer. Each buffer is made by one op, or is there from the start (`inputs`). The plain order runs
the forward ops and then the backward ops, each once; every schedule keeps that order and may only
insert repeats.
"""

import hashlib
from functools import cached_property

import msgspec

__all__ = ["Op", "Program"]


class Op(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel call.

    Attributes:
        name: for messages; ops of equal blocks should differ in digits only, so that the planner
            sees that they play the same role.
        reads: buffers it needs.
        writes: buffers it makes, all of them at each repeat.
        seconds: what one execution costs.
        workspace_bytes: scratch memory while it runs.
        can_repeat: whether a repeat gives the same bits.
        takes_over: buffers among `reads` whose memory the only output may take over, if the copy
            that is read dies here.
        place: the module it runs for, `layer1.0.conv2`; empty where that is not known.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float
    workspace_bytes: int = 0
    can_repeat: bool = True
    takes_over: tuple[int, ...] = ()
    place: str = ""


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The ops of a step in plain order, and the buffers between them.

    Attributes:
        buffers: the bytes of each buffer.
        ops: in plain order.
        first_backward: the first op before which repeats may be inserted.
        inputs: buffers that are there during the whole step (parameters, the batch).
        outputs: buffers that live on to the end once made (gradients, loss, new statistics).
        resident_bytes: memory beside all buffers, during the whole step.
        plain_peak_bytes: the peak of the eager step, which shares are taken of; 0 if unknown.
    """

    buffers: tuple[int, ...]
    ops: tuple[Op, ...]
    first_backward: int
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    resident_bytes: int = 0
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

    @cached_property
    def fingerprint(self) -> str:
        """Tells programs apart by what a schedule depends on: ops and sizes, not their costs."""
        shape = [(op.name, op.reads, op.writes, op.can_repeat, op.takes_over) for op in self.ops]
        ends = (self.first_backward, sorted(self.inputs), sorted(self.outputs))
        return hashlib.sha256(repr((self.buffers, shape, ends)).encode()).hexdigest()[:24]

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
        """The ops that read each buffer, in order."""
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
        """The seconds of all ops once."""
        return sum(op.seconds for op in self.ops)
