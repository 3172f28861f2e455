"""Small messages between real ranks: in order and out of it, round the ring, past a full one."""

SCRIPT = """
import json, random, sys
from pathlib import Path
import torch
import torch.distributed as dist
from bayplan.running.collectives.transports import Mailboxes
from bayplan.running.collectives.topology import RankTopology, open_topology

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, other, found = dist.get_rank(), 1 - dist.get_rank(), {}
LARGEST = 1000
mail = Mailboxes(open_topology())
mail.open({other: LARGEST})
mail.open({other: 10 * LARGEST})  # again does nothing
found["reach"] = [mail.reach(other, size, comes=comes)
                  for size in (1, LARGEST, 4 * LARGEST) for comes in (True, False)]
found["reach of others"] = mail.reach(7, 1, comes=False)

def exchanged(sizes, order):
    '''Both ranks send some messages, and wait for the other's in some order.'''
    sent = [torch.arange(size, dtype=torch.int32).add_(100 * rank + at).to(torch.uint8)
            for at, size in enumerate(sizes)]
    going = [mail.send(message, other, tag) for tag, message in enumerate(sent)]
    rooms = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    coming = [mail.receive(room, other, tag) for tag, room in enumerate(rooms)]
    for at in order:
        coming[at].wait()
    for one in going:
        one.wait()
    expected = [torch.arange(size, dtype=torch.int32).add_(100 * other + at).to(torch.uint8)
                for at, size in enumerate(sizes)]
    return all(map(torch.equal, rooms, expected))

draw = random.Random(0)  # the same on both ranks
few = [[draw.randint(1, LARGEST) for _ in range(3)] for _ in range(40)]
found["in order, round the ring"] = all(exchanged(sizes, (0, 1, 2)) for sizes in few)
found["out of order"] = all(exchanged(sizes, (2, 0, 1)) for sizes in few)
many = [LARGEST] * 30  # far more than there is room for
found["past a full box"] = exchanged(many, range(30))
found["past a full box, out of order"] = exchanged(many, draw.sample(range(30), 30))
found["and again in it"] = exchanged([5, LARGEST, 7], (0, 1, 2))
# One tag twice, the first of them not yet asked for when the second comes.
for value in (1.0, 2.0):
    mail.send(torch.full((4,), value), other, 7).wait()
rooms = [torch.empty(4), torch.empty(4)]
for room in rooms:
    mail.receive(room, other, 7).wait()
found["one tag twice"] = [room[0].item() for room in rooms]
if rank == 0:
    mail.send(torch.zeros(3), other, 8).wait()
else:
    try:
        mail.receive(torch.empty(5), other, 8).wait()
    except RuntimeError as fault:
        found["other size"] = str(fault)

class Apart(RankTopology):
    hosts = ("left", "right")
store = dist.PrefixStore("apart", dist.distributed_c10d._get_default_store())
apart = Mailboxes(Apart(store, rank, 2, Path(".")))
apart.open({other: LARGEST})
found["apart"] = apart.reach(other, 1, comes=True)
dist.barrier()
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
if rank == 1:
    dist.barrier()
    sys.exit(0)  # and leaves the other waiting
dist.barrier()
try:
    mail.receive(torch.empty(3), other, 9).wait()
except RuntimeError as fault:
    found["gone"] = str(fault)
Path(sys.argv[1], "0.json").write_text(json.dumps(found))
"""


def test_ranks_leave_small_messages_in_memory_that_both_see(on_two_ranks):
    code, lines, ranks = on_two_ranks(SCRIPT)
    assert code == 0, lines
    assert len(ranks) == 2
    for rank, found in enumerate(ranks):
        assert found["reach"] == [True, True, True, True, False, False]
        assert not found["reach of others"]
        assert found["in order, round the ring"]
        assert found["out of order"]
        assert found["past a full box"]
        assert found["past a full box, out of order"]
        assert found["and again in it"]
        assert found["one tag twice"] == [1.0, 2.0]
        assert not found["apart"]
        if rank == 0:
            assert "connection closed" in found["gone"]
            assert "rank 1" in found["gone"]
        else:
            assert "rank 0 sent 12 bytes, 20 were expected" in found["other size"]
