"""How planning a GPT of 96 layers grows with the cluster: 64, 512 and 4096 simulated GPUs.

For each cluster one process plans the model and simulates the candidates. Its seconds and its
largest memory are measured; the plans and their times are simulated.
"""

import json
import re
import resource
import subprocess
import sys
import time
from math import log
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

COLUMNS = (
    "devices",
    "source",
    "plan_s",
    "plan_cpu_s",
    "peak_rss_mib",
    "stages",
    "replicas",
    "micro_batches",
    "schedule",
    "recomputed",
    "step_s",
    "estimate_s",
    "low_s",
    "high_s",
    "flops_share",
    "bubble",
    "alternatives",
)
HOSTS = (8, 64, 512)
QUICK_HOSTS = (8,)
DEVICES_PER_HOST = 8
BATCH = 1536  # sequences, GPT-3's 3.2 million tokens
MIB = 2**20
TARGETS = {
    "plan_s_at_512": 60.0,
    "plan_cpu_s_at_512": 60.0,
    "growth_exponent": 1.1,
    "cpu_growth_exponent": 1.1,
    "peak_rss_mib": 4096.0,
}
ONE = "--one"  # plan for so many hosts in this process, which is measured


def main() -> None:
    from harness import finish, options, say

    parser = options(__doc__ or "")
    parser.add_argument("--gpu", default="dgx-h100", help="the host that clusters are made of")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for hosts in QUICK_HOSTS if arguments.quick else HOSTS:
        say(f"{hosts} hosts")
        rows.append(_in_process(hosts, arguments.gpu, BATCH // 8 if arguments.quick else BATCH))
    result = {"rows": rows, "batch": BATCH, "host": arguments.gpu, "claims": _claims(rows)}
    say(result["claims"])
    finish(__file__, result, columns=COLUMNS, arguments=arguments)


def _in_process(hosts: int, host: str, batch: int) -> dict[str, Any]:
    """A process of its own, so that its memory is its own as well."""
    command = [sys.executable, __file__, ONE, str(hosts), host, str(batch)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def plan_one(hosts: int, host: str, batch: int) -> dict[str, Any]:
    from scale.gpt_chain import STATE_PER_PARAMETER, gpt_chain

    from bayplan.costing.catalogue import read_cluster
    from bayplan.planning.clusters.planner import plan_on
    from bayplan.planning.clusters.split import Training

    began, began_cpu = time.perf_counter(), time.process_time()
    cluster = read_cluster(f"{hosts}x{host}")
    kind = cluster.kind_of(0)
    chain = gpt_chain(kind)
    training = Training(
        state_per_parameter=STATE_PER_PARAMETER,
        # An update reads gradients, state and weights, and writes the last two.
        update_seconds_per_byte=(3 + 2 * STATE_PER_PARAMETER) / kind.bandwidth_bytes_per_s.value,
        link_spread=0.3,  # most of the catalogue's bandwidths are guesses from tables
    )
    plan = plan_on(chain, cluster, batch, training=training)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    split, judgement = plan.best.split, plan.best.judgement
    useful = sum(one.forward_seconds + one.backward_seconds for one in chain.layers) * batch
    return {
        "devices": len(cluster.devices),
        "source": "simulated",
        "plan_s": seconds,
        "plan_cpu_s": cpu_seconds,
        "peak_rss_mib": _peak_rss_bytes() / MIB,
        "stages": len(split.stages),
        "replicas": "-".join(map(str, sorted(set(split.replicas)))),
        "micro_batches": split.num_micro_batches,
        "schedule": split.schedule,
        "recomputed": sum(split.recomputed),
        "step_s": judgement.seconds,
        "estimate_s": plan.best.estimate_seconds,
        "low_s": judgement.low_seconds,
        "high_s": judgement.high_seconds,
        "flops_share": useful / len(cluster.devices) / judgement.seconds,
        "bubble": judgement.bubble,
        "alternatives": len(plan.alternatives),
        "simulated_devices": judgement.num_simulated,
        "largest_total_gib": max(one.memory.total_bytes for one in judgement.stages) / 2**30,
    }


def _peak_rss_bytes() -> int:
    """The largest memory of this process; getrusage would tell its parent's from before exec."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if found is not None:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Time at 512 devices, how it grows with their number, and memory; each with its target."""
    by_devices = {row["devices"]: row for row in rows}
    ends = min(by_devices), max(by_devices)
    at_512 = by_devices.get(512, {})
    found = {
        "plan_s_at_512": at_512.get("plan_s"),
        "plan_cpu_s_at_512": at_512.get("plan_cpu_s"),
        "growth_exponent": _growth(by_devices, ends, "plan_s"),
        "cpu_growth_exponent": _growth(by_devices, ends, "plan_cpu_s"),
        "peak_rss_mib": max(row["peak_rss_mib"] for row in rows),
    }
    return {
        name: {
            "value": value,
            "target": f"at most {TARGETS[name]:g}",
            "is_met": None if value is None else value <= TARGETS[name],
        }
        for name, value in found.items()
    }


def _growth(by_devices: dict[int, dict[str, Any]], ends: tuple[int, int], name: str) -> Any:
    """The power of the number of devices that a time grows with; 1 is linear."""
    if ends[0] == ends[1]:
        return None
    first, last = (by_devices[end][name] for end in ends)
    return log(last / first) / log(ends[1] / ends[0])


if __name__ == "__main__":
    if ONE in sys.argv:
        given = sys.argv[sys.argv.index(ONE) + 1 :]
        print(json.dumps(plan_one(int(given[0]), given[1], int(given[2]))))
    else:
        main()
