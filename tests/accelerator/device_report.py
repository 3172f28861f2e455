"""Writes what tests on a device found: `gpu-report.json`, and the same as text.

`make test-gpu` lets people with a GPU send us that. Both files are written anew after each test, so
they are there too when the run is interrupted or the process dies.
"""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

__all__ = ["DeviceReport", "pytest_addoption", "report_to"]

ON_ACCELERATOR, REPORT = "--on-accelerator", "--device-report"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        ON_ACCELERATOR,
        action="store_true",
        help="run tests marked `gpu` on this machine's accelerator, not on the test accelerator",
    )
    parser.addoption(REPORT, metavar="FOLDER", help="write gpu-report.json and .txt there")


def report_to(config: pytest.Config) -> None:
    """Let a run write its report where it is asked for."""
    folder = config.getoption(REPORT, default=None)
    if folder is not None:
        config.pluginmanager.register(DeviceReport(Path(folder)))


class DeviceReport:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tests: dict[str, dict[str, Any]] = {}
        self._device: dict[str, Any] | None = None
        self._num_chosen: int | None = None
        self._ended: str = "no: the run was cut off"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._num_chosen = len(session.items)
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            told: dict[str, Any] = dict(report.user_properties)
            self._device = told.get("device", self._device)
            row = {
                "test": report.nodeid,
                "outcome": report.outcome,
                "seconds": report.duration,
                "figures": told.get("figures", []),
                "why": "" if report.passed else _why(report),
            }
            self._tests[report.nodeid] = row
            self._write()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        is_whole = len(self._tests) == self._num_chosen
        self._ended = "yes" if is_whole else f"no: the run ended early, with code {int(exitstatus)}"
        self._write()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        where = self._folder / "gpu-report.json"
        terminalreporter.write_line(f"report: {where} and {where.with_suffix('.txt')}")

    def _write(self) -> None:
        outcomes = [row["outcome"] for row in self._tests.values()]
        report = {
            "is_whole": self._ended,
            "versions": {name: version(name) for name in ("bayplan", "torch")},
            "device": self._device,
            "chosen": self._num_chosen,
            **{each: outcomes.count(each) for each in ("passed", "failed", "skipped")},
            "tests": list(self._tests.values()),
        }
        self._put("gpu-report.json", json.dumps(report, indent=1) + "\n")
        self._put("gpu-report.txt", _text(report))

    def _put(self, name: str, text: str) -> None:
        """Whole or not at all, whenever the process is stopped."""
        temporary = self._folder / f".{name}.new"
        temporary.write_text(text, "utf-8")
        os.replace(temporary, self._folder / name)


def _why(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # file, line and reason of a skip
        return report.longrepr[2]
    return report.longreprtext[-4000:]


def _text(report: dict[str, Any]) -> str:
    device = report["device"] or {"name": "not known: no test got as far as the device"}
    counts = ", ".join(f"{report[each]} {each}" for each in ("passed", "failed", "skipped"))
    lines = [
        f"{counts} of {report['chosen']}; whole: {report['is_whole']}",
        *(f"{name} {number}" for name, number in report["versions"].items()),
        *(f"{name}: {value}" for name, value in device.items() if name != "machine"),
        *(f"{name}: {value}" for name, value in device.get("machine", {}).items()),
        "",
    ]
    for row in report["tests"]:
        lines.append(f"{row['outcome']:8}{row['seconds']:7.1f} s  {row['test']}")
        lines += [f"    {_beside(**figure)}" for figure in row["figures"]]
        lines += [f"    {line}" for line in row["why"].splitlines()]
    return "\n".join(lines) + "\n"


def _beside(what: str, predicted: float | None, measured: float) -> str:
    if predicted is None:
        return f"{what}: measured {measured:,}"
    off = f" ({predicted / measured - 1:+.2%})" if measured else ""
    return f"{what}: predicted {predicted:,}, measured {measured:,}{off}"
