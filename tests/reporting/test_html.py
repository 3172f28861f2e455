"""The page of a report: what is in it, and what may not be."""

import re
from html.parser import HTMLParser

import msgspec
import pytest
from drawn_records import many_devices, one_device

from bayplan.data.record import RunRecord, Source
from bayplan.reporting.html import Report, page_of

_HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
_MOST_BYTES = 6_000_000


class _Tags(HTMLParser):
    """All tags, and the text that a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self._is_hidden = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._is_hidden = tag in ("script", "style")
        assert not [name for name, _ in attrs if name.startswith("on")], "no code in attributes"

    def handle_endtag(self, tag):
        self._is_hidden = False

    def handle_data(self, data):
        if not self._is_hidden:
            self.words += data


def _charts(page: str) -> list[dict]:
    (text,) = re.findall(r'id="charts">(.*?)</script>', page, re.DOTALL)
    return msgspec.json.decode(text)


def _names(page: str) -> list[str]:
    return [chart["name"] for chart in _charts(page)]


@pytest.fixture(scope="module")
def planned():
    return page_of(Report.of(one_device()))


def test_planned_step_has_a_picture_of_memory_of_plans_and_of_time(planned):
    assert _names(planned) == ["memory", "tradeoff", "timeline"]
    bands = {trace["name"] for trace in _charts(planned)[0]["traces"]}
    assert {"parameters", "kept for backward", "recomputed", "swapped", "packed"} <= bands
    assert "everything kept" in bands


def test_first_sentence_has_peak_limit_and_price(planned):
    assert "It fits: peak 3.5 of 4.0&nbsp;GiB, 1.14x the plain step's time" in planned.replace(
        "&#x27;", "'"
    )


def test_peak_is_told_by_module_and_line(planned):
    words = " ".join(_Tags(planned).words.split())
    assert "The peak is 3.5 GiB, in convolution of net at model.py:7" in words


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("backward sum", "in backward sum;"),
        ("backward mm head net.py:7", "in backward mm of head at net.py:7;"),
        ("mm_1 8", "in mm_1 of 8;"),
        ("0U0", "in 0U0: stage 0, update of the parameters;"),
        (
            "0B1 mm 0.2 net.py:7",
            "in 0B1: stage 0, backward of micro-batch 1, in mm of 0.2 at net.py:7;",
        ),
    ],
)
def test_places_of_a_peak_are_words(place, words):
    record = one_device()
    device = msgspec.structs.replace(record.devices[0], peak_place=place)
    page = page_of(Report.of(msgspec.structs.replace(record, devices=(device,))))
    assert f"The peak is 3.5 GiB, {words}" in " ".join(_Tags(page).words.split())


def test_the_note_of_the_peak_covers_no_curve(planned):
    """It stood 36 pixels above the peak, on top of the dashed line of the plain step."""
    (memory,) = (chart for chart in _charts(planned) if chart["name"] == "memory")
    (own,) = (note for note in memory["layout"]["annotations"] if "peak" in note["text"])
    lines = [trace for trace in memory["traces"] if "stackgroup" not in trace]
    highest = max(value for trace in lines for value in trace["y"])
    _, top = memory["layout"]["yaxis"]["range"]
    assert own["ayref"] == "y"
    assert 1.1 * highest < own["ay"] < 0.95 * top
    # On a phone plotly made the time axis twice as long, to have room for the note.
    ends = {trace["x"][-1] for trace in memory["traces"]}
    assert memory["layout"]["xaxis"]["range"] == [0, max(ends)]


def test_few_bars_are_no_slabs():
    """A single all-reduce was a bar over two thirds of the page."""
    page = page_of(Report.of(many_devices(16, 3, num_events=20)))
    hidden = next(chart for chart in _charts(page) if chart["name"] == "hidden")
    num_bars = len(hidden["traces"][0]["x"])
    assert (1 - hidden["layout"]["bargap"]) / num_bars == pytest.approx(0.1)


def test_foot_has_command_versions_and_method(planned):
    words = _Tags(planned).words
    assert "bayplan check net" in words
    assert "torch 2.13.0" in words


def test_many_devices_have_messages_hidden_shares_and_places():
    page = page_of(Report.of(many_devices(16, 3, num_events=20)))
    assert _names(page) == ["memory", "timeline", "messages", "hidden", "devices"]
    assert "It fits: 16 devices, 2 stages (12:4), peak" in page


def test_predicted_stands_above_measured():
    measured = one_device(source=Source.MEASURED)
    page = page_of(Report.of(measured, one_device()))
    rows = next(chart for chart in _charts(page) if chart["name"] == "timeline")
    assert rows["layout"]["yaxis"]["ticktext"] == ["predicted", "measured"]
    assert "predicted above measured" in rows["caption"]


def test_every_name_of_a_model_or_file_is_escaped():
    """A module may be called `<script>`: in the page, in pictures and in tables it is text."""
    plain, hostile = (
        _Tags(page_of(Report.of(one_device(name=name)))) for name in ("net", _HOSTILE)
    )
    assert hostile.tags == plain.tags
    assert _HOSTILE in hostile.words


def test_pictures_get_no_tags_from_names():
    charts = _charts(page_of(Report.of(one_device(name="<b>net</b><script>"))))
    texts = msgspec.json.encode([[chart["traces"], chart["layout"]] for chart in charts]).decode()
    assert "&lt;b&gt;net" in texts
    assert "<script" not in texts


def test_nothing_is_loaded_and_nothing_of_the_environment_is_told(monkeypatch):
    monkeypatch.setenv("BAYPLAN_SECRET_TOKEN", "hunter2hunter2")
    page = page_of(Report.of(one_device()))
    assert "hunter2" not in page
    assert "default-src 'none'" in page
    assert not re.findall(r"<(?:link|img|iframe|script)[^>]+(?:src|href)=", page)


def test_record_without_pictures_is_tables_alone():
    bare = RunRecord(source=Source.MEASURED, method="malloc", step_seconds=(0.5,), devices=())
    page = page_of(Report.of(bare))
    assert _names(page) == []
    assert len(page) < 100_000, "no pictures, no plotly"


def test_long_record_is_thinned_to_a_small_page():
    page = page_of(Report.of(many_devices(64, 200)))
    assert len(page.encode()) < _MOST_BYTES
    charts = {chart["name"]: chart for chart in _charts(page)}
    bars = sum(len(trace["y"]) for trace in charts["timeline"]["traces"])
    assert bars <= 4100
    assert all(len(trace["x"]) <= 600 for trace in charts["memory"]["traces"])
