"""The process that reads: one kind of file, from one input to another, counting what goes wrong.

A line of JSON each second says how far it is, so that an input which ends the process is known.
"""

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hostile.changes import changed

from bayplan import api
from bayplan.costing.catalogue import expand, load_device
from bayplan.data import files
from bayplan.data.cluster import Cluster
from bayplan.data.cluster_file import ClusterFile
from bayplan.data.device import DeviceKind
from bayplan.data.errors import BayplanError
from bayplan.data.exchange import BucketFile
from bayplan.data.graph import StepGraph
from bayplan.data.placement import Placement
from bayplan.data.plan import Plan
from bayplan.data.profile import Profile
from bayplan.data.record import RunRecord
from bayplan.data.topology import cluster_file_of, read_topology
from bayplan.data.units import Limit, parse_bytes
from bayplan.reporting.clusters import cluster_text
from bayplan.reporting.text import profile_text
from bayplan.reporting.trace import trace_of

_LIMIT_BYTES = 2**30  # beyond what the process has when it begins
_HANG_SECONDS = 5
_BLOCKED_SECONDS = 60  # of waiting; on a busy machine a reader may not be run for a while
# What a file must never bring about; reading files is allowed, as every command does.
_ESCAPES = (
    *("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.symlink", "os.link"),
    *("socket.connect", "socket.bind", "shutil.rmtree", "pickle.find_class", "ctypes.dlopen"),
)


def main(reader: str, folder: Path, seed: int, first: int, end: int) -> None:
    read = _readers(folder)[reader]
    seeds = [path.read_bytes() for path in sorted((folder / reader).iterdir())]
    for content in seeds:  # what is imported, compiled and kept on first use comes now
        read(content)
    escapes: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        is_written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in _ESCAPES or is_written:
            escapes.append(f"{event} {arguments[:1]}")

    sys.addaudithook(watch)
    _limit_memory()
    begin_bytes = _peak_bytes()
    counts, worst_seconds, seen = Counter(next=first), 0.0, []
    told_seconds = time.monotonic()
    for number in range(first, end):
        if time.monotonic() - told_seconds > 1.0 or number == first:
            told_seconds = time.monotonic()
            _end_by_alarm(_HANG_SECONDS + 2, _BLOCKED_SECONDS)
            _tell({**counts, "next": number}, worst_seconds, begin_bytes, seen)
        chance = random.Random(f"{seed} {reader} {number}")
        content = changed(chance.choice(seeds), chance)
        begin_seconds = time.process_time()
        try:
            read(content)
            outcome = "accepted"
        except BayplanError:
            outcome = "refused"
        except MemoryError:
            outcome = "too_large"
        except Exception as fault:  # this is what is looked for
            outcome = "crashes"
            place = traceback.extract_tb(fault.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            seen.append(f"input {number}: {type(fault).__name__}: {fault} ({where})"[:300])
        seconds = time.process_time() - begin_seconds
        worst_seconds = max(worst_seconds, seconds)
        if seconds > _HANG_SECONDS:
            outcome = "hangs"
        if outcome in ("too_large", "hangs"):
            seen.append(f"input {number}: {outcome} after {seconds:.1f} s")
        if escapes:
            seen.append(f"input {number}: {escapes[0]}")
            counts["escapes"] += 1
            escapes.clear()
        counts.update({"inputs": 1, outcome: 1})
    _end_by_alarm(0, 0)
    _tell({**counts, "next": end}, worst_seconds, begin_bytes, seen)


def _end_by_alarm(processor_seconds: int, seconds: int) -> None:
    """End the process where C code computes, or waits, for so long from now on; 0 for never."""
    signal.setitimer(signal.ITIMER_PROF, processor_seconds)
    signal.alarm(seconds)


def _readers(folder: Path) -> dict[str, Callable[[bytes], object]]:
    """What the commands do with each kind of file."""
    graph = files.read(folder / "graph.json", StepGraph)
    device = load_device("titan-v")

    def text(content: bytes) -> str:
        return content.decode(errors="replace")

    def record(content: bytes) -> None:
        found = files.decode(content, RunRecord, name="given")
        api.report(found, against=found)
        trace_of(found)

    def captured(content: bytes) -> None:
        found = files.decode(content, StepGraph, name="given")
        api.report(api.simulate(found, device=device))

    def profile(content: bytes) -> None:
        found = files.decode(content, Profile, name="given")
        found.check_belongs_to(graph)
        profile_text(graph, found)
        api.report(api.simulate(graph, found))

    def device_kind(content: bytes) -> None:
        api.simulate(graph, device=files.decode(content, DeviceKind, name="given"))

    def cluster(content: bytes) -> None:
        cluster_text(files.decode(content, Cluster, name="given"))

    def cluster_yaml(content: bytes) -> None:
        found = files.decode(content, ClusterFile, name="given", is_yaml=True)
        cluster_text(expand(found, where="given"))

    def topology(content: bytes) -> None:
        found = cluster_file_of(read_topology(text(content)), device="titan-v", name="given")
        cluster_text(expand(found, where="given"))

    def sizes(content: bytes) -> None:
        if (size_bytes := Limit.parse(text(content)).size_bytes) is not None:
            parse_bytes(size_bytes)

    return {
        "plan": lambda content: api.explain(files.decode(content, Plan, name="given")),
        "rank_plan": lambda content: api.explain(files.decode(content, Plan, name="given")),
        "record": record,
        "graph": captured,
        "profile": profile,
        "device": device_kind,
        "cluster": cluster,
        "cluster_yaml": cluster_yaml,
        "buckets": lambda content: files.decode(content, BucketFile, name="given"),
        "topology": topology,
        "placement": lambda content: str(Placement.parse(text(content))),
        "sizes": sizes,
    }


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit_bytes = pages * os.sysconf("SC_PAGE_SIZE") + _LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def _peak_bytes() -> int:
    """Not `ru_maxrss`, which begins with that of the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _tell(counts: dict[str, int], worst: float, begin_bytes: int, seen: list[str]) -> None:
    grown_mib = (_peak_bytes() - begin_bytes) / 2**20
    told = {**counts, "worst_seconds": worst, "grown_mib": grown_mib, "seen": seen[:5]}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6]))
