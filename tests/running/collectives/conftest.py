"""Scripts that run as real ranks, and what each of them found."""

import json

import pytest

from bayplan.running.ranks.launching import launch


@pytest.fixture
def on_two_ranks(tmp_path):
    """Runs a script that writes RANK.json; returns its exit code, its lines, and what was found."""

    def run(text):
        script, lines = tmp_path / "script.py", []
        script.write_text(text)
        code = launch(
            [str(script), str(tmp_path)],
            num_ranks=2,
            log_folder=tmp_path / "logs",
            timeout_seconds=120.0,
            on_line=lines.append,
        )
        paths = [tmp_path / f"{rank}.json" for rank in range(2)]
        return code, lines, [json.loads(path.read_text()) for path in paths if path.exists()]

    return run
