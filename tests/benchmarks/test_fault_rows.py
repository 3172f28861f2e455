"""Which faults stay in the result file, and what is kept of those that ended otherwise."""

import json
from pathlib import Path
from typing import Any

from faults.main import SETUPS, Kept

FIRST, SECOND = SETUPS[:2]


def fault(setup: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"setup": setup, "kind": kind, "logs": ["the last words"], **more}


def test_faults_are_kept_by_their_commit_and_replaced_by_setup_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "latest.json"
    Kept(path, "a").add(FIRST, [fault(FIRST.name, "kill"), fault(FIRST.name, "stop", hangs=1)])
    Kept(path, "b").add(SECOND, [fault(SECOND.name, "kill")], skipped="no root")
    assert Kept(path, "a").struck_now(FIRST) == {"kill", "stop"}
    Kept(path, "b").add(FIRST, [fault(FIRST.name, "stop")] * 2)
    kept = Kept(path, "b")
    assert kept.struck_now(FIRST) == {"stop"}
    assert kept.struck_now(SECOND) == {"kill"}
    assert (kept.result["injected"], kept.result["hangs"]) == (4, 0)
    assert kept.result["skipped"] == [{"setup": SECOND.name, "reason": "no root"}]


def test_only_of_what_ended_otherwise_the_logs_are_kept(tmp_path: Path) -> None:
    """A run ended without its checkpoint, and nobody could know why any more."""
    path = tmp_path / "latest.json"
    Kept(path, "a").add(FIRST, [fault(FIRST.name, "kill"), fault(FIRST.name, "stop", lost_steps=3)])
    rows = json.loads(path.read_text())["faults"]
    assert ["logs" in row for row in rows] == [False, True]
