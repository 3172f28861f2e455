"""What the tests of the malloc counter share: a library of known calls, and what is close enough.

`SLACK_BYTES` is what reading the counter and running Python may add by themselves: argument blocks,
a dictionary that grows, freed garbage.
"""

import ctypes
import gc
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bayplan.devices.malloc_counter import MallocCounter

SLACK_BYTES = 4 * 1024

PROBE_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
void *take(size_t size) { return malloc(size); }
void *take_cleared(size_t n, size_t size) { return calloc(n, size); }
void *take_aligned(size_t align, size_t size) { return aligned_alloc(align, size); }
void *take_memalign(size_t align, size_t size) { return memalign(align, size); }
void *resize(void *block, size_t size) { return realloc(block, size); }
void *resize_array(void *block, size_t n, size_t size) { return reallocarray(block, n, size); }
int take_posix(void **block, size_t align, size_t size) {
    return posix_memalign(block, align, size);
}
void drop(void *block) { free(block); }
size_t usable(void *block) { return malloc_usable_size(block); }
void *open_by_name(const char *name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }
/* An entry of kind GLOB_DAT and a pointer in data: do they lead elsewhere than the loader says? */
static void *(*volatile pointer)(size_t) = pvalloc;
int num_redirected(void) {
    return ((void *)valloc != dlsym(RTLD_DEFAULT, "valloc")) +
           ((void *)pointer != dlsym(RTLD_DEFAULT, "pvalloc"));
}
int errno_after_drop(void *block) { errno = 77; free(block); return errno; }
int errno_after_take(void) { errno = 77; free(malloc(1 << 20)); return errno; }
"""


def compile_probe(folder: Path, name: str, *flags: str) -> Path:
    source = folder / "probe.c"
    source.write_text(PROBE_SOURCE)
    library = folder / name
    command = ["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", *flags]
    subprocess.run([*command, "-o", str(library), str(source), "-ldl"], check=True)
    return library


def load_probe(path: Path, handle: int | None = None) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), handle=handle)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for names, result, arguments in (
        ("take", pointer, [size]),
        ("take_cleared take_aligned take_memalign", pointer, [size, size]),
        ("resize", pointer, [pointer, size]),
        ("resize_array", pointer, [pointer, size, size]),
        ("take_posix", ctypes.c_int, [ctypes.POINTER(pointer), size, size]),
        ("drop", None, [pointer]),
        ("usable", size, [pointer]),
        ("errno_after_drop", ctypes.c_int, [pointer]),
        ("open_by_name", pointer, [ctypes.c_char_p]),
    ):
        for name in names.split():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


@pytest.fixture(scope="session")
def compile_library() -> Callable[..., Path]:
    """Compile the probe: `compile_library(folder, "name.so", *flags)`."""
    return compile_probe


@pytest.fixture(scope="session")
def load_library() -> Callable[..., ctypes.CDLL]:
    """Load a compiled probe with the types of its functions."""
    return load_probe


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counter")


@pytest.fixture(scope="session", params=["lazy", "now"])
def probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Calls malloc by entries that are bound late (writable) or at once (RELRO)."""
    folder = tmp_path_factory.mktemp("probe")
    flags = [f"-Wl,-z,{request.param}", "-Wl,-z,relro"]
    return load_probe(compile_probe(folder, f"probe_{request.param}.so", *flags))


@pytest.fixture
def counter(cache_dir: Path) -> Iterator[MallocCounter]:
    gc.collect()  # what other tests have left must not be released while this one counts
    gc.disable()
    try:
        with MallocCounter.attach(cache_dir) as counter:
            yield counter
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """Check a number of bytes: `assert_close(measured, expected, above=rounding)`."""

    def check(measured: int, expected: int, *, above: int = 0) -> None:
        assert expected - SLACK_BYTES <= measured <= expected + above + SLACK_BYTES

    return check
