"""Ranks of this machine meet on the loopback interface, where no other machine reaches them."""

import json
from pathlib import Path

from bayplan.running.ranks.launching import launch

SCRIPT = """\
import json
import os
import sys
from pathlib import Path

from torch import distributed

from bayplan.devices.device import HOST
from bayplan.running.ranks.joining import join_ranks
from bayplan.running.ranks.watching import open_watch

join_ranks(HOST)
with open_watch():
    distributed.barrier()
    own = set()
    for name in os.listdir("/proc/self/fd"):
        if os.path.islink(f"/proc/self/fd/{name}"):
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    heard = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:  # it listens
                heard.append(fields[1].partition(":")[0])
    Path(sys.argv[1], f"{distributed.get_rank()}.json").write_text(json.dumps(heard))
    distributed.barrier()
distributed.destroy_process_group()
"""
LOOPBACK = "0100007F"  # as the kernel writes 127.0.0.1


def test_nothing_of_a_run_listens_to_other_machines(tmp_path):
    # torch's store listened on every interface, and gloo where the host's name led.
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    lines = []
    code = launch(
        [str(script), str(tmp_path)],
        num_ranks=2,
        log_folder=tmp_path / "logs",
        timeout_seconds=200.0,
        on_line=lines.append,
    )
    assert code == 0, lines
    heard = [json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in range(2)]
    assert all(heard)
    assert {address for own in heard for address in own} == {LOOPBACK}
