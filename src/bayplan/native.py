"""Small C and C++ files of ours, compiled on first use with the system's compiler and kept.

No wheel per platform and no build step: a machine that can run PyTorch from source nearly always
has `cc`, and those that have none get a clear reason, with which the caller falls back.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["CompileFailed", "compile_library", "load_library"]

_COMPILERS = {".c": ("cc", "gcc", "clang"), ".cpp": ("c++", "g++", "clang++")}
_LANGUAGES = {".c": "C", ".cpp": "C++"}
_COMPILE_SECONDS = 120


class CompileFailed(RuntimeError):
    """The file cannot be made into a library here; the message says why."""


def compile_library(
    source: Path, cache_dir: Path, *, flags: tuple[str, ...], libraries: tuple[str, ...] = ()
) -> Path:
    """Return the compiled library; compile it unless `cache_dir` has it already.

    The name holds a hash of source, flags, machine and C library, and the file appears whole or
    not at all, so processes and machines may share the directory.

    Args:
        cache_dir: only this user may write to it, because its files are loaded into the process.
        libraries: to link with, after the source, such as `-ldl`.

    Raises:
        CompileFailed: no compiler, a compiler that fails, or a directory that cannot be written.
    """
    key = repr((source.read_text("utf-8"), flags, platform.machine(), platform.libc_ver()))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    target = cache_dir / f"{source.stem}-{platform.machine()}-{digest}.so"
    if target.exists():
        return target
    compilers = _COMPILERS[source.suffix]
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        language = _LANGUAGES[source.suffix]
        raise CompileFailed(
            f"no {language} compiler ({', '.join(compilers)}) on PATH; install one, "
            f"or put {target.name} compiled elsewhere into {cache_dir}"
        )
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".compiling-") as folder:
            built = Path(folder) / target.name
            command = [compiler, *flags, "-o", str(built), str(source), *libraries]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
            os.replace(built, target)
    except subprocess.TimeoutExpired as error:
        raise CompileFailed(f"{compiler} hangs: {error}") from error
    except subprocess.CalledProcessError as error:
        output = error.stderr.decode(errors="replace").strip()
        raise CompileFailed(f"{compiler} fails:\n{output}") from error
    except OSError as error:
        raise CompileFailed(f"cannot write to {cache_dir}: {error}") from error
    return target


def load_library(
    source: Path,
    cache_dir: Path | None,
    *,
    flags: tuple[str, ...],
    libraries: tuple[str, ...] = (),
    loader: type[ctypes.CDLL] = ctypes.CDLL,
) -> ctypes.CDLL:
    """Compile a file as `compile_library` does, and load it.

    Args:
        cache_dir: None, or a directory that cannot be written, compiles for this process alone.
    """
    if cache_dir is not None:
        try:
            path = compile_library(source, cache_dir, flags=flags, libraries=libraries)
            return loader(str(path.absolute()))
        except CompileFailed as failure:
            if not isinstance(failure.__cause__, OSError):
                raise
    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder:
        return loader(str(compile_library(source, Path(folder), flags=flags, libraries=libraries)))
