"""A planned step on one device, moment by moment: its memory by what the plan does, its timeline.

kept         made in forward, read in backward, and there all the while
recomputed   the same, made again in backward
swapped      the same, away in between
packed       the small form of a value that backward reads
temporary    made and gone within forward, or within backward
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from bayplan.data.graph import Phase, StepGraph, StorageKind
from bayplan.data.live_memory import OBJECTS, WORKSPACE
from bayplan.data.plan import StepOrder
from bayplan.data.program import Op, Program
from bayplan.data.record import KEPT, PACKED, RECOMPUTED, SWAPPED, Event, Lane, MemoryCurve
from bayplan.data.units import round_up
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import LaneStep, Swapped, Tier, apply_order, lane_steps

__all__ = ["PlannedStep", "planned_step", "step_events"]

RECOMPUTE = "recompute"
_DEPTH = 2  # parts of a module path that a timeline shows: `layer1.0`
_RESIDENTS = (
    StorageKind.PARAMETER,
    StorageKind.OPTIMIZER_STATE,
    StorageKind.BUFFER,
    StorageKind.INPUT,
)


@dataclass(frozen=True)
class PlannedStep:
    """`peak_place` is what runs at the peak: operator, module and line."""

    curve: MemoryCurve
    events: tuple[Event, ...]
    peak_place: str


def planned_step(
    program: Program,
    order: StepOrder,
    graph: StepGraph,
    *,
    plain_ops: Collection[str],
    outside_seconds: float = 0.0,
    granularity_bytes: int = 1,
    tier: Tier | None = None,
) -> PlannedStep:
    """Replay a program in the order of a plan.

    Args:
        program: with the order's packs.
        graph: of the plain step, which says what is always there, and where lines are.
        plain_ops: names of the program's ops without packs.
        outside_seconds: what loss and update take, which end the step.
        granularity_bytes: of the device's allocator.
        tier: where to swaps go; None leaves their copies out of the time.
    """
    swapped = apply_order(order, program)
    arranged = swapped.program
    schedule = plain_schedule(arranged)
    steps = _timed(swapped, tier)
    kinds = _kinds(swapped, program, order, plain_ops)
    always = _always(graph, program, granularity_bytes)
    by_kind, totals = _live(arranged, kinds, always)
    assert tuple(totals) == replay_schedule(arranged, schedule).total_bytes, "the same replay"
    peak = totals.index(max(totals))
    end = steps[-1].end
    curve = MemoryCurve(
        seconds=(*(step.start for step in steps), end, end + outside_seconds),
        total_bytes=(*totals, totals[-1], totals[-1]),
        by_kind={kind: (*column, column[-1], column[-1]) for kind, column in by_kind.items()},
    )
    num_runs = Counter[int]()
    rows: list[tuple[str, str, float, float]] = []
    for index, (op, old, step) in enumerate(zip(arranged.ops, swapped.op_of, steps, strict=True)):
        is_again = old >= 0 and num_runs[old] > 0
        num_runs[old] += 1
        phase = Phase.FORWARD if index < arranged.first_backward else Phase.BACKWARD
        rows.append((RECOMPUTE if is_again else phase, op.place, step.start, step.end))
    rows.append((Phase.UPDATE, "", end, end + outside_seconds))
    copies = (
        Event(lane=Lane.COPY, name=op.name, start_seconds=begin, seconds=done - begin)
        for op, step in zip(arranged.ops, steps, strict=True)
        if step.copy is not None
        for begin, done in [step.copy]
    )
    return PlannedStep(curve, (*step_events(rows), *copies), _place(arranged.ops[peak], graph))


def step_events(rows: Iterable[tuple[str, str, float, float]]) -> Iterator[Event]:
    """Operators, as phase, module, begin and end, joined where neighbours have the same of both."""
    name, start, end = "", 0.0, 0.0
    for phase, place, begin, done in rows:
        module = ".".join(place.split(".")[:_DEPTH])
        # An op of no module belongs to what is around it.
        same = f"{phase} {module}".rstrip() if module or not name.startswith(phase) else name
        if same != name:
            if name and end > start:
                yield _compute(name, start, end)
            name, start = same, begin
        end = done
    if name and end > start:
        yield _compute(name, start, end)


def _compute(name: str, start: float, end: float) -> Event:
    return Event(lane=Lane.COMPUTE, name=name, start_seconds=start, seconds=end - start)


def _timed(swapped: Swapped, tier: Tier | None) -> list[LaneStep]:
    schedule = plain_schedule(swapped.program)
    if swapped.swap_ops and tier is not None:
        return list(lane_steps(swapped, schedule, tier))
    now, steps = 0.0, []
    for op in swapped.program.executions(schedule):
        steps.append(LaneStep(now, now + op.seconds))
        now += op.seconds
    return steps


def _kinds(
    swapped: Swapped, program: Program, order: StepOrder, plain_ops: Collection[str]
) -> list[str]:
    """What each buffer of the arranged program is there for."""
    counts = Counter(order.schedule)
    moved = {swapped.buffer_of[swap.buffer] for swap in swapped.swap_ops}
    first = program.first_backward

    def kind_of(old: int) -> str:
        if old < 0:
            return StorageKind.TEMPORARY
        if old in program.inputs:
            return StorageKind.PARAMETER
        if old in program.outputs:
            return StorageKind.GRADIENT
        producer = program.producers[old]
        is_kept = producer < first and any(reader >= first for reader in program.readers[old])
        if not is_kept:
            return RECOMPUTED if counts[producer] > 1 else StorageKind.TEMPORARY
        if old in moved:
            return SWAPPED
        if program.ops[producer].name not in plain_ops:
            return PACKED
        return RECOMPUTED if counts[producer] > 1 else KEPT

    return [kind_of(old) for old in swapped.buffer_of]


def _always(graph: StepGraph, program: Program, granularity_bytes: int) -> dict[str, int]:
    """What is there during the whole step, by kind; the rest of it is torch's own objects."""
    always = dict.fromkeys(map(str, _RESIDENTS), 0)
    for storage in graph.storages:
        if storage.kind in _RESIDENTS and storage.born is None:
            always[storage.kind] += round_up(storage.size_bytes, granularity_bytes)
    # Some of it is not in the traced graph, as targets that only the loss reads.
    for kind in reversed(_RESIDENTS):
        too_much = max(0, sum(always.values()) - program.always_bytes)
        always[kind] = max(0, always[kind] - too_much)
    return {**always, OBJECTS: program.always_bytes - sum(always.values())}


