"""Reading and writing the nouns as files: JSON everywhere, YAML where people write by hand.

Files are untrusted. They are decoded straight into the frozen types, which check themselves, so a
fault is named with its exact place (`$.stages[2].devices[0]`) and no code is ever run from a file.
A file of an older version is upgraded first, by its noun's `upgrades`. Writing goes to a temporary
neighbour first, so an interrupted command leaves no partial file.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from bayplan.data.errors import FileFault

__all__ = [
    "decode",
    "encode",
    "encode_yaml",
    "read",
    "write",
    "write_by_hand",
    "write_bytes",
]

# What a file that was given in the place of another one is good for.
_USES = {
    "bayplan/plan": "a plan is shown by `bayplan explain`, simulated with --cluster, and run with"
    " -o it makes a record",
    "bayplan/record": "a record is shown by `bayplan report`",
    "bayplan/graph": "a graph is replayed by `bayplan simulate`",
    "bayplan/buckets": "buckets are taken by `bayplan run --buckets`",
    "bayplan/cluster": "a cluster is shown by `bayplan cluster`",
    "bayplan/device": "a device is taken by --device",
}

Noun = TypeVar("Noun", bound=msgspec.Struct)
_Upgrade = Callable[[Any], Any]  # the fields of one version, to those of the next


class _Header(msgspec.Struct):
    """The two fields that every file starts with; the others are not looked at yet."""

    schema: str
    version: int


def encode(noun: msgspec.Struct) -> bytes:
    """Turn a noun into indented JSON."""
    config = noun.__struct_config__
    is_header_first = config.tag is None and not config.omit_defaults
    content = msgspec.json.encode(noun if is_header_first else _with_header(noun))
    return msgspec.json.format(content, indent=1) + b"\n"


def encode_yaml(noun: msgspec.Struct) -> bytes:
    """Turn a noun into YAML that a person goes on writing."""
    from bayplan.data.yaml_text import dump_yaml

    return dump_yaml(_with_header(noun)).encode()


def write_by_hand(path: Path | str, noun: msgspec.Struct) -> None:
    """Write a noun that people edit: as YAML, unless the path asks for JSON."""
    is_json = Path(path).suffix == ".json"
    write_bytes(path, encode(noun) if is_json else encode_yaml(noun))


def _with_header(noun: msgspec.Struct) -> dict[str, object]:
    """All fields, the header first: some nouns are written without defaults, or with a tag."""
    header = {name: getattr(noun, name) for name in _Header.__struct_fields__}
    return header | msgspec.to_builtins(noun)


def write(path: Path | str, noun: msgspec.Struct) -> None:
    """Write a noun as JSON, whole or not at all."""
    write_bytes(path, encode(noun))


def write_bytes(path: Path | str, content: bytes) -> None:
    """Write a file whole or not at all, even when interrupted."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        import tempfile  # here: --help does without it

        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as fault:
        raise FileFault(f"cannot write {target}: {fault.strerror}") from fault
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        # mkstemp makes private files; a result is an ordinary one, as the umask has it.
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(target)
    except BaseException as fault:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        if isinstance(fault, OSError):
            raise FileFault(f"cannot write {target}: {fault.strerror}") from fault
        raise


def read(path: Path | str, noun: type[Noun]) -> Noun:
    """Read a noun, or one of a union of them, from a `.json`, `.yaml` or `.yml` file."""
    source = Path(path)
    try:
        content = source.read_bytes()
    except OSError as fault:
        raise FileFault(f"cannot read {source}: {fault.strerror}") from fault
    return decode(content, noun, name=str(source), is_yaml=source.suffix in (".yaml", ".yml"))


def decode(content: bytes, noun: type[Noun], *, name: str, is_yaml: bool = False) -> Noun:
    """Decode and check file content; `name` is what the error calls it."""
    try:
        if is_yaml:
            fields = _load_yaml(content, name)
            header = msgspec.convert(fields, _Header)
        else:
            fields, header = None, msgspec.json.decode(content, type=_Header)
        upgrades = _upgrades(header, noun, name)
        if fields is None and not upgrades:
            return msgspec.json.decode(content, type=noun)
        fields = msgspec.json.decode(content) if fields is None else fields
        for upgrade in upgrades:
            fields = upgrade(fields)
        return msgspec.convert(fields, noun)
    except FileFault:
        raise
    except RecursionError:
        raise FileFault(f"{name}: nested too deeply to be a bayplan file") from None
    except (msgspec.DecodeError, ValueError) as fault:  # ValueError: bad UTF-8, or an upgrade's
        raise FileFault(f"{name}: {fault}") from None


def _load_yaml(content: bytes, name: str) -> object:
    from bayplan.data.yaml_text import YamlFault, load_yaml

    try:
        return load_yaml(content)
    except YamlFault as fault:
        raise FileFault(f"{name}: not YAML: {fault}") from None


def _upgrades(header: _Header, noun: type[msgspec.Struct], name: str) -> list[_Upgrade]:
    """What brings a file's fields to the newest version; refuses another noun or version."""
    member = (get_args(noun) or (noun,))[0]  # all of a union have the same header
    expected = {field.name: field.default for field in msgspec.structs.fields(member)}
    schema, newest = expected["schema"], expected["version"]
    if header.schema != schema:
        hint = f"; {_USES[header.schema]}" if header.schema in _USES else ""
        raise FileFault(f"{name}: schema is {header.schema!r}, expected {schema!r}{hint}")
    from_version: Mapping[int, _Upgrade] = getattr(member, "upgrades", {})
    known = [*from_version, newest]
    if header.version not in known:
        readable = f"version {newest}" if len(known) == 1 else f"versions {known[0]} to {newest}"
        change = "with this bayplan" if header.version < newest else "or install a newer bayplan"
        raise FileFault(
            f"{name}: version {header.version}, this bayplan reads {readable}; make the file again"
            f" {change}"
        )
    return [from_version[version] for version in range(header.version, newest)]
