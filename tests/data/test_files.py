import json
import os
import stat
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
import yaml

from bayplan.data import files
from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind
from bayplan.data.errors import FileFault
from bayplan.data.graph import StepGraph
from bayplan.data.plan import Plan


def changed(noun: msgspec.Struct, place: str, value: object) -> bytes:
    """The noun's JSON with one place, written as `stages.1.devices.0`, set to another value."""
    content = json.loads(files.encode(noun))
    *path, last = place.split(".")
    target = content
    for step in path:
        target = target[int(step) if isinstance(target, list) else step]
    target[int(last) if isinstance(target, list) else last] = value
    return json.dumps(content).encode()


def fault_of(content: bytes, noun: type[msgspec.Struct], *, is_yaml: bool = False) -> str:
    with pytest.raises(FileFault) as caught:
        files.decode(content, noun, name="given", is_yaml=is_yaml)
    return str(caught.value)


# Reading what was written.


def test_every_noun_reads_back_as_written(noun, tmp_path):
    path = tmp_path / "noun.json"
    files.write(path, noun)
    assert files.read(path, type(noun)) == noun


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_every_noun_reads_from_yaml(noun, tmp_path, suffix):
    path = tmp_path / f"noun{suffix}"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(noun)))
    assert files.read(path, type(noun)) == noun


def test_files_start_with_schema_and_version(noun):
    assert list(json.loads(files.encode(noun)))[:2] == ["schema", "version"]


def test_files_are_text_for_people(noun):
    text = files.encode(noun).decode()
    assert text.startswith('{\n "schema": "bayplan/')
    assert text.endswith("}\n")


def test_what_was_computed_from_a_graph_is_not_written(graph):
    before = files.encode(graph)
    assert graph.fingerprint
    assert graph.readers
    assert files.encode(graph) == before


# Files of another kind.


@pytest.mark.parametrize("is_yaml", [False, True])
def test_another_schema_is_named(graph, is_yaml):
    assert fault_of(files.encode(graph), Plan, is_yaml=is_yaml) == (
        "given: schema is 'bayplan/graph', expected 'bayplan/plan'; a graph is replayed by"
        " `bayplan simulate`"
    )


def test_another_version_is_named_with_what_to_do(plan):
    assert fault_of(changed(plan, "version", 7), Plan) == (
        "given: version 7, this bayplan reads versions 1 to 2; make the file again or install a"
        " newer bayplan"
    )


def test_a_noun_without_upgrades_reads_one_version(graph):
    assert fault_of(changed(graph, "version", 0), StepGraph) == (
        "given: version 0, this bayplan reads version 1; make the file again with this bayplan"
    )


def test_version_is_looked_at_before_fields_of_that_version(plan):
    content = json.loads(files.encode(plan)) | {"version": 3, "field_of_version_3": 1}
    assert "version 3" in fault_of(json.dumps(content).encode(), Plan)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "given: Object missing required field `schema`"),
        (b'{"schema": "bayplan/plan"}', "given: Object missing required field `version`"),
        (b'{"schema": 1}', "given: Expected `str`, got `int` - at `$.schema`"),
        (b"[]", "given: Expected `object`, got `array`"),
    ],
)
def test_a_file_without_header_is_refused(content, message):
    assert fault_of(content, Plan) == message
    assert fault_of(content, Plan, is_yaml=True) == message


# Faults with their place.


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            "stages.1.devices.0",
            "gpu",
            "given: Expected `int`, got `str` - at `$.stages[1].devices[0]`",
        ),
        (
            "stages.1.devices.0",
            -1,
            "given: devices[0] is -1, must be 0 or more - at `$.stages[1]`",
        ),
        ("stages.0.colour", 1, "given: Object contains unknown field `colour` - at `$.stages[0]`"),
        ("colour", 1, "given: Object contains unknown field `colour`"),
        ("route", "forget", "given: Invalid enum value 'forget' - at `$.route`"),
        ("kind", "car", "given: Invalid value 'car' - at `$.kind`"),
        (
            "actions.1.2",
            "1Z0",
            "given: actions[1][2]: '1Z0' is not an action; write stage, kind, index, like 2F0",
        ),
        ("buckets.0.parameters", None, "given: Expected `array`, got `null` - at"),
    ],
)
def test_a_fault_is_named_with_its_place(plan, place, value, message):
    assert fault_of(changed(plan, place, value), Plan).startswith(message)


def test_yaml_faults_are_named_with_their_place(cluster):
    content = msgspec.to_builtins(cluster)
    content["devices"] = [{"kind": "tiny-gpu", "host": "zero"}]
    assert fault_of(yaml.safe_dump(content).encode(), Cluster, is_yaml=True) == (
        "given: Expected `int`, got `str` - at `$.devices[0].host`"
    )


def test_a_missing_field_is_named(plan):
    content = json.loads(files.encode(plan))
    del content["stages"][1]["shares"]
    assert fault_of(json.dumps(content).encode(), Plan) == (
        "given: Object missing required field `shares` - at `$.stages[1]`"
    )


# Broken files.


def test_every_truncation_is_refused(plan):
    content = files.encode(plan).rstrip()
    for length in range(0, len(content), 7):
        assert fault_of(content[:length], Plan).startswith("given: ")


@pytest.mark.parametrize("is_yaml", [False, True])
@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01", b"\xff\xfe\xfa", b'{"schema": "\xff"}', b"null"]
)
def test_bytes_that_are_no_file_of_ours_are_refused(content, is_yaml):
    assert fault_of(content, Plan, is_yaml=is_yaml).startswith("given: ")


