"""What hatchling does when it builds a wheel of bayplan: the C files are compiled into it.

The libraries are loaded by ctypes and know nothing of Python, so one wheel serves every version of
it. Where they cannot be compiled the wheel is a pure one, and whoever installs it compiles on first
use. The same source and compiler give the same bytes, wherever the source lies.
"""

import importlib.util
import platform
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_OLDEST_GLIBC = 17  # of the tags that pip knows; 2.17 came with the first aarch64


class CompiledParts(BuildHookInterface):
    """Compiles every C file of the package, for a wheel that is no editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # compiles on first use, so an edited C file is seen
            return
        native = _native(Path(self.root))
        package = Path(self.root, "src", "bayplan")
        self._folder = tempfile.TemporaryDirectory(prefix="bayplan-wheel-")
        flags = (f"-ffile-prefix-map={self.root}=.", "-s")
        libraries = {}
        try:
            for source in sorted(package.rglob("*.c")):
                built = Path(self._folder.name, native.shipped_name(source))
                native.compile_file(source, built, (*native.named_flags(source), *flags))
                libraries[built] = source.with_name(built.name).relative_to(package.parent)
        except native.CompileFailed as failure:
            self.app.display_warning(f"a pure wheel, without compiled parts: {failure}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(list(libraries))}"
        build_data["force_include"] |= {str(built): str(at) for built, at in libraries.items()}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


def _native(root: Path) -> ModuleType:
    """`bayplan.native` by itself: `bayplan` stands on torch, which no build has."""
    found = importlib.util.spec_from_file_location("native", root / "src" / "bayplan" / "native.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _platform_tag(libraries: list[Path]) -> str:
    """The oldest glibc that has all that the libraries ask for; they link to nothing else."""
    machine = platform.machine()
    if platform.libc_ver()[0] != "glibc":
        return f"linux_{machine}"
    asked = re.findall(rb"GLIBC_2\.(\d+)", b"".join(path.read_bytes() for path in libraries))
    return f"manylinux_2_{max(_OLDEST_GLIBC, *map(int, asked))}_{machine}"
