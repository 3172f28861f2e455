"""Small C and C++ files of ours: compiled in the wheel, or on first use and kept.

A wheel for a platform brings every C file compiled, so nothing is needed where it is installed. In
a checkout, and from a wheel that was built without a compiler, the system's compiler makes them
when they are first used. Without one the callers fall back, and one warning says so. C++ files need
the headers of the torch that is installed, so they are never in a wheel.

The build of the wheel (`hatch_build.py`) imports this file alone: it stands on Python's library.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

__all__ = [
    *("CompileFailed", "compile_file", "compile_library", "load_library", "load_part"),
    *("named_flags", "shipped_name", "why_untrusted"),
]

_COMPILERS = {".c": ("cc", "gcc", "clang"), ".cpp": ("c++", "g++", "clang++")}
_LANGUAGES = {".c": "C", ".cpp": "C++"}
_COMPILE_SECONDS = 600  # torch's headers take half a minute, and far longer beside other work
_has_warned = False


class CompileFailed(RuntimeError):
    """The file cannot be made into a library here; the message says why."""


def named_flags(source: Path) -> tuple[str, ...]:
    """The flags on a C file's first line, `// cc -O3 …`: the same in a wheel and on first use."""
    line = source.read_text("utf-8").partition("\n")[0]
    if not line.startswith("// cc "):
        raise ValueError(f"{source} does not begin with the flags to compile it, as `// cc -O3`")
    return tuple(line.split()[2:])


def shipped_name(source: Path) -> str:
    """The name of a C file's library in a wheel; a hash ties it to the file that lies beside it."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    return f"{source.stem}-{platform.machine()}-{digest}.so"


def compile_file(source: Path, target: Path, flags: tuple[str, ...]) -> None:
    """Make a library of a file; it appears whole or not at all.

    Raises:
        CompileFailed: no compiler, a compiler that fails, or a directory that cannot be written.
    """
    compilers = _COMPILERS[source.suffix]
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        language = _LANGUAGES[source.suffix]
        raise CompileFailed(f"no {language} compiler ({', '.join(compilers)}) on PATH; install one")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compiling-") as folder:
            built = Path(folder) / target.name
            # Flags come last, because libraries among them must follow what uses them.
            command = [compiler, "-shared", "-fPIC", "-o", str(built), str(source), *flags]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
            os.replace(built, target)
    except subprocess.TimeoutExpired as error:
        raise CompileFailed(f"{compiler} hangs: {error}") from error
    except subprocess.CalledProcessError as error:
        output = error.stderr.decode(errors="replace").strip()
        raise CompileFailed(f"{compiler} fails:\n{output}") from error
    except OSError as error:
        raise CompileFailed(f"cannot write to {target.parent}: {error}") from error


def compile_library(source: Path, cache_dir: Path, *, flags: tuple[str, ...]) -> Path:
    """Return the compiled library; compile it unless `cache_dir` has it already.

    The name holds a hash of source, flags, machine and C library, so processes and machines may
    share the directory.

    Args:
        cache_dir: only this user may write to it, because its files are loaded into the process.

    Raises:
        CompileFailed: as by `compile_file`, or others may write to the directory or the library.
    """
    key = repr((source.read_text("utf-8"), flags, platform.machine(), platform.libc_ver()))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    target = cache_dir / f"{source.stem}-{platform.machine()}-{digest}.so"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompileFailed(f"cannot write to {cache_dir}: {error}") from error
    _check_trusted(cache_dir)
    if not target.exists():
        compile_file(source, target, flags)
    _check_trusted(target)
    return target


def _check_trusted(path: Path) -> None:
    if why := why_untrusted(path.stat()):
        refusal = f"{path} {why}, and what is in it would be run"
        raise CompileFailed(refusal) from PermissionError(refusal)


def why_untrusted(status: os.stat_result) -> str:
    """Why a file or folder may be somebody else's work; empty where it is not.

    The administrator may do anything anyway, a user's own group is the user, and in a folder like
    /tmp nobody can replace what is another's.
    """
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH and not is_sticky:
        return "may be written by everybody"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in (os.getegid(), 0):
        return f"may be written by group {status.st_gid}"
    return ""


def load_library(
    source: Path,
    cache_dir: Path | None,
    *,
    flags: tuple[str, ...],
    loader: type[ctypes.CDLL] = ctypes.CDLL,
) -> ctypes.CDLL:
    """Compile a file as `compile_library` does, and load it.

    Args:
        cache_dir: None, or a directory that cannot be written, compiles for this process alone.
    """
    if cache_dir is not None:
        try:
            return loader(str(compile_library(source, cache_dir, flags=flags).absolute()))
        except CompileFailed as failure:
            if not isinstance(failure.__cause__, OSError):
                raise
    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder:
        return loader(str(compile_library(source, Path(folder), flags=flags)))


def load_part(
    source: Path, cache_dir: Path | None, *, loader: type[ctypes.CDLL] = ctypes.CDLL
) -> ctypes.CDLL:
    """Load a C file of the package as the wheel brings it; else as `load_library` does.

    Raises:
        CompileFailed: there is neither a library that loads here nor a compiler; a warning has said
            so, once in a process.
    """
    shipped = source.with_name(shipped_name(source))
    if shipped.exists():
        with suppress(OSError):  # another C library, or a disk from which nothing may be executed
            return loader(str(shipped))
    try:
        return load_library(source, cache_dir, flags=named_flags(source), loader=loader)
    except CompileFailed as failure:
        _warn_once(str(failure))
        raise


def _warn_once(reason: str) -> None:
    """Say what is missed, at the user's line rather than at one of ours."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    not_theirs = re.compile(rf"{re.escape(str(Path(__file__).parent))}|.*/(site|dist)-packages/")
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and not_theirs.match(frame.f_code.co_filename):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(
        "parts of bayplan in C are missing, so plans are searched in Python, some hundred times"
        " slower; memory is measured by tensor storages only, scratch memory of kernels is missed,"
        f" and steps take longer while they are recorded: {reason} (a wheel for this kind of"
        " machine brings them compiled)",
        stacklevel=depth,
    )
