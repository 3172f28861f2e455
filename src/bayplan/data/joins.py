"""Joins as text: sides parted by bars, the devices of a side by commas, with ranges.

0|1        device 0 and device 1, each with a wire of its own
0-3|4-7    the four on each side share a wire
0|1|2|3    four devices around a switch
"""

import re
from collections.abc import Iterable, Iterator

from bayplan.data.joint import Join

__all__ = ["join_text", "numbers_text", "parse_join"]

_RUN = re.compile(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?")
_EXAMPLE = "write sides of devices like '0|1' or '0-3|4-7'"


def parse_join(text: str, num_devices: int) -> Join:
    """Read a join among so many devices.

    Raises:
        ValueError: with what is wrong; the caller knows where the text stands.

    Example:
        >>> parse_join("0,1 | 2-3", 4)
        ((0, 1), (2, 3))
    """
    return tuple(tuple(_devices(side, text, num_devices)) for side in text.split("|"))


def _devices(side: str, text: str, num_devices: int) -> Iterator[int]:
    for run in side.split(","):
        match = _RUN.fullmatch(run)
        if match is None:
            raise ValueError(f"is {text!r}, of which {run.strip()!r} is no device; {_EXAMPLE}")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"is {text!r}: the range {run.strip()} goes down")
        if last >= num_devices:
            raise ValueError(
                f"is {text!r}, but there is no device {last}: they are 0 to {num_devices - 1}"
            )
        yield from range(first, last + 1)


def join_text(join: Join) -> str:
    """Print a join so that it reads back.

    Example:
        >>> join_text(((0, 1, 2, 3), (5,)))
        '0-3|5'
    """
    return "|".join(numbers_text(side) for side in join)


def numbers_text(numbers: Iterable[int]) -> str:
    """Numbers with their ranges.

    Example:
        >>> numbers_text([0, 1, 2, 7])
        '0-2,7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(str(end) for end in run) for run in runs)
