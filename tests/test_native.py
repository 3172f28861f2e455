"""C files: as a wheel brings them, or compiled on first use, with a reason where that fails."""

import ctypes
import os
import stat
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
    why_untrusted,
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


@pytest.mark.parametrize("what", ["folder", "library"])
def test_what_others_can_write_is_not_loaded(source: Path, tmp_path: Path, what: str) -> None:
    # A cache in a shared folder was loaded from, whoever had put the library there.
    cache = tmp_path / "cache"
    path = compile_library(source, cache, flags=FLAGS)
    source_of_others = tmp_path / "other.c"
    source_of_others.write_text("int answer(void) { return 666; }\n")
    compile_file(source_of_others, path, FLAGS)
    (cache if what == "folder" else path).chmod(0o777)
    with pytest.raises(CompileFailed, match="may be written by everybody"):
        compile_library(source, cache, flags=FLAGS)
    assert load_library(source, cache, flags=FLAGS).answer() == 42  # for this process alone


def test_who_may_have_written_a_file() -> None:
    def status(mode: int, user: int, group: int) -> os.stat_result:
        return os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))

    own, other = (os.geteuid(), os.getegid()), 54321
    assert not why_untrusted(status(0o644, *own))
    assert not why_untrusted(status(0o664, *own))  # a user's own group
    assert not why_untrusted(status(0o644, 0, 0))
    assert why_untrusted(status(0o644, other, own[1])) == f"belongs to user {other}"
    assert not why_untrusted(status(stat.S_IFDIR | 0o1777, 0, 0))  # as /tmp is
    assert why_untrusted(status(0o646, *own)) == "may be written by everybody"
    assert why_untrusted(status(0o664, own[0], other)) == f"may be written by group {other}"
