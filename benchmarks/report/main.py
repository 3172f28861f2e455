"""How long does a report take to write, how large is it, and how soon is it drawn?"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "reporting"))

from chromium import WHY_NOT, Chromium
from drawn_records import many_devices
from harness import finish, options, say

from bayplan.reporting import html

SIZES = ((1, 200), (8, 200), (64, 200))
COLUMNS = (
    *("devices", "steps", "events", "write_seconds", "write_seconds_median"),
    *("page_bytes", "open_seconds"),
)


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--turns", type=int, default=5, help="how often each page is made")
    arguments = parser.parse_args()
    sizes = ((4, 2),) if arguments.quick else SIZES
    turns = 1 if arguments.quick else arguments.turns
    if WHY_NOT:
        say(WHY_NOT)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        for num_devices, num_steps in sizes:
            rows.append(_measured(page, num_devices, num_steps, turns))
            say("{devices} devices: {write_seconds:.2f} s, {page_bytes} bytes".format(**rows[-1]))
    finish(__file__, {"rows": rows}, columns=COLUMNS, arguments=arguments)


def _measured(page: Path, num_devices: int, num_steps: int, turns: int) -> dict:
    record = many_devices(num_devices, num_steps)
    report, seconds = html.Report.of(record), []
    for _ in range(turns):
        html.packed_plotly.cache_clear()
        started = time.perf_counter()
        page.write_text(html.page_of(report))
        seconds.append(time.perf_counter() - started)
    opened = None
    if not WHY_NOT:
        with Chromium() as browser:
            opened = min(browser.open(page) for _ in range(turns))
    return {
        "devices": num_devices,
        "steps": num_steps,
        "events": sum(len(device.events) for device in record.devices),
        "write_seconds": min(seconds),
        "write_seconds_median": statistics.median(seconds),
        "page_bytes": page.stat().st_size,
        "open_seconds": opened,
    }


if __name__ == "__main__":
    main()
