"""Reports of real runs in a real browser: all is drawn, nothing is asked for, nothing complains.

Four runs, as a user would start them: one device with a plan, a pipeline of 7:1 ranks, data
parallel after tuning, and a simulated cluster of 64 devices. With `BAYPLAN_PICTURES=FOLDER` their
screenshots are written there.
"""

import os
from importlib.resources import files
from pathlib import Path

import pytest
from chromium import WHY_NOT, Chromium

from bayplan.cli import main

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

_TARGET = """
import torch
from torch import nn

def build(batch_size=64):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    batch = torch.randn(batch_size, 256), torch.randint(10, (batch_size,))
    return model, batch, nn.functional.cross_entropy
"""
_TARGET_NAME = "model_of_reports:build"
_ONE_DEVICE = {"memory", "timeline"}
_RANKS = {"memory", "timeline", "messages", "hidden", "devices"}


def _bayplan(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 0, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("pages")
    (where / "model_of_reports.py").write_text(_TARGET)
    before = Path.cwd()
    os.chdir(where)
    yield where
    os.chdir(before)


@pytest.fixture(scope="module")
def browser():
    with Chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def planned(folder):
    """One device with a plan: predicted above measured."""
    page, plan = folder / "planned.html", folder / "plan.json"
    asked = ["--batch", 512, "--optimizer", "sgd"]
    _bayplan("plan", _TARGET_NAME, *asked, "--memory", "85%", "--time-limit", 2, "-o", plan)
    _bayplan("run", plan, "--target", _TARGET_NAME, "--steps", 3, "--report", page)
    return page


@pytest.fixture(scope="module")
def verdict(folder):
    page = folder / "verdict.html"
    asked = ["--batch", 4096, "--optimizer", "sgd", "--device", "titan-v", "--time-limit", 2]
    _bayplan("check", _TARGET_NAME, *asked, "--memory", "92MiB", "--report", page)
    return page


@pytest.fixture(scope="module")
def pipeline(folder):
    page = folder / "pipeline.html"
    asked = ["--batch", 56, "--optimizer", "sgd", "--micro-batches", 4, "--steps", 3]
    where = ["--placement", "0:0-6.0:7", "--shares", "7:1"]
    _bayplan("run", _TARGET_NAME, *asked, *where, "--report", page)
    return page


@pytest.fixture(scope="module")
def tuned(folder):
    page, buckets = folder / "tuned.html", folder / "buckets.json"
    asked = ["--batch", 64, "--ranks", 2, "--optimizer", "sgd"]
    tuning = ["--most-steps", 60, "--report", folder / "tuning.html"]
    _bayplan("tune", _TARGET_NAME, *asked, *tuning, "-o", buckets)
    found = ["--placement", "", "--buckets", buckets, "--steps", 3]
    _bayplan("run", _TARGET_NAME, *asked, *found, "--report", page)
    return page


@pytest.fixture(scope="module")
def cluster(folder):
    page, plan = folder / "cluster.html", folder / "cluster.plan.json"
    described = files("bayplan").joinpath("costing", "clusters", "titanv-2x8.yaml").read_text()
    (folder / "eight.yaml").write_text(described.replace("count: 2", "count: 8"))
    asked = ["--batch", 512, "--optimizer", "sgd", "--cluster", folder / "eight.yaml"]
    where = ["--placement", "0:0-7,1:0-7,2:0-7,3:0-7.4:0-7,5:0-7,6:0-7,7:0-7"]
    _bayplan(
        "plan", _TARGET_NAME, *asked, *where, "--micro-batches", 4, "-o", plan, "--report", page
    )
    return page


@pytest.mark.parametrize(
    ("name", "charts"),
    [
        ("planned", _ONE_DEVICE),
        ("verdict", {*_ONE_DEVICE, "tradeoff"}),
        ("tuned", _RANKS),
        pytest.param("pipeline", _RANKS, marks=pytest.mark.slow),
        pytest.param("cluster", _RANKS, marks=pytest.mark.slow),
    ],
)
def test_report_of_a_run_is_whole(name, charts, request, browser):
    page = request.getfixturevalue(name)
    browser.open(page)
    drawn = browser.tells(
        "Object.fromEntries([...document.querySelectorAll('.chart')].map((place) =>"
        " [place.id.slice(6), place.querySelectorAll('.trace path, .point path').length]))"
    )
    assert {*drawn} == charts
    assert all(drawn.values()), f"a chart without marks: {drawn}"
    assert browser.requests == [page.absolute().as_uri()]
    assert browser.complaints == []
    _hover(browser)
    if folder := os.environ.get("BAYPLAN_PICTURES"):
        browser.open(page)
        browser.picture(Path(folder, f"report-{name}.png"))


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("is_dark", [False, True])
def test_page_fits_a_phone_and_the_night(width, is_dark, verdict, browser):
    browser.open(verdict, width=width, is_dark=is_dark)
    assert browser.tells("document.documentElement.scrollWidth") <= width
    widest = browser.tells(
        "Math.max(...[...document.querySelectorAll('.chart .main-svg')]"
        ".map((svg) => svg.getBoundingClientRect().right))"
    )
    assert widest <= width
    ground, ink = (
        browser.tells(f"getComputedStyle(document.body).{name}.match(/\\d+/g).map(Number)")
        for name in ("backgroundColor", "color")
    )
    assert (max(ground) < 60 < 200 < min(ink)) == is_dark


def _hover(browser: Chromium) -> None:
    """Point at the middle of the first band or bar: a label comes up."""
    browser.tells("document.querySelector('.chart').scrollIntoView({block: 'start'})")
    box = browser.tells(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        "(document.querySelector('.chart .nsewdrag').getBoundingClientRect())"
    )
    for _ in range(100):
        browser.point_at(*box)
        if browser.tells(
            "document.querySelectorAll('.hoverlayer .hovertext, .hoverlayer .legend').length"
        ):
            return
    raise AssertionError("hovering shows nothing")
