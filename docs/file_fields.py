"""Writes file-fields.md: every field of every file, from the types that read and write them.

    python docs/file_fields.py

`make docs` runs it, and a test fails where the page and the types differ.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from bayplan.data.checkpoint import Checkpoint
from bayplan.data.cluster_file import ClusterFile
from bayplan.data.device import DeviceKind
from bayplan.data.exchange import BucketFile
from bayplan.data.graph import StepGraph
from bayplan.data.plan import DevicePlan, RankPlan
from bayplan.data.profile import Profile
from bayplan.data.record import RunRecord
from bayplan.data.verdict import Verdict

PAGE = Path(__file__).with_name("file-fields.md")
FILES: dict[str, type[msgspec.Struct]] = {
    "graph": StepGraph,
    "profile": Profile,
    "record": RunRecord,
    "checkpoint": Checkpoint,
    "verdict": Verdict,
    "device": DeviceKind,
    "cluster": ClusterFile,
    "plan for one device": DevicePlan,
    "plan for ranks": RankPlan,
    "buckets": BucketFile,
}
_INTRO = """\
# Fields of all files

<!-- Written by docs/file_fields.py from the types in src/bayplan/data: change their docstrings. -->

Every field, with its type and default. A field without a default must be there. Sizes are in bytes
and times in seconds. [Files](files.md) and [the plan file](plan-file.md) have the rules, and an
example of each.
"""
_WORDS: dict[object, str] = {
    **{int: "whole number", float: "number", str: "text", bool: "true or false"},
    typing.Any: "anything",
}


def page() -> str:
    parts, shown = [_INTRO], set()
    for title, noun in FILES.items():
        parts.append(f"## {title}\n\n{_table(noun)}")
        for part in _parts_of(noun):
            if part not in shown:
                shown.add(part)
                parts.append(f"### {part.__name__}\n\n{_table(part)}")
    return "\n".join(parts)


def _parts_of(struct: type) -> Iterator[type]:
    """The structs inside of a struct, each before its own."""
    for hint in _hints(struct).values():
        for part in _structs_in(hint):
            yield part
            yield from _parts_of(part)


def _structs_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in typing.get_args(hint):
        yield from _structs_in(inner)


def _hints(struct: type) -> dict[str, object]:
    hints = typing.get_type_hints(struct)
    return {field.name: hints[field.name] for field in msgspec.structs.fields(struct)}


def _table(struct: type) -> str:
    about, meanings = _documented(struct)
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    if "schema" in fields:
        schema, version = (fields.pop(name).default for name in ("schema", "version"))
        about += f"\n\n`schema` is `{schema}`, `version` is {version}."
    lines = [about, "", "| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    tag = struct.__struct_config__.tag
    if tag is not None:
        lines.append(f"| `{struct.__struct_config__.tag_field}` | `{tag}` | | |")
    hints = _hints(struct)
    for name, field in fields.items():
        cells = (f"`{name}`", _type(hints[name]), _default(field), meanings.pop(name, ""))
        lines.append(f"| {' | '.join(cells)} |")
    assert not meanings, f"{struct.__name__} documents {[*meanings]}, which it does not have"
    return "\n".join(lines) + "\n"


def _type(hint: object) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(each) for each in inner)
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return f"list of {_type(inner[0])}"
        return f"list of {len(inner)}: {', '.join(map(_type, inner))}"
    if origin is dict:
        return f"{_type(inner[1])} by {_type(inner[0])}"
    if hint is type(None):
        return "null"
    assert isinstance(hint, type), hint
    if issubclass(hint, StrEnum):
        return ", ".join(f"`{each}`" for each in hint)
    if issubclass(hint, msgspec.Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return _WORDS[hint]


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return "none"
    if field.default is msgspec.NODEFAULT:
        return ""
    if field.default in ((), ""):
        return "none" if field.default == () else "empty"
    return "`" + msgspec.json.encode(field.default).decode().strip('"') + "`"


def _documented(struct: type) -> tuple[str, dict[str, str]]:
    """The first line of a struct's docstring, and what it and its bases say of their fields."""
    meanings: dict[str, str] = {}
    for each in reversed(struct.__mro__):
        text = inspect.cleandoc(vars(each).get("__doc__") or "")
        if "Attributes:\n" not in text:
            continue
        section = re.split(r"\n\n", text.partition("Attributes:\n")[2])[0]
        for names, meaning in re.findall(r"^    (\w.*?): (.*(?:\n {5,}.*)*)", section, re.M):
            told = re.sub(r"\s+", " ", meaning).replace("|", "\\|").rstrip(".")
            told = told.replace("None", "null")
            meanings |= {name: told for name in names.split(", ")}
    return inspect.cleandoc(struct.__doc__ or "").partition("\n\n")[0].replace("\n", " "), meanings


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
