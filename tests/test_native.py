"""C files compiled on first use: once, whole, and with a reason where that fails."""

import ctypes
import os
from pathlib import Path

import pytest

from bayplan.native import CompileFailed, compile_library, load_library

FLAGS = ("-shared", "-fPIC")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
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
    second = compile_library(source, tmp_path / "cache", flags=(*FLAGS, "-O2"))
    source.write_text("int answer(void) { return 43; }\n")
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
