"""Runs tests where the test accelerator is registered: in a process of their own.

A process has one PrivateUse1, for good: once `bay` is registered, `torch.accelerator` means it, the
optimizers choose other kernels, and nothing undoes that. So no process that runs other tests may
register it. A test of these folders is collected and reported by pytest as any other; its body runs
in a child that has the device. The tests of a file share a child, one after the other; a test with
`@pytest.mark.ranks(n)` runs in n of them at once, which have a process group's environment each. A
child whose device a test has broken, or that died, is followed by a fresh one.

A test may take parameters and `tmp_path`, which reach the child as JSON.

With `--on-accelerator` no device is registered: tests marked `gpu` run on the machine's own.
"""

import gc
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bay import compiled, has_failed, is_available, register, set_cap
from device_report import ON_ACCELERATOR, report_to

__all__ = ["children", "device_library", "pytest_configure", "pytest_pyfunc_call"]

_HERE = Path(__file__).parent
_SECONDS = 240  # for a test; those that wait for each other forever are stopped
_MEMORY_BYTES = 2 << 30


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n): the test runs in n processes at once")
    if config.getoption(ON_ACCELERATOR, default=False):
        import torch

        if not torch.accelerator.is_available():
            why = (
                "torch finds no accelerator here (`bayplan doctor` tells more), so nothing was run"
            )
            pytest.exit(why, returncode=2)
    report_to(config)


@pytest.fixture(scope="session")
def device_library(request: pytest.FixtureRequest) -> Path | None:
    """The compiled device, kept from one run of the tests to the next; None for a real one."""
    if request.config.getoption(ON_ACCELERATOR, default=False):
        return None
    if shutil.which("c++") is None:
        pytest.skip("the test accelerator needs a C++ compiler (c++) on PATH")
    return compiled(request.config.cache.mkdir("accelerator"))


class Child:
    """A process with the device, that runs functions of test files by name."""

    def __init__(self, library: Path | None) -> None:
        self.is_usable = True
        self.told: dict[str, Any] = {}  # of the device, and figures of the last function
        command = [sys.executable, __file__, *([] if library is None else [str(library)])]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def begin(self, path: Path, name: str, arguments: dict[str, Any], rank: dict[str, str]) -> None:
        """Let it call a function of a file, with a rank's environment."""
        assert self._process.stdin is not None
        told = {"path": str(path), "name": name, "arguments": arguments, "rank": rank}
        self._process.stdin.write(json.dumps(told, default=str) + "\n")
        self._process.stdin.flush()

    def end(self) -> str:
        """What went wrong, once the function has returned; "" if nothing did."""
        assert self._process.stdout is not None
        with _killed_after(_SECONDS, self._process):
            line = self._process.stdout.readline()
        if line:
            answer = json.loads(line)
            self.is_usable = not answer["is_broken"]
            self.told = answer["told"]
            return answer["fault"]
        self.is_usable = False
        self._errors.seek(0)
        return f"the process ended with {self._process.wait()}:\n{self._errors.read()[-4000:]}"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with _killed_after(20, self._process):
            self._process.wait()
        self._errors.close()


@contextmanager
def _killed_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    from threading import Timer

    timer = Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.fixture(scope="module")
def children(device_library: Path | None) -> Iterator[list[Child]]:
    """The children of a test file, by rank; none before the first test."""
    started: list[Child] = []
    yield started
    for each in started:
        each.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test's body in its child, or in as many as it has ranks."""
    library = pyfuncitem._request.getfixturevalue("device_library")
    started = pyfuncitem._request.getfixturevalue("children")
    arguments = {key: pyfuncitem.funcargs[key] for key in pyfuncitem._fixtureinfo.argnames}
    ranks = pyfuncitem.get_closest_marker("ranks")
    environments = [{}] if ranks is None else list(_environments(ranks.args[0]))
    for broken in [each for each in started if not each.is_usable]:
        broken.close()
        started.remove(broken)
    started += [Child(library) for _ in range(len(environments) - len(started))]
    running = started[: len(environments)]
    for each, rank in zip(running, environments, strict=True):
        each.begin(pyfuncitem.path, pyfuncitem.originalname, arguments, rank)
    faults = [each.end() for each in running]
    pyfuncitem.user_properties += running[0].told.items()
    told = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]
    if told:
        for each in running:
            each.is_usable = False
        pytest.fail("\n".join(told), pytrace=False)
    return True


def _environments(number: int) -> Iterator[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["BAYPLAN_TIMEOUT"] = "60"  # a busy machine is silent for long; in these processes alone
    for rank in range(number):
        yield {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _serve(library: Path | None) -> None:
    """Run what is asked for on standard input, and answer on what was standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is told if the process dies
    if library is None:
        _be_repeatable()
    else:
        register(library)
    from device_here import facts, take_figures  # here: it asks which device is registered

    modules: dict[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        fault = ""
        if is_available():
            set_cap(_MEMORY_BYTES, 0)
        os.environ.update(asked["rank"])
        try:
            if asked["path"] not in modules:
                modules[asked["path"]] = _module(Path(asked["path"]))
            getattr(modules[asked["path"]], asked["name"])(**asked["arguments"])
        except BaseException:
            fault = traceback.format_exc()
        gc.collect()
        is_broken = is_available() and has_failed()
        told = (
            {"figures": take_figures()}
            if is_broken
            else {"figures": take_figures(), "device": facts()}
        )
        answers.write(json.dumps({"fault": fault, "is_broken": is_broken, "told": told}) + "\n")
        answers.flush()


def _be_repeatable() -> None:
    """Let libraries of a GPU compute the same bits each time, as far as they can."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _serve(Path(sys.argv[1]) if sys.argv[1:] else None)