@pytest.mark.parametrize("is_yaml", [False, True])
def test_deep_nesting_is_refused(is_yaml):
    content = b'{"schema": "bayplan/plan", "version": 1, "stages": ' + b"[" * 100_000
    assert "given: nested too deeply" in fault_of(content, Plan, is_yaml=is_yaml)


@pytest.mark.parametrize(
    "text",
    [
        "name: 2024-99-99",  # looks like a date, and is none
        "name: !!int x",
        "name: !!float x",
        "name: !!bool x",
        "name: !!timestamp x",
        "name: 0x_",
        "name: !!python/object/apply:os.getcwd []",
        "name: [unclosed",
        "name: *unknown",
        "? [a]\n: b",
        "name: !!binary x",
        "1: 2",
    ],
)
def test_yaml_that_cannot_be_understood_is_refused(text):
    assert fault_of(text.encode(), Cluster, is_yaml=True).startswith("given: ")


def test_yaml_runs_no_code(tmp_path):
    witness = tmp_path / "witness"
    text = f"name: !!python/object/apply:pathlib.Path.touch [{witness}]"
    assert "not YAML" in fault_of(text.encode(), Cluster, is_yaml=True)
    assert not witness.exists()


def test_yaml_aliases_are_welcome(cluster):
    text = yaml.safe_dump(msgspec.to_builtins(cluster) | {"devices": None})
    text = text.replace("devices: null", "devices: [&d {kind: tiny-gpu, host: 0}, *d]")
    assert "*d" in text
    read = files.decode(text.encode(), Cluster, name="given", is_yaml=True)
    assert read.devices == cluster.devices


def test_an_alias_that_holds_itself_is_refused():
    text = "schema: bayplan/cluster\nversion: 1\nname: x\nkinds: &k {a: *k}\nhosts: []\ndevices: []"
    assert fault_of(text.encode(), Cluster, is_yaml=True).startswith("given: ")


def test_a_bomb_of_aliases_is_refused_at_once():
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    text = "schema: bayplan/cluster\nversion: 1\n" + "\n".join(levels) + "\nhosts: *a11\n"
    assert fault_of(text.encode(), Cluster, is_yaml=True).startswith("given: ")


def test_a_bomb_of_merged_mappings_is_refused_at_once():
    levels = ["a0: &a0 {x: 1, y: 2}"]
    levels += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 7)]
    text = "schema: bayplan/cluster\nversion: 1\n" + "\n".join(levels)
    start = time.process_time()
    assert fault_of(text.encode(), Cluster, is_yaml=True).startswith("given: ")
    assert time.process_time() - start < 0.5, "grows ninefold per level"


def test_merged_mappings_are_welcome(cluster):
    text = yaml.safe_dump(msgspec.to_builtins(cluster) | {"devices": None}).replace(
        "devices: null",
        "devices:\n- &first {kind: tiny-gpu, host: 0}\n- {<<: *first, host: 0}",
    )
    read = files.decode(text.encode(), Cluster, name="given", is_yaml=True)
    assert read.devices == cluster.devices


@pytest.mark.parametrize("text", ["0.25", "25e-2", "2.5E-1", ".25"])
def test_numbers_are_read_as_people_write_them(kind, text):
    # YAML 1.1, and so PyYAML, takes 25e-2 for a word: it has no dot.
    content = yaml.safe_dump(msgspec.to_builtins(kind)).replace("value: 5.0e-06", f"value: {text}")
    read = files.decode(content.encode(), DeviceKind, name="x", is_yaml=True)
    assert read.launch_seconds.value == 0.25


# Reading and writing on a real disk.


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileFault, match=r"cannot read .*absent\.json: No such file or directory"):
        files.read(tmp_path / "absent.json", Plan)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(FileFault, match=r"cannot read .*: Is a directory"):
        files.read(tmp_path, Plan)


def test_the_file_is_named_in_its_faults(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(FileFault) as caught:
        files.read(str(path), Plan)
    assert str(caught.value) == f"{path}: Object missing required field `schema`"


def test_writing_makes_the_folders_and_an_ordinary_file(plan, tmp_path):
    path = tmp_path / "a" / "b" / "plan.json"
    before = os.umask(0o027)
    try:
        files.write(str(path), plan)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]


def test_writing_replaces_what_was_there(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a longer old content")
    files.write_bytes(path, b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    interruption, tmp_path, monkeypatch
):
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def interrupt(self: Path, target: Path) -> None:
        assert self.read_bytes() == b"new", "the content is complete before it takes the name"
        raise interruption

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(interruption):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(FileFault, match=r"cannot write .*x: No space left on device"):
        files.write_bytes(tmp_path / "x", b"new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(FileFault, match=r"cannot write .*x: Permission denied"):
        files.write_bytes(tmp_path / "x", b"new")


def test_a_folder_that_refuses_is_named(tmp_path, monkeypatch):
    def refuse(**options: object) -> tuple[int, str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(FileFault, match=r"cannot write .*x: Permission denied"):
        files.write_bytes(tmp_path / "x", b"new")


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFault, match=r"cannot write .*x: (File exists|Not a directory)"):
        files.write_bytes(tmp_path / "file" / "x", b"new")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(FileFault, match=r"cannot write .*x: Is a directory"):
        files.write_bytes(tmp_path / "x", b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_graph_of_realistic_size_is_fast_enough_to_read(graph):
    nodes = graph.nodes * 4000
    large = msgspec.structs.replace(graph, nodes=nodes)
    assert files.decode(files.encode(large), StepGraph, name="x").fingerprint == large.fingerprint
