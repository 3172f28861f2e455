"""Draw docs/images: reports of a plan for one device and of one for a cluster, as screenshots.

Both are simulated on catalogue devices, so any machine draws nearly the same. Needs Chromium.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "reporting"))

from chromium import Chromium

WIDTH, IMAGES = 1000, Path(__file__).resolve().parents[1] / "docs" / "images"
VERDICT = "check resnet50 --batch 64 --device titan-v --memory 3GiB --limit-counts live"
CLUSTER = "plan vgg16 --batch 224 --cluster titanv-8 -o vgg16.plan.json"
# By picture: the page, whether by night, and the first and last part of it that are shown.
PICTURES = {
    "memory-of-a-step": ("verdict", False, "#chart-memory", "#chart-memory"),
    "report-memory": ("verdict", False, "header", "#chart-memory"),
    "report-tradeoff": ("verdict", False, "section:nth-of-type(2)", "#chart-tradeoff"),
    "report-hidden": ("cluster", False, "section:nth-of-type(4)", "#chart-devices"),
    "report-night": ("cluster", True, "header", "#chart-timeline"),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as name, Chromium() as browser:
        folder = Path(name)
        for page, command in (("verdict", VERDICT), ("cluster", CLUSTER)):
            words = [*command.split(), "--optimizer", "sgd", "--report", f"{page}.html"]
            subprocess.run([sys.executable, "-m", "bayplan", *words], cwd=folder, check=True)
        for picture, (page, is_dark, first, last) in PICTURES.items():
            browser.open(folder / f"{page}.html", width=WIDTH, is_dark=is_dark)
            top, end = (
                browser.tells(f"document.querySelector('{part}').getBoundingClientRect().{side}")
                for part, side in ((first, "top"), (last, "bottom"))
            )
            box = {"x": 0, "y": max(0, top - 12), "width": WIDTH, "height": end - top + 16}
            browser.picture(IMAGES / f"{picture}.png", clip=box)


if __name__ == "__main__":
    main()
