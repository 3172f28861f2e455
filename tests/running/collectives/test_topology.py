"""Real ranks that meet: one host, two hosts, and ranks that cannot share."""

import json

from bayplan.running.ranks.launching import launch

NUM_RANKS = 4
TIMEOUT_SECONDS = 250.0
SCRIPT = """
import itertools, json, os, resource, sys, time, warnings
from functools import cached_property
from pathlib import Path
import torch
import torch.distributed as dist
from bayplan.running.collectives import sums as module
from bayplan.running.ranks.pipelined import LossSums
from bayplan.running.collectives.topology import RankTopology
from bayplan.running.collectives.sums import SharedSums, SocketSums, room_bytes

cache, results = Path(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
COUNT = 700_001  # several strips, the last one odd

class Emulated(RankTopology):
    hosts = ("left", "left", "left", "right")

class Three(RankTopology):
    hosts = ("left", "middle", "right", "right")

def topology(name, kind=RankTopology, **options):
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return kind(store, rank, world_size, cache, **options)

def summed(sums, dtype=torch.float64):
    if sums is None:
        return None
    rooms = [sums.room(COUNT, dtype, cpu) for _ in range(2)]
    assert not any(room.any() for room in rooms)
    found = []
    for turn in range(3):
        for at, room in enumerate(rooms):
            room.copy_(torch.arange(COUNT) % 100 + (rank + 1) * (at + 1) + turn)
        for pending in [sums.begin(room) for room in rooms]:
            pending.wait()
        found += [(room - len(RANKS) * (torch.arange(COUNT) % 100 + turn)).unique().tolist()
                  for room in rooms]
    return type(sums).__name__, found

all_bytes = 2 * room_bytes(COUNT, torch.float64)
found = {}
RANKS = range(world_size)
found["one host"] = summed(topology("a").sums(RANKS, all_bytes))
found["two hosts"] = summed(topology("b", Emulated).sums(RANKS, all_bytes))
found["three hosts"] = summed(topology("n", Three).sums(RANKS, all_bytes))
found["half precision"] = summed(topology("c").sums(RANKS, all_bytes), torch.bfloat16)[0]
found["no room"] = summed(topology("d").sums(RANKS, 64))
found["one unwilling"] = summed(topology("e", is_willing=rank != 2).sums(RANKS, all_bytes))
found["all unwilling"] = summed(topology("f", is_willing=False).sums(RANKS, all_bytes))
RANKS = (1, 3)
found["some"] = summed(topology("g").sums(RANKS, all_bytes))
RANKS = range(world_size)
losses = LossSums(topology("h").sums(range(world_size), LossSums.needed_bytes(2)), 2, cpu)
told = [losses.add(torch.tensor([rank + 10.0 * at, 1.0, 2.0])) for at in range(5)]
found["losses"] = [one if one is None else one.tolist() for one in told + losses.rest()]

# Every way, for every dtype and odd sizes; whole numbers are exact in all of them.
found["wrong"] = []
for name, kind in (("i", RankTopology), ("j", Emulated)):
    ways = topology(name, kind).ways(RANKS, all_bytes, is_scattered=True)
    found[f"ways {name}"] = list(ways)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for count in (1, 7, 4097, 600_001):
            next(iter(ways.values())).forget_rooms()
            room = next(iter(ways.values())).room(count, dtype, cpu)
            for way, at_once in itertools.product(ways, (False, True)):
                sums, heard = ways[way], []
                room.copy_(torch.arange(count) % 5 + rank)
                if at_once:
                    sums.now(room, heard.append)
                else:
                    sums.begin(room, heard.append).wait()
                expected = world_size * (torch.arange(count) % 5) + sum(RANKS)
                dist.barrier()  # a callback may come after the sum
                is_right = torch.equal(room.double(), expected.double())
                is_told = [one.size_bytes for one in heard] == [room.nbytes]
                if not is_right or not is_told or heard[0].ended_seconds < heard[0].begun_seconds:
                    found["wrong"].append((name, way, str(dtype), count, is_right, is_told))
rounding = topology("k", Emulated).ways(RANKS, all_bytes)
room = rounding["hierarchical"].room(COUNT, torch.float32, cpu)
expected = world_size * torch.linspace(1, 2, COUNT) + sum(RANKS)
found["rounded by"] = []
for way in ("hierarchical", "ring"):
    rounding[way].wire_dtype = torch.bfloat16
    room.copy_(torch.linspace(1, 2, COUNT) + rank)
    rounding[way].now(room)
    found["rounded by"].append(((room - expected).abs() / expected).max().item())
rounding["hierarchical"].wire_dtype = None
rounding["hierarchical"].strip_bytes = rounding["hierarchical"].few_strips_bytes = 4096
found["small strips"] = []
for is_large in (False, True):  # in a ring, and exchanged
    module._LARGE_BYTES = 0 if is_large else 1 << 40
    room.copy_(torch.arange(COUNT) % 5 + rank)
    rounding["hierarchical"].now(room)
    wanted = world_size * (torch.arange(COUNT) % 5.0) + sum(RANKS)
    found["small strips"].append(torch.equal(room, wanted))
    rounding["hierarchical"].wire_dtype = torch.bfloat16
    room.copy_(torch.linspace(1, 2, COUNT) + rank)
    rounding["hierarchical"].now(room)
    found["rounded by"].append(((room - expected).abs() / expected).max().item())
    rounding["hierarchical"].wire_dtype = None

# Who is late is told.
late, heard = topology("l").ways(RANKS, all_bytes)["shared"], []
room = late.room(8, torch.float32, cpu)
for turn in range(2):
    dist.barrier()
    time.sleep(0.2 * turn * (rank == 2))
    late.begin(room, heard.append).wait()
found["late"] = (heard[1].last_rank, heard[1].waited_seconds > 0.1)

# No memory to share on one rank.
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    found["too small"] = summed(topology("m").sums(RANKS, all_bytes))
found["warned"] = [str(one.message) for one in seen]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
(results / f"{rank}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_sum_up_whichever_way_they_share(tmp_path):
    script, lines = tmp_path / "script.py", []
    script.write_text(SCRIPT)
    code = launch(
        [str(script), str(tmp_path / "cache"), str(tmp_path)],
        num_ranks=NUM_RANKS,
        log_folder=tmp_path / "logs",
        timeout_seconds=TIMEOUT_SECONDS,
        on_line=lines.append,
    )
    assert code == 0, lines
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    of_four = [[10.0], [20.0]] * 3  # 1 + 2 + 3 + 4, and twice that
    for rank, found in enumerate(ranks):
        assert found["one host"] == ["SharedSums", of_four]
        assert found["two hosts"] == ["SharedSums", of_four]
        assert found["three hosts"] == ["SharedSums", of_four]
        assert found["half precision"] == "SharedSums"
        assert found["no room"] == ["SharedSums", of_four]
        assert found["one unwilling"] == ["SharedSums", of_four]
        assert found["all unwilling"] == ["SocketSums", of_four]
        assert found["some"] == (["SharedSums", [[6.0], [12.0]] * 3] if rank in (1, 3) else None)
        # Two batches later; the parts of batch n are 0 to 3, and ten times n each.
        sums = [[6.0 + 40 * at, 4.0, 8.0] for at in range(5)]
        assert found["losses"] == [None, None, *sums]
        assert found["ways i"] == ["shared", "ring", "reduce_scatter"]
        assert found["ways j"] == ["hierarchical", "ring", "reduce_scatter"]
        assert found["wrong"] == []
        assert all(0 < one < 2**-6 for one in found["rounded by"])
        assert found["small strips"] == [True, True]
        assert found["late"] == [2, rank != 2]
        assert found["too small"] == ["SocketSums", of_four]
        (warning,) = found["warned"] if rank == 0 else [""]
        assert rank or warning.startswith("ranks cannot share memory (rank 1: [Errno 27]")
