"""The page of all fields is what the types say; `make docs` checks links and navigation."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs" / "file_fields.py"


def test_page_of_fields_is_what_the_types_say():
    spec = importlib.util.spec_from_file_location("file_fields", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text("utf-8") == script.page(), "run `make docs`"


def test_every_file_that_is_read_has_its_table():
    text = SCRIPT.with_name("file-fields.md").read_text("utf-8")
    for schema in ("graph", "profile", "record", "verdict", "device", "cluster", "plan", "buckets"):
        assert f"`schema` is `bayplan/{schema}`" in text
    assert "| `limit_bytes` | whole number or null | `null` | bytes per device" in text
