"""What commands write tells nothing of the environment they ran in."""

import os
from pathlib import Path

SECRET = "hunter2hunter2"


def test_no_file_of_a_run_has_a_value_of_the_environment(bayplan, project, monkeypatch):
    monkeypatch.setenv("BAYPLAN_TEST_TOKEN", SECRET)
    asked = ("train:build", "--memory", "1GiB", "--time-limit", 1)
    written = ("-o", "run.json", "--report", "run.html", "--checkpoint", "saved")
    assert bayplan("plan", *asked, "-o", "plan.json").code == 0
    bayplan("run", *asked, "--steps", 2, *written)  # other tests' tensors are beside its peak
    found = [
        path
        for folder in (Path.cwd(), Path(os.environ["BAYPLAN_CACHE"]))
        for path in folder.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert not found
    assert Path("run.html").exists()
    assert Path("saved", "step-00000002", "manifest.json").exists()
