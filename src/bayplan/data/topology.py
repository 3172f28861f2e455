"""`Topology`: what `nvidia-smi topo -m` prints, read.

The text is a matrix, one row and one column for each GPU and each network card, and behind it what
processors are near. Its form has changed over the years: cards have come, then columns of NUMA
nodes, then a second legend; old drivers wrote SOC for SYS; a terminal underlines the head. People
paste it out of documents, with what stands around it. All of this is read, and anything else is
refused with the line that was not understood.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bayplan.data.errors import FileFault
from bayplan.data.joint import LinkKind

__all__ = ["Topology", "read_topology"]

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GPU = re.compile(r"GPU([0-9]{1,4})")
_CARD = re.compile(r"(?:NIC|mlx|hfi|bnxt|irdma|efa|cxi|rocep|ib)[0-9a-z_]*[0-9]", re.IGNORECASE)
_NVLINK = re.compile(r"NV([0-9]{1,2})")
_KINDS = {
    "PIX": LinkKind.PIX,
    "PXB": LinkKind.PXB,
    "PHB": LinkKind.PHB,
    "NODE": LinkKind.NODE,
    "SYS": LinkKind.SYS,
    "SOC": LinkKind.SYS,  # its name up to driver 375
}
_SELF = "X"
_WANTED = "the text that `nvidia-smi topo -m` prints, with a line of GPU0 GPU1 … above the rows"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The GPUs of one host and what joins them.

    Attributes:
        kinds: of the way from each GPU to each other one; None to itself.
        nvlinks: how many NVLinks join them, 0 where it is another way.
        affinities: the processors that are near each GPU, as text; empty if it is not said.
        cards: network cards, by name.
        nearest_card: of each GPU, by its place in `cards`; None if there are none.
    """

    kinds: tuple[tuple[LinkKind | None, ...], ...]
    nvlinks: tuple[tuple[int, ...], ...]
    affinities: tuple[str, ...]
    cards: tuple[str, ...] = ()
    nearest_card: tuple[int | None, ...] = ()

    @property
    def num_devices(self) -> int:
        """How many GPUs there are."""
        return len(self.kinds)


def read_topology(text: str, *, name: str = "topology") -> Topology:
    """Read the text, wherever in it the matrix stands.

    Raises:
        FileFault: with the number of the line that is not as expected.

    Example:
        >>> pair = read_topology('''
        ...         GPU0    GPU1    CPU Affinity
        ... GPU0     X      NV2     0-7
        ... GPU1    NV2      X      0-7''')
        >>> pair.kinds[0][1].value, pair.nvlinks[0][1], pair.affinities
        ('NVLINK', 2, ('0-7', '0-7'))
    """
    lines = [_ESCAPE.sub("", line) for line in text.splitlines()]
    return _Matrix(lines, name).read()


