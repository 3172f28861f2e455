"""Pictures without a browser, tables for spreadsheets, figures for TensorBoard."""

import sys
import xml.etree.ElementTree as ElementTree

import pytest
from drawn_records import many_devices, one_device

from bayplan.data.errors import UsageError
from bayplan.reporting.html import Report
from bayplan.reporting.svg import svg_of
from bayplan.reporting.tables import Table, csv_text
from bayplan.reporting.writing import scalars, write_report

_SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("record", [one_device(), many_devices(16, 2, num_events=20)])
def test_every_picture_is_drawn_inside_its_frame(record):
    for section in Report.of(record).sections():
        if section.chart is None:
            continue
        root = ElementTree.fromstring(svg_of(section.chart))
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        shapes = [*root.iter(f"{_SVG}polygon"), *root.iter(f"{_SVG}polyline")]
        bars = [*root.iter(f"{_SVG}rect")][1:]
        assert shapes or bars, section.chart.name
        points = [p for shape in shapes for p in shape.attrib["points"].split()]
        corners = [tuple(map(float, point.split(","))) for point in points]
        corners += [(float(b.attrib["x"]), float(b.attrib["y"])) for b in bars]
        assert all(-1 <= x <= width + 1 and -1 <= y <= height + 1 for x, y in corners)


def test_names_are_escaped_in_svg():
    for section in Report.of(one_device(name="a<b>&c")).sections():
        if section.chart is not None:
            ElementTree.fromstring(svg_of(section.chart))


def test_band_ends_where_the_next_begins():
    """Bands are drawn down to the axis, the highest first, so that each covers the one above."""
    chart = next(iter(Report.of(one_device()).sections())).chart
    root = ElementTree.fromstring(svg_of(chart))
    tops = [
        min(float(point.split(",")[1]) for point in shape.attrib["points"].split())
        for shape in root.iter(f"{_SVG}polygon")
    ]
    assert tops == sorted(tops)


def test_csv_has_numbers_that_spreadsheets_read_and_no_formulas():
    rows = [["=cmd()", "1,234.5"], ["a, b", "12"], ["-cmd()", "-3.5 %"], ["+cmd()", "-"]]
    table = Table("t", "T", ["device", "MiB"], rows)
    assert csv_text(table) == "device,MiB\n'=cmd(),1234.5\n\"a, b\",12\n'-cmd(),-3.5 %\n'+cmd(),-\n"


def test_report_writes_page_pictures_and_tables(tmp_path):
    svg, csv = tmp_path / "svg", tmp_path / "csv"
    write_report(Report.of(one_device()), page=tmp_path / "r.html", svg=svg, csv=csv)
    assert {path.name for path in svg.iterdir()} == {"memory.svg", "tradeoff.svg", "timeline.svg"}
    assert {path.name for path in csv.iterdir()} == {"largest.csv", "step.csv", "devices.csv"}
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_scalars_of_each_step_and_rank():
    told = list(scalars(many_devices(2, 3, num_events=4)))
    tags = {tag for tag, _, _ in told}
    assert {"bayplan/loss", "bayplan/peak_MiB/rank_1", "bayplan/samples_per_second"} <= tags
    assert sum(tag == "bayplan/step_seconds" for tag, _, _ in told) == 3


def test_missing_tensorboard_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        write_report(Report.of(one_device()), tensorboard=tmp_path)
