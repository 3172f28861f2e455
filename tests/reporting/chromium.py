"""A headless Chromium, driven over a pipe: what a page draws, asks for and complains of."""

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

__all__ = ["WHY_NOT", "Chromium"]

_PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
WHY_NOT = "" if _PROGRAM else "no Chromium here; on Debian, `apt-get install chromium` has it"
_SECONDS = 120.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-pipe", "--disable-dev-shm-usage"),
)


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are above those that Chromium wants."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


class Chromium:
    """One page at a time; `requests` and `complaints` are of the page that is open."""

    def __enter__(self) -> Self:
        assert _PROGRAM is not None, "tests are skipped without one"
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (get, self._out), (self._in, put) = _pipe(), _pipe()
        command = [_PROGRAM, *_FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        # Chromium reads commands from descriptor 3 and answers on 4.
        moved = f"import os, sys; os.dup2({get}, 3); os.dup2({put}, 4)"
        moved += "; os.execv(sys.argv[1], sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", moved, *command],
            pass_fds=(get, put),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(get)
        os.close(put)
        self._number, self._rest, self._session = 0, b"", ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def open(
        self, page: Path, *, width: int = 1200, height: int = 900, is_dark: bool = False
    ) -> float:
        """Show a page and wait until its charts are there; returns seconds from start to that."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        ends = time.monotonic() + _SECONDS
        while not self.tells("document.documentElement?.dataset.drawn"):
            assert time.monotonic() < ends, f"{page} drew nothing: {self.complaints}"
            time.sleep(0.05)
        return float(self.tells("performance.now()")) / 1000

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )

    def tells(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse, as hovering needs: once beside the place, then there."""
        for beside in (3, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + beside, y=y)

    def picture(
        self, path: Path, *, whole: bool = True, clip: dict[str, float] | None = None
    ) -> None:
        more: dict[str, Any] = {"captureBeyondViewport": True} if whole else {}
        if clip is not None:
            more = {"captureBeyondViewport": True, "clip": {**clip, "scale": 1}}
        elif whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            box = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            more["clip"] = box
        image = self.call("Page.captureScreenshot", format="png", **more)["data"]
        path.write_bytes(base64.b64decode(image))

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Ask Chromium, and note what it tells meanwhile."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + _SECONDS
        while time.monotonic() < ends:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)
        raise AssertionError(f"Chromium does not answer {method}")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium has ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, given = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(given["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(given["args"])[:500])
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.complaints.append(given["entry"]["text"])
