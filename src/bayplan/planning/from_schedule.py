"""The choices behind a schedule, so that a search can start from one made elsewhere.

A buffer that is not made again between two uses was kept. One made once was held, one made several
times was released, or held once its next use was near enough. Schedules can say more than choices
(release a buffer late in a gap, say), so what comes back may differ: judge it before use.
"""

from collections.abc import Sequence

from bayplan.data.program import Program
from bayplan.planning.choices import HOLD, KEEP, RELEASE, WINDOWS, Choices, Gap, plain_choices

__all__ = ["choices_of_schedule"]


def choices_of_schedule(program: Program, gaps: Sequence[Gap], schedule: Sequence[int]) -> Choices:
    """Choices that lead to the schedule, or near it."""
    choices = plain_choices(gaps)
    gap_of: dict[int, int] = {}
    for index in range(len(gaps) - 1, -1, -1):
        gap_of[gaps[index].buffer] = index
    made_before: list[list[int]] = [[] for _ in gaps]  # the plain ops before which it was made
    is_read: list[bool] = [False] * len(gaps)  # by a repeat, before anything made it again
    following = program.first_backward
    for index in schedule[program.first_backward :]:
        if index == following:
            following += 1
            for buffer in gap_of.keys() & program.ops[index].reads:
                gap_of[buffer] += 1
            continue
        for buffer in gap_of.keys() & program.repeats[index].reads:
            is_read[gap_of[buffer]] |= not made_before[gap_of[buffer]]
        for buffer in gap_of.keys() & program.repeats[index].writes:
            made_before[gap_of[buffer]].append(following)
    for index, gap in enumerate(gaps):
        choices[index] = _choice(gap, sorted({*made_before[index]}), is_read=is_read[index])
    return choices


def _choice(gap: Gap, made_before: list[int], *, is_read: bool) -> int:
    if not made_before:
        return KEEP if gap.end >= 0 or is_read else RELEASE
    if len(made_before) == 1:
        return HOLD
    if gap.end < 0 or made_before[-1] == gap.end:
        return RELEASE
    distance = gap.end - made_before[-1]
    near = [choice for choice in range(RELEASE + 1, len(WINDOWS)) if WINDOWS[choice] >= distance]
    return min(near, key=WINDOWS.__getitem__, default=HOLD)
