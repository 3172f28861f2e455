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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bayplan.data.errors import DoesNotFit
from bayplan.data.plan import StepOrder
from bayplan.data.program import Program
from bayplan.simulating.schedule import plain_schedule, replay_schedule

__all__ = [
    *("Moment", "PieceRun", "PlainPiece", "Surroundings"),
    *("choose_orders", "kept_bytes", "plain_piece"),
]

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
class PlainPiece:
    """What a piece does in plain order.

    Attributes:
        kept_bytes: from its forward to its backward.
        gradient_bytes: what comes to it from those after it, when its backward begins.
    """

    kept_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Surroundings:
    """What is there beside a piece, at the run of it where that is most.

    Attributes:
        before_bytes: when its forward begins, with its inputs.
        added_bytes: what has come by its backward: gradients of later pieces, the loss.
    """

    before_bytes: int
    added_bytes: int


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


def plain_piece(program: Program) -> PlainPiece:
    loss = program.ops[program.first_backward - 1]
    return PlainPiece(
        kept_bytes=kept_bytes(program, plain_schedule(program)),
        gradient_bytes=sum(program.buffers[buffer] for buffer in loss.writes),
    )


def _surroundings(
    piece: int,
    runs: Sequence[PieceRun],
    plain: Mapping[int, PlainPiece],
    kept: Mapping[int, int],
) -> Surroundings:
    """What is there beside a piece if pieces keep so much, its own earlier runs among them."""
    saved_bytes, before, returning = 0, [], []
    for run in runs:
        if run.piece == piece:
            before.append(run.before_bytes - saved_bytes)
            returning.append(run.returning_bytes - saved_bytes)
        saved_bytes += plain[run.piece].kept_bytes - kept[run.piece]
    own = plain[piece].kept_bytes + plain[piece].gradient_bytes
    return Surroundings(max(before), max(0, max(returning) - own - max(before)))


# Searches for a piece's order, given what is there beside it: within so many bytes in all, of which
# it may keep at most the second number over what is there before it. Returns what the order keeps
# as well.
Search = Callable[[int, Surroundings, int, int], tuple[StepOrder, int]]


def choose_orders(
    runs: Sequence[PieceRun],
    plain: Mapping[int, PlainPiece],
    outside: Sequence[Moment],
    limit_bytes: int,
    search: Search,
) -> dict[int, StepOrder]:
    """The fastest orders of all pieces within one limit that were found.

    Args:
        runs: in the order of their forwards.
        plain: by piece.
        outside: the moments outside all pieces, which no order changes but by what pieces keep.

    Raises:
        DoesNotFit: with no share of what pieces keep in plain order.
    """
    best: tuple[float, dict[int, StepOrder]] | None = None
    refusals: list[DoesNotFit] = []
    for share in _SHARES:
        try:
            orders, seconds = _with_share(share, runs, plain, outside, limit_bytes, search)
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
    plain: Mapping[int, PlainPiece],
    outside: Sequence[Moment],
    limit_bytes: int,
    search: Search,
) -> tuple[dict[int, StepOrder], float]:
    orders: dict[int, StepOrder] = {}
    # What each piece keeps; until its order is known, what it may keep.
    kept = {piece: int(share * each.kept_bytes) for piece, each in plain.items()}
    for piece in plain:
        for is_last_try in (False, True):
            around = _surroundings(piece, runs, plain, kept)
            try:
                orders[piece], kept[piece] = search(piece, around, limit_bytes, kept[piece])
                break
            except DoesNotFit as refusal:
                # No order keeps so little: the least that one can keep.
                missing_bytes = (refusal.smallest_bytes or limit_bytes) - limit_bytes
                if missing_bytes <= 0 or is_last_try:
                    raise
                kept[piece] += missing_bytes
    for moment in outside:
        alive = (run for run in runs if run.forward[1] <= moment.index < run.backward[0])
        saved_bytes = sum(plain[run.piece].kept_bytes - kept[run.piece] for run in alive)
        total_bytes = moment.total_bytes - saved_bytes
        if total_bytes > limit_bytes:
            raise DoesNotFit(
                f"an operator between the pieces of the forward needs {total_bytes} bytes with all"
                f" that pieces keep, limit {limit_bytes} bytes"
            )
    return orders, sum(orders[run.piece].seconds for run in runs)