class _Matrix:
    """A walk along the lines of the text."""

    def __init__(self, lines: list[str], name: str) -> None:
        self.lines = lines
        self.name = name

    def read(self) -> Topology:
        head, columns = self._head()
        gpus = [column for column in columns if _GPU.fullmatch(column)]
        cards = [column for column in columns if not _GPU.fullmatch(column)]
        rows: dict[str, tuple[int, list[str], str]] = {}
        for at, words in self._rows(head):
            self._take_row(rows, columns, at, words)
            if len(rows) == len(columns):
                break
        missing = [gpu for gpu in gpus if gpu not in rows]
        if missing:
            raise self._fault(head, f"no row for {missing[0]}, which this line names")
        self._check_symmetric(rows, gpus, columns)
        entries = [[rows[gpu][1][columns.index(other)] for other in gpus] for gpu in gpus]
        return Topology(
            kinds=tuple(tuple(_kind(entry) for entry in row) for row in entries),
            nvlinks=tuple(tuple(_num_nvlinks(entry) for entry in row) for row in entries),
            affinities=tuple(rows[gpu][2] for gpu in gpus),
            cards=tuple(cards),
            nearest_card=tuple(
                _nearest([rows[gpu][1][columns.index(card)] for card in cards]) for gpu in gpus
            ),
        )

    def _head(self) -> tuple[int, list[str]]:
        """The number of the first line of names, and these."""
        for at, line in enumerate(self.lines):
            words = line.split()
            if words and words[0] == "GPU0" and _SELF not in words[:2]:
                return at, self._columns(at, words)
        first = next((at for at, line in enumerate(self.lines) if line.strip()), None)
        if first is None:
            raise FileFault(f"{self.name} is empty; expected {_WANTED}")
        shown = self.lines[first].strip()[:60]
        raise FileFault(
            f"{self.name}, line {first + 1}: {shown!r} and what follows is no topology; expected"
            f" {_WANTED}"
        )

    def _columns(self, at: int, words: list[str]) -> list[str]:
        columns: list[str] = []
        for word in words:
            if not _GPU.fullmatch(word) and not _CARD.fullmatch(word):
                if word not in ("CPU", "NUMA", "GPU"):  # CPU Affinity, NUMA Affinity, GPU NUMA ID
                    raise self._fault(
                        at, f"column {word!r} is neither a GPU, a network card nor an affinity"
                    )
                break
            if word in columns:
                raise self._fault(at, f"names {word} twice")
            columns.append(word)
        gpus = [column for column in columns if _GPU.fullmatch(column)]
        if gpus != [f"GPU{number}" for number in range(len(gpus))]:
            raise self._fault(at, f"GPUs are {', '.join(gpus)}, must count from GPU0 without a gap")
        return columns

    def _rows(self, head: int) -> Iterator[tuple[int, list[str]]]:
        """Lines of the matrix: up to its legend, or to the end of what was pasted."""
        for at in range(head + 1, len(self.lines)):
            words = self.lines[at].split()
            if not words:
                continue
            if words[0].rstrip(":") == "Legend" or words[0].startswith("```"):
                return
            yield at, words

    def _take_row(
        self,
        rows: dict[str, tuple[int, list[str], str]],
        columns: list[str],
        at: int,
        words: list[str],
    ) -> None:
        name, entries = words[0], words[1 : 1 + len(columns)]
        if name not in columns:
            raise self._fault(at, f"row {name!r} is not one of the columns {', '.join(columns)}")
        if name in rows:
            raise self._fault(at, f"a second row for {name}; the first is line {rows[name][0] + 1}")
        if len(entries) < len(columns):
            raise self._fault(
                at, f"{len(entries)} entries for {len(columns)} columns; the line is cut off"
            )
        for column, entry in zip(columns, entries, strict=True):
            if (entry == _SELF) != (column == name):
                raise self._fault(at, f"{name} to {column} is {entry!r}, X is a device to itself")
            if entry != _SELF and entry not in _KINDS and not _num_nvlinks(entry):
                known = ", ".join(_KINDS)
                raise self._fault(
                    at, f"{name} to {column} is {entry!r}; known are NV1, NV2, …, {known}"
                )
        behind = words[1 + len(columns) :]
        rows[name] = (at, entries, behind[0] if behind and behind[0] != "N/A" else "")

    def _check_symmetric(
        self, rows: dict[str, tuple[int, list[str], str]], gpus: list[str], columns: list[str]
    ) -> None:
        for gpu in gpus:
            at, entries, _ = rows[gpu]
            for other in gpus:
                entry, back = entries[columns.index(other)], rows[other][1][columns.index(gpu)]
                if entry != back:
                    raise self._fault(
                        at, f"{gpu} to {other} is {entry}, but {other} to {gpu} is {back}"
                    )

    def _fault(self, at: int, what: str) -> FileFault:
        return FileFault(f"{self.name}, line {at + 1}: {what}")


def _kind(entry: str) -> LinkKind | None:
    if entry == _SELF:
        return None
    return LinkKind.NVLINK if _num_nvlinks(entry) else _KINDS[entry]


def _num_nvlinks(entry: str) -> int:
    match = _NVLINK.fullmatch(entry)
    return int(match[1]) if match else 0


def _nearest(entries: list[str]) -> int | None:
    """The card with the shortest way; NVLINK is the first of the kinds, so PIX is near."""
    order = list(LinkKind)
    known = [
        (order.index(_KINDS[entry]), at) for at, entry in enumerate(entries) if entry in _KINDS
    ]
    return min(known)[1] if known else None
