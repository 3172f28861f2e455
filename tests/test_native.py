"""C files: as a wheel brings them, or compiled on first use, with a reason where that fails."""

import ctypes
import os
import warnings
from pathlib import Path

import pytest

from bayplan import native
from bayplan.native import (
    CompileFailed,
    compile_file,
    compile_library,
    load_library,
    load_part,
    shipped_name,
)

FLAGS = ("-O1",)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("// cc -O1\nint answer(void) { return 42; }\n")
    return path


def test_compiled_library_loads(source: Path, tmp_path: Path) -> None:
    path = compile_library(source, tmp_path / "cache", flags=FLAGS)
    assert path.name.startswith("answer-")
    assert ctypes.CDLL(str(path)).answer() == 42


def test_it_is_compiled_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compile_library(source, tmp_path / "cache", flags=FLAGS)
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler is needed any more
    assert compile_library(source, tmp_path / "cache", flags=FLAGS) == path
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_other_source_or_flags_are_another_library(source: Path, tmp_path: Path) -> None:
    first = compile_library(source, tmp_path / "cache", flags=FLAGS)
    second = compile_library(source, tmp_path / "cache", flags=("-O2",))
    source.write_text("// cc -O1\nint answer(void) { return 43; }\n")
    third = compile_library(source, tmp_path / "cache", flags=FLAGS)
    assert len({first, second, third}) == 3


def test_no_compiler_is_said(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileFailed, match=r"no C compiler \(cc, gcc, clang\)"):
        compile_library(source, tmp_path / "cache", flags=FLAGS)


def test_broken_source_is_said_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("int answer(void) { return fortytwo; }\n")
    with pytest.raises(CompileFailed, match="fortytwo"):
        compile_library(source, tmp_path / "cache", flags=FLAGS)
    assert os.listdir(tmp_path / "cache") == []


def test_unwritable_directory_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileFailed, match="cannot write"):
        compile_library(source, source, flags=FLAGS)


def test_library_is_loaded_without_a_cache_that_can_be_written(source: Path) -> None:
    for cache_dir in (source, None):
        assert load_library(source, cache_dir, flags=FLAGS).answer() == 42


@pytest.fixture
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not warned yet."""
    monkeypatch.setattr(native, "_has_warned", False)


@pytest.mark.usefixtures("_nothing_said")
def test_library_of_the_wheel_needs_no_compiler(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_file(source, source.with_name(shipped_name(source)), FLAGS)
    monkeypatch.setenv("PATH", "")
    assert load_part(source, tmp_path / "cache").answer() == 42
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("_nothing_said")
def test_library_of_the_wheel_that_does_not_load_is_compiled_here(
    source: Path, tmp_path: Path
) -> None:
    """As with another C library, or on a disk from which nothing may be executed."""
    source.with_name(shipped_name(source)).write_bytes(b"not for this machine")
    assert load_part(source, tmp_path / "cache").answer() == 42


@pytest.mark.usefixtures("_nothing_said")
def test_library_of_another_source_is_left_alone(source: Path, tmp_path: Path) -> None:
    compile_file(source, source.with_name(shipped_name(source)), FLAGS)
    source.write_text("// cc -O1\nint answer(void) { return 43; }\n")
    assert load_part(source, tmp_path / "cache").answer() == 43


@pytest.mark.usefixtures("_nothing_said")
def test_missing_parts_are_said_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("answer.c", "other.c"):
            other = source.with_name(name)
            other.write_text(source.read_text())
            with pytest.raises(CompileFailed):
                load_part(other, tmp_path / "cache")
    (warning,) = caught
    assert "hundred times slower" in str(warning.message)
    assert warning.filename == __file__, "the user's line, not one of ours"


def test_file_without_flags_is_said(source: Path) -> None:
    source.write_text("int answer(void) { return 42; }\n")
    with pytest.raises(ValueError, match="does not begin with the flags"):
        load_part(source, None)
