"""`Evaluator` in C (replay.c): tens of microseconds for a few thousand ops.

Arrays are laid out once for a program and shared with C by pointer; C allocates nothing.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy
from numpy.typing import NDArray

from bayplan.data.program import Op, Program
from bayplan.native import CompileFailed, load_part
from bayplan.planning.memory.choices import (
    FAR,
    GIVEN_UP,
    MOST_REPEATS,
    WINDOWS,
    Choices,
    Evaluator,
    Move,
    Outcome,
    Steps,
    Trace,
)

__all__ = ["NativeEvaluator", "open_evaluator"]

_SOURCE = Path(__file__).with_name("replay.c")


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


# The structures of replay.c, field by field.
class _Outcome(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_double, "seconds excess"),
        ("peak", ctypes.c_int64),
        ("length", ctypes.c_int32),
    ]


def _as_outcome(raw: _Outcome) -> Outcome:
    if raw.length < 0:
        return GIVEN_UP
    return Outcome(raw.seconds, raw.excess, raw.peak, raw.length)


class _Trace(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "curve lives last_read"),
        ("num_lives", ctypes.c_int32),
    ]


class _Form(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "reads_start reads writes_start writes takes_start takes"),
        *_fields(ctypes.c_void_p, "workspace seconds"),
    ]


class _Program(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int32, "num_ops num_buffers first_backward num_gaps"),
        ("end_bytes", ctypes.c_int64),
        ("plain_seconds", ctypes.c_double),
        *_fields(ctypes.c_void_p, "bytes kind producer first_choice gap_end window"),
        *_fields(_Form, "plain again"),
        *_fields(ctypes.c_void_p, "is_there is_live copies gap stamp cone stack old"),
        *_fields(ctypes.c_void_p, "schedule is_repeat"),
        ("capacity", ctypes.c_int32),
    ]


class NativeEvaluator(Evaluator):
    """`Evaluator` through replay.c."""

    def __init__(self, program: Program, library: ctypes.CDLL) -> None:
        super().__init__(program)
        self._library = library
        self._arrays = self._flatten()
        self._forms = [_flatten_ops(ops, program.inputs) for ops in (program.ops, program.repeats)]
        self._native = _Program(
            num_ops=len(program.ops),
            num_buffers=len(program.buffers),
            first_backward=program.first_backward,
            num_gaps=len(self.gaps),
            end_bytes=program.always_bytes + sum(program.buffers[b] for b in program.outputs),
            plain_seconds=program.plain_seconds,
            capacity=MOST_REPEATS * len(program.ops) + 1,
            plain=_Form(**_pointers(self._forms[0])),
            again=_Form(**_pointers(self._forms[1])),
            **_pointers(self._arrays),
        )
        self._most_writes = max(len(op.writes) for op in program.ops)

    def _flatten(self) -> dict[str, NDArray]:
        program, gaps = self.program, self.gaps
        num_ops, num_buffers = len(program.ops), len(program.buffers)
        first_choice = numpy.full(num_buffers, -1, numpy.int32)
        first_choice[[*self.first_gap]] = [*self.first_gap.values()]
        kind = numpy.zeros(num_buffers, numpy.uint8)
        kind[sorted(program.outputs)] = 1
        capacity = MOST_REPEATS * num_ops + 1
        return {
            "bytes": numpy.array(program.buffers, numpy.int64),
            "kind": kind,
            "producer": numpy.array(program.producers, numpy.int32),
            "first_choice": first_choice,
            "gap_end": numpy.array([gap.end if gap.end >= 0 else FAR for gap in gaps], numpy.int32),
            "window": numpy.array(WINDOWS, numpy.int32),
            "is_there": numpy.zeros(num_buffers, numpy.uint8),
            "is_live": numpy.zeros(num_buffers, numpy.uint8),
            "copies": numpy.zeros(num_buffers, numpy.int32),
            "gap": numpy.zeros(num_buffers, numpy.int32),
            "stamp": numpy.full(num_ops, -1, numpy.int32),
            "cone": numpy.zeros(num_ops, numpy.int32),
            "stack": numpy.zeros(num_ops, numpy.int32),
            # A move changes each gap at most once, but for the few it draws by itself.
            "old": numpy.zeros(2 * len(gaps) + 16, numpy.uint8),
            "schedule": numpy.zeros(capacity, numpy.int32),
            "is_repeat": numpy.zeros(capacity, numpy.uint8),
        }

    def _evaluate(
        self, choices: Choices, limit_bytes: int, trace: _Trace | None = None
    ) -> _Outcome:
        raw = _Outcome()
        self._library.replay_evaluate(
            ctypes.byref(self._native),
            choices.ctypes.data,
            limit_bytes,
            None if trace is None else ctypes.byref(trace),
            ctypes.byref(raw),
        )
        return raw

    def evaluate(self, choices: Choices, *, limit_bytes: int) -> Outcome:
        return _as_outcome(self._evaluate(choices, limit_bytes))

    def schedule(self, choices: Choices) -> tuple[int, ...]:
        length = self.evaluate(choices, limit_bytes=0).length
        if length < 0:
            return ()
        first = self.program.first_backward
        return (*range(first), *self._arrays["schedule"][first:length].tolist())

    def trace(self, choices: Choices) -> Trace:
        schedule = numpy.array(self.schedule(choices), numpy.int32)
        is_repeat = self._arrays["is_repeat"][: len(schedule)].astype(numpy.bool_)
        is_repeat[: self.program.first_backward] = False
        curve = numpy.zeros(len(schedule), numpy.int64)
        lives = numpy.zeros((len(schedule) * self._most_writes, 3), numpy.int32)
        last_read = numpy.zeros(len(self.program.buffers), numpy.int32)
        trace = _Trace(curve.ctypes.data, lives.ctypes.data, last_read.ctypes.data, 0)
        self._evaluate(choices, 0, trace)
        lives = lives[: trace.num_lives]
        order = numpy.lexsort((lives[:, 0], lives[:, 2]))
        return Trace(schedule, is_repeat, curve, lives[order])

    def simulate(self, schedule: Steps, *, limit_bytes: int) -> Outcome:
        steps = numpy.asarray(schedule, numpy.int32)
        if not 0 < len(steps) <= self._native.capacity:
            return GIVEN_UP
        self._arrays["schedule"][: len(steps)] = steps
        is_repeat = self._arrays["is_repeat"]
        is_repeat[0] = 0
        is_repeat[1 : len(steps)] = steps[1:] <= numpy.maximum.accumulate(steps)[:-1]
        raw = _Outcome()
        self._library.replay_simulate(
            ctypes.byref(self._native), len(schedule), limit_bytes, ctypes.byref(raw)
        )
        return _as_outcome(raw)

    def walk(
        self,
        choices: Choices,
        moves: Sequence[Move],
        slack: NDArray[numpy.float64],
        *,
        limit_bytes: int,
        weight: float,
        best: Choices,
        best_seconds: float,
    ) -> tuple[float, Outcome]:
        # Move m sets the gaps where[starts[m]:starts[m + 1]] to what[...].
        changes = [change for move in moves for change in move]
        starts = numpy.cumsum([0, *map(len, moves)], dtype=numpy.int32)
        where = numpy.array([gap for gap, _ in changes], numpy.int32)
        what = numpy.array([choice for _, choice in changes], numpy.uint8)
        raw, fastest = self._evaluate(choices, limit_bytes), ctypes.c_double(best_seconds)
        self._library.replay_walk(
            *(ctypes.byref(self._native), choices.ctypes.data, limit_bytes, weight, len(slack)),
            *(array.ctypes.data for array in (starts, where, what, slack, best)),
            *(ctypes.byref(fastest), ctypes.byref(raw)),
        )
        return fastest.value, _as_outcome(raw)


def _flatten_ops(ops: Sequence[Op], inputs: frozenset[int]) -> dict[str, NDArray]:
    rows: dict[str, list[Sequence[int]]] = {
        "reads": [sorted({*op.reads} - inputs) for op in ops],
        "writes": [op.writes for op in ops],
        "takes": [[b for b in op.takes_over if b not in inputs] for op in ops],
    }
    arrays: dict[str, NDArray] = {}
    for name, lists in rows.items():
        arrays[f"{name}_start"] = numpy.cumsum([0, *map(len, lists)], dtype=numpy.int32)
        arrays[name] = numpy.array([item for row in lists for item in row], numpy.int32)
    arrays["workspace"] = numpy.array([op.workspace_bytes for op in ops], numpy.int64)
    arrays["seconds"] = numpy.array([op.seconds for op in ops], numpy.float64)
    return arrays


def _pointers(arrays: dict[str, NDArray]) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in arrays.items()}


def open_evaluator(program: Program, *, cache_dir: Path | None = None) -> Evaluator:
    """The evaluator in C, or the one in Python where there is no compiler.

    The compiled library is kept in `cache_dir`; None compiles it for this process alone.
    """
    try:
        return NativeEvaluator(program, _load(cache_dir))
    except CompileFailed:
        return Evaluator(program)


@cache
def _load(cache_dir: Path | None) -> ctypes.CDLL:
    library = load_part(_SOURCE, cache_dir)
    pointer, number, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, list[type]] = {
        "replay_evaluate": [pointer, pointer, size, pointer, pointer],
        "replay_simulate": [pointer, number, size, pointer],
        "replay_walk": [pointer, pointer, size, ctypes.c_double, number, *[pointer] * 7],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments
    return library