def _live(
    program: Program, kinds: list[str], always: Mapping[str, int]
) -> tuple[dict[str, list[int]], list[int]]:
    """Bytes by kind while each op runs, and their sums."""
    replay = replay_schedule(program, plain_schedule(program))
    sizes = program.buffers
    live = Counter(always)
    names = dict.fromkeys((*always, *kinds, WORKSPACE))
    columns: dict[str, list[int]] = {name: [] for name in names}
    for op, released, taken in zip(program.ops, replay.releases, replay.taken_over, strict=True):
        for buffer in op.writes:
            live[kinds[buffer]] += sizes[buffer]
        if taken is not None:
            live[kinds[taken]] -= sizes[taken]
        for name, column in columns.items():
            column.append(op.workspace_bytes if name == WORKSPACE else live[name])
        for buffer in released:
            live[kinds[buffer]] -= sizes[buffer]
    columns = {name: column for name, column in columns.items() if any(column)}
    return columns, [sum(sizes) for sizes in zip(*columns.values(), strict=True)]


def _place(op: Op, graph: StepGraph) -> str:
    """An op with its module, and the line of the user's that this module is called from."""
    lines = (node.source for node in graph.nodes if op.place and node.module == op.place)
    return " ".join(filter(None, (op.name, op.place, next(filter(None, lines), ""))))
