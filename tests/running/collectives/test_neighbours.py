"""Large messages between real ranks, in order and out of it, and ranks that may not be read."""

import pytest

SCRIPT = """
import ctypes, json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from bayplan.running.collectives import transports as module
from bayplan.running.collectives.topology import RankTopology, open_topology
from bayplan.running.collectives.transports import LARGE_BYTES, open_peer_memory

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, found = dist.get_rank(), {}
COUNT = LARGE_BYTES // 4 + 3

def exchanged(near, order):
    '''Both ranks send three messages and wait for the other's in some order.'''
    other = 1 - rank
    sent = [torch.arange(COUNT) * 1.0 + 100 * rank + at for at in range(3)]
    rooms = [torch.empty(COUNT) for _ in range(3)]
    coming = [near.receive(room, other, tag) for tag, room in enumerate(rooms)]
    going = [near.send(message, other, tag) for tag, message in enumerate(sent)]
    for at in order:
        coming[at].wait()
    for one in going:
        one.wait()
    expected = [torch.arange(COUNT) * 1.0 + 100 * other + at for at in range(3)]
    return all(map(torch.equal, rooms, expected))

near = open_peer_memory(open_topology())
if not near.processes:  # the same on both ranks
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(9)
found["reads"] = {str(peer): process != os.getpid() for peer, process in near.processes.items()}
found["reach"] = [near.reach(1 - rank, LARGE_BYTES, comes=True),
                  near.reach(1 - rank, LARGE_BYTES - 1, comes=True),
                  near.reach(7, LARGE_BYTES, comes=True)]
found["in order"] = [exchanged(near, (0, 1, 2)) for _ in range(3)]
loose = open_peer_memory(open_topology(), is_ordered=False)
found["in any order"] = exchanged(loose, (2, 0, 1))

class Apart(RankTopology):
    hosts = ("left", "right")
store = dist.PrefixStore("apart", dist.distributed_c10d._get_default_store())
found["apart"] = dict(open_peer_memory(Apart(store, rank, 2, Path("."))).processes)

if rank == 1:  # may not read the other
    def refuse(*_):
        raise OSError(1, "not permitted")
    module._read = refuse
found["refused"] = dict(open_peer_memory(open_topology()).processes)
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_copy_large_messages_out_of_each_other_s_memory(on_two_ranks):
    code, lines, ranks = on_two_ranks(SCRIPT)
    if code == 9:
        pytest.skip("this machine does not let processes read each other's memory")
    assert code == 0, lines
    for rank, found in enumerate(ranks):
        assert found["reads"] == {str(1 - rank): True}
        assert found["reach"] == [True, False, False]
        assert found["in order"] == [True] * 3
        assert found["in any order"]
        assert found["apart"] == {}
        assert found["refused"] == {}  # on both, for all of a host or none
