"""What a process may still take of the host: the least of the machine, its groups and `ulimit`."""

import resource
import subprocess
import sys
from pathlib import Path

from bayplan.devices.device import HOST
from bayplan.devices.host_memory import host_rooms

GROUP = Path("/proc/self/cgroup")


def test_a_limit_of_the_process_is_told_apart_from_what_all_ranks_share():
    # The machine's free gigabytes were told to a process that could not have them, and planned for.
    code = (
        "import resource; from bayplan.devices.device import HOST;"
        " limits = resource.getrlimit(resource.RLIMIT_DATA);"
        " taken = HOST.rooms['data'].used_bytes;"
        " resource.setrlimit(resource.RLIMIT_DATA, (taken + (64 << 20), limits[1]));"
        " print(HOST.free_bytes, HOST.shared_free_bytes)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    free_bytes, shared_bytes = map(int, answer.stdout.split())
    assert 0 < free_bytes <= 64 << 20
    assert shared_bytes > free_bytes


def test_control_groups_bound_what_is_free_and_cached_files_may_go(tmp_path):
    own = tmp_path / GROUP.read_text().splitlines()[-1].split(":", 2)[2].lstrip("/")
    version_1 = tmp_path / "memory"
    for group, names in (
        (own, ("memory.max", "memory.current", "inactive_file")),
        (version_1, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):
        group.mkdir(parents=True, exist_ok=True)
        (group / names[0]).write_text("1000000\n")
        (group / names[1]).write_text("900000\n")
        (group / "memory.stat").write_text(f"anon 5\n{names[2]} 50000\n")
    frees = [room.free_bytes for name, room in host_rooms(tmp_path).items() if "/" in name]
    assert frees
    assert set(frees) == {150_000}
    (own / "memory.max").write_text("max\n")
    (version_1 / "memory.limit_in_bytes").write_text("max\n")
    assert not [name for name in host_rooms(tmp_path) if "/" in name]


def test_without_limits_it_is_what_the_machine_has():
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert 0 < HOST.free_bytes <= HOST.total_bytes
