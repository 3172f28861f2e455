"""Plans for a forward that is not one graph: an order for each of its pieces, within one limit.

Pieces run one after another and each keeps something for its backward, so what one keeps is missing
to all that run before its backward begins:

    forward    piece 1   between   piece 2   loss
    backward                                        piece 2   between   piece 1
    kept by 1        #############################################
    kept by 2                            ##############

A simulated run in plain order says how much is there when each piece begins, and the most that is
there between its forward and its backward. For one piece all of that is like a loss outside of it,
so its order is searched for as that of a whole step. What binds the pieces together is a cap on
what each keeps: a share, the same for all, of what it keeps in plain order. The share with the
fastest step wins.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bayplan.data.errors import DoesNotFit
from bayplan.data.plan import StepOrder
from bayplan.data.program import Program
from bayplan.simulating.schedule import plain_schedule, replay_schedule

__all__ = ["Moment", "PieceRun", "Surroundings", "choose_orders", "kept_bytes", "surroundings_of"]

_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.0)


@dataclass(frozen=True)
class PieceRun:
    """One execution of a piece in a simulated step, as moments: the operators by number.

    Attributes:
        piece: which one; the same piece may run several times in a step.
        forward, backward: the first operator and the one after the last.
        before_bytes: what is there when its forward begins; `returning_bytes`, its backward.
    """

    piece: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    before_bytes: int
    returning_bytes: int


@dataclass(frozen=True)
class Surroundings:
    """What is there beside a piece, at the run of it where that is most.

    Attributes:
        before_bytes: when its forward begins, with its inputs.
        added_bytes: what has come by its backward: gradients of later pieces, the loss.
        plain_kept_bytes: what it keeps from forward to backward in plain order.
    """

    before_bytes: int
    added_bytes: int
    plain_kept_bytes: int


@dataclass(frozen=True)
class Moment:
    """Of a simulated step, outside its pieces: its operator's number, and what is there."""

    index: int
    total_bytes: int


def kept_bytes(program: Program, schedule: Sequence[int]) -> int:
    """What an order keeps at the end of forward, beside what is always there."""
    totals = replay_schedule(program, schedule).total_bytes
    loss = program.ops[program.first_backward - 1]
    taken = loss.workspace_bytes + sum(program.buffers[buffer] for buffer in loss.writes)
    return totals[program.first_backward - 1] - program.always_bytes - taken


def surroundings_of(program: Program, runs: Iterable[PieceRun]) -> Surroundings:
    """What a simulated step in plain order says of one piece, given its program alone."""
    kept = kept_bytes(program, plain_schedule(program))
    loss = program.ops[program.first_backward - 1]
    gradient_bytes = sum(program.buffers[buffer] for buffer in loss.writes)
    runs = list(runs)
    before_bytes = max(run.before_bytes for run in runs)
    returning_bytes = max(run.returning_bytes for run in runs) - kept - gradient_bytes
    return Surroundings(before_bytes, max(0, returning_bytes - before_bytes), kept)


# Searches for a piece's order: within so many bytes in all, of which it may keep at most the second
# number over what is there before it. Returns what the order keeps as well.
Search = Callable[[int, int, int], tuple[StepOrder, int]]


def choose_orders(
    runs: Sequence[PieceRun],
    around: Mapping[int, Surroundings],
    outside: Sequence[Moment],
    limit_bytes: int,
    search: Search,
) -> dict[int, StepOrder]:
    """The fastest orders of all pieces within one limit that were found.

    Args:
        runs: in the order of their forwards.
        around: by piece.
        outside: the moments outside all pieces, which no order changes but by what pieces keep.

    Raises:
        DoesNotFit: with no share of what pieces keep in plain order.
    """
    best: tuple[float, dict[int, StepOrder]] | None = None
    refusals: list[DoesNotFit] = []
    for share in _SHARES:
        try:
            orders, seconds = _with_share(share, runs, around, outside, limit_bytes, search)
        except DoesNotFit as refusal:
            refusals.append(refusal)
            continue
        if best is not None and seconds >= best[0]:
            break
        best = seconds, orders
        if share == 1.0 and all(order.seconds <= order.plain_seconds for order in orders.values()):
            break
    if best is None:
        raise refusals[-1]
    return best[1]


def _with_share(
    share: float,
    runs: Sequence[PieceRun],
    around: Mapping[int, Surroundings],
    outside: Sequence[Moment],
    limit_bytes: int,
    search: Search,
) -> tuple[dict[int, StepOrder], float]:
    orders: dict[int, StepOrder] = {}
    saved_of: dict[int, int] = {}
    saved_bytes, seconds = 0, 0.0  # what earlier pieces keep less than in plain order
    for run in runs:
        if run.piece not in orders:
            cap_bytes = int(share * around[run.piece].plain_kept_bytes)
            order, kept = _within_cap(search, run.piece, limit_bytes + saved_bytes, cap_bytes)
            orders[run.piece] = order
            saved_of[run.piece] = around[run.piece].plain_kept_bytes - kept
        saved_bytes += saved_of[run.piece]
        seconds += orders[run.piece].seconds
    for moment in outside:
        alive = (run for run in runs if run.forward[1] <= moment.index < run.backward[0])
        total_bytes = moment.total_bytes - sum(saved_of[run.piece] for run in alive)
        if total_bytes > limit_bytes:
            raise DoesNotFit(
                f"an operator between the pieces of the forward needs {total_bytes} bytes with all"
                f" that pieces keep, limit {limit_bytes} bytes"
            )
    return orders, seconds


def _within_cap(
    search: Search, piece: int, limit_bytes: int, cap_bytes: int
) -> tuple[StepOrder, int]:
    """Search with a cap, and where no order keeps so little, with the least that one can keep."""
    try:
        return search(piece, limit_bytes, cap_bytes)
    except DoesNotFit as refusal:
        missing_bytes = (refusal.smallest_bytes or limit_bytes) - limit_bytes
        if missing_bytes <= 0:
            raise
        return search(piece, limit_bytes, cap_bytes + missing_bytes)
