"""`plan --pareto`: memory against time, every point a plan file, written as it is found."""

from pathlib import Path

from bayplan.choosing import limit_for
from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.data.limit import Limit
from bayplan.data.order import StepOrder
from bayplan.planner import Planner

__all__ = ["write_curve"]

_STEP_PERCENT = 10


def write_curve(
    planner: Planner, folder: Path, *, time_limit_seconds: float
) -> list[tuple[int, StepOrder]]:
    """Plan from the plain peak down to the smallest, in steps of a tenth.

    Files are named by the share of the plain peak (`0.40.json`); the last, `floor.json`, is the
    smallest limit that works. Each is replaced when a faster plan for it is found, so that what
    lies in the folder is good at any moment.

    Args:
        planner: of the question.
        folder: made if it is not there.
        time_limit_seconds: for everything.

    Returns:
        Limits and their plans.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise FileFault(f"cannot make the folder {folder}: {fault.strerror}") from None
    plain_bytes = planner.plain_peak_bytes
    smallest = planner.smallest(time_limit_seconds=time_limit_seconds / 4)
    floor_bytes = limit_for(min(planned.peak_bytes for planned in smallest.values()))
    name_of: dict[int, str] = {floor_bytes: "floor"}
    for percent in range(_STEP_PERCENT, 101, _STEP_PERCENT):
        limit_bytes = Limit(share=percent / 100).of(plain_bytes)
        if limit_bytes > floor_bytes:
            name_of[limit_bytes] = f"{percent / 100:.2f}"
    found: dict[int, StepOrder] = {}
    curve = planner.curve(
        sorted(name_of), time_limit_seconds=time_limit_seconds * 3 / 4, starts=smallest
    )
    for limit_bytes, order in curve:
        found[limit_bytes] = order
        made = planner.plan(order, limit=Limit(size_bytes=limit_bytes))
        files.write(folder / f"{name_of[limit_bytes]}.json", made)
    return sorted(found.items())
