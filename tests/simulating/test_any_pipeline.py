"""Any pipeline's schedule passes the check, and what passes runs: sample by sample, in any order.

`Ranks` is a second opinion that shares no code with the check: it moves single samples, in an
order of ranks that is drawn at random, and fails where a rank lacks what it needs.
"""

import random
from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayplan.data.actions import RECEIVES, SENDS
from bayplan.data.errors import FileFault
from bayplan.data.plan import Stage
from bayplan.planning.pipelines.loosening import loosen
from bayplan.planning.pipelines.scheduling import SCHEDULES, schedule
from bayplan.simulating.checking import check_actions
from bayplan.simulating.pipeline import RECEIVES_AHEAD, Pipeline
from bayplan.simulating.routing import resplit, round_robin


class Wrong(Exception):
    """A list that does not do the step's work."""


class Ranks:
    def __init__(self, pipeline, lists, *, has_tags):
        self.pipeline, self.lists, self.has_tags = pipeline, lists, has_tags
        pieces = pipeline.routing.pieces
        self.micro_batch = {
            x: m for m, own in enumerate(pieces[0]) for p in own for x in range(p.begin, p.end)
        }
        self.owner = {
            (s, x): p.rank
            for s, stage in enumerate(pieces)
            for own in stage
            for p in own
            for x in range(p.begin, p.end)
        }
        self.at = [0] * len(lists)
        self.mail = {}  # by sender and receiver, what was sent and not received, in order
        self.held = set()  # (rank, what): activations and gradients that are there to be read
        self.done = set()
        self.posted = []

    def need(self, condition, why):
        if not condition:
            raise Wrong(why)

    def once(self, *what):
        self.need(what not in self.done, f"{what} twice")
        self.done.add(what)

    def samples(self, rank, stage, m):
        found = [x for x, at in self.micro_batch.items() if at == m]
        found = [x for x in found if self.owner.get((stage, x)) == rank]
        self.need(found, "nothing to do")
        return found

    def edges(self, stage, kind):
        """Links that an activation (F) or gradient (B) comes in by, and those it leaves by."""
        links = self.pipeline.links if kind == "F" else self.pipeline.backward_links
        before = [link for link in links if link[1] == stage]
        after = [link for link in links if link[0] == stage]
        return (before, after) if kind == "F" else (after, before)

    def far_end(self, link, stage, x):
        return self.owner[link[1] if link[0] == stage else link[0], x]

    def compute(self, rank, stage, m, kind):
        reads, writes = self.edges(stage, kind)
        for x in self.samples(rank, stage, m):
            for link in reads:
                self.need((rank, kind, link, x) in self.held, f"{stage}{kind}{m} lacks input")
            self.once(kind, stage, x)
            for link in writes:
                if self.far_end(link, stage, x) == rank:
                    self.held.add((rank, kind, link, x))

    def send(self, rank, stage, m, kind):
        num_sent = 0
        for link in sorted(self.edges(stage, kind)[1]):
            for x in self.samples(rank, stage, m):
                self.need((kind, stage, x) in self.done, "sends what it has not made")
                other = self.far_end(link, stage, x)
                if other != rank:
                    num_sent += 1
                    self.once("SEND", kind, link, x)
                    self.mail.setdefault((rank, other), []).append((kind, link, x))
        self.need(num_sent, "sends nothing")

    def receive(self, rank, stage, m, kind):
        """Return whether all has come."""
        wanted = {}
        for link in self.edges(stage, kind)[0]:
            for x in self.samples(rank, stage, m):
                other = self.far_end(link, stage, x)
                if other != rank:
                    wanted.setdefault(other, set()).add((kind, link, x))
        self.need(wanted, "receives nothing")
        if any(not own <= set(self.mail.get((q, rank), ())) for q, own in wanted.items()):
            return False
        for other, own in wanted.items():
            queue = self.mail[other, rank]
            for link in {one[:2] for one in own}:  # without tags, each has a queue of its own
                coming = [one for one in queue if one[:2] == link]
                mine = {one for one in own if one[:2] == link}
                is_next = set(coming[: len(mine)]) == mine
                self.need(self.has_tags or is_next, "receives another message")
            self.mail[other, rank] = [one for one in queue if one not in own]
            self.held |= {(rank, *one) for one in own}
        return True

    def members(self, bucket):
        stages = [s for s, own in enumerate(self.pipeline.buckets) if bucket in own]
        return stages, {r for s in stages for r in self.pipeline.stages[s].devices}

    def weights_done(self, rank, stage):
        own = [x for (s, x), r in self.owner.items() if (s, r) == (stage, rank)]
        self.need(all(("W", stage, x) in self.done for x in own), "gradient not complete")

    def reduce(self, rank, stage, bucket):
        stages, members = self.members(bucket)
        own = [s for s in stages if rank in self.pipeline.stages[s].devices]
        self.need(own and own[0] == stage and len(members) > 1, "not its bucket")
        for s in own:
            self.weights_done(rank, s)
        self.once("REDUCE", rank, bucket)
        self.posted.append((rank, bucket))

    def update(self, rank, stage):
        self.need(rank in self.pipeline.stages[stage].devices, "not its stage")
        rest = self.lists[rank][self.at[rank] :]
        self.need(all(action.kind == "U" for action in rest), "goes on after an update")
        own = [s for s, st_ in enumerate(self.pipeline.stages) if rank in st_.devices]
        for s in own:
            self.weights_done(rank, s)
            for bucket in self.pipeline.buckets[s]:
                _, members = self.members(bucket)
                if len(members) > 1:
                    self.need(("REDUCE", rank, bucket) in self.done, "not reduced")
                    if any((r, bucket) not in self.posted for r in members):
                        return False
        self.once("U", rank, stage)
        return True

    def act(self, rank):
        """Do the rank's next action, or return False if it must wait."""
        action = self.lists[rank][self.at[rank]]
        kind, s, m = str(action.kind), action.stage, action.index
        self.need(s < len(self.pipeline.stages), "no such stage")
        if kind.startswith("RECV"):
            return self.receive(rank, s, m, kind[-1])
        if kind.startswith("SEND"):
            self.send(rank, s, m, kind[-1])
        elif kind in ("F", "B", "I"):
            self.compute(rank, s, m, "F" if kind == "F" else "B")
            for x in self.samples(rank, s, m):
                self.need(kind == "F" or ("F", s, x) in self.done, "backward before forward")
                if kind == "B":
                    self.once("W", s, x)
        elif kind == "W":
            for x in self.samples(rank, s, m):
                self.need(("B", s, x) in self.done, "W before I")
                self.once("W", s, x)
        elif kind == "REDUCE":
            self.reduce(rank, s, m)
        else:
            self.need((kind, m) == ("U", 0), "unknown action")
            return self.update(rank, s)
        return True

    def run(self, chance):
        while left := [r for r, own in enumerate(self.lists) if self.at[r] < len(own)]:
            chance.shuffle(left)
            moved = next((rank for rank in left if self.act(rank)), -1)
            self.need(moved >= 0, "deadlock")
            self.at[moved] += 1
        for s, stage in enumerate(self.pipeline.stages):
            self.need(all(("U", r, s) in self.done for r in stage.devices), "no update")
        for place in self.owner:
            self.need(("W", *place) in self.done, "no backward")
        self.need(not any(self.mail.values()), "a message is left over")
        orders = {}
        for rank, bucket in self.posted:
            group = frozenset(self.members(bucket)[1])
            orders.setdefault(group, {}).setdefault(rank, []).append(bucket)
        for own in orders.values():
            self.need(len({tuple(order) for order in own.values()}) == 1, "orders differ")


@st.composite
def pipelines(draw, *, shares_ranks=True):
    num_stages = draw(st.integers(1, 4))
    if shares_ranks:
        placed = [
            draw(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True))
            for _ in range(num_stages)
        ]
        number = {rank: at for at, rank in enumerate(sorted({r for own in placed for r in own}))}
        placed = [[number[rank] for rank in own] for own in placed]
    else:
        counts = [draw(st.integers(1, 3)) for _ in range(num_stages)]
        ranks = iter(draw(st.permutations(range(sum(counts)))))
        placed = [[next(ranks) for _ in range(count)] for count in counts]
    stages = tuple(
        Stage(
            first=0,
            last=0,
            devices=tuple(own),
            shares=tuple(draw(st.integers(1, 4)) for _ in own),
        )
        for own in placed
    )
    widest = max(map(len, placed))
    splits = draw(st.booleans())
    micro_batches = draw(st.integers(1 if splits else widest, 5))
    samples = (widest if splits else 1) * micro_batches + draw(st.integers(0, 5))
    routing = (resplit if splits else round_robin)(
        stages, num_samples=samples, num_micro_batches=micro_batches
    )
    pairs = [(a, b) for b in range(num_stages) for a in range(b)]
    links = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    if draw(st.booleans()):
        links |= {(at, at + 1) for at in range(num_stages - 1)}
    buckets = tuple(
        tuple(draw(st.permutations([2 * at, 2 * at + 1])))[: draw(st.integers(0, 2))]
        + draw(st.sampled_from([(), (99,)]))
        for at in range(num_stages)
    )
    back = draw(st.none() | st.sets(st.sampled_from(pairs))) if pairs else None
    gradient_links = None if back is None else tuple(sorted(back))
    return Pipeline(stages, routing, tuple(sorted(links)), buckets, gradient_links)


NAMES, DEPTHS = st.sampled_from(sorted(SCHEDULES)), st.integers(1, 2)


@settings(max_examples=200)
@given(pipelines(), NAMES, DEPTHS, st.booleans(), st.integers(0, 99))
def test_every_schedule_runs_on_any_transport(pipeline, name, depth, has_tags, seed):
    lists = schedule(pipeline, name, depth=depth)
    check_actions(pipeline, lists, has_tags=has_tags)
    Ranks(pipeline, lists, has_tags=has_tags).run(random.Random(seed))


def mutate(lists, chance):
    """Swap two actions of a rank, drop one, or repeat one elsewhere."""
    mutated = [list(own) for own in lists]
    own = chance.choice(mutated)
    i, j = chance.randrange(len(own)), chance.randrange(len(own))
    change = chance.choice(["swap", "swap neighbours", "swap", "drop", "repeat"])
    if change == "swap":
        own[i], own[j] = own[j], own[i]
    elif change == "swap neighbours":
        j = min(i + 1, len(own) - 1)
        own[i], own[j] = own[j], own[i]
    elif change == "drop":
        del own[i]
    else:
        own.insert(j, own[i])
    return mutated


@settings(max_examples=300)
@given(pipelines(), NAMES, st.integers(0, 10**6), st.booleans())
def test_what_passes_the_check_runs_and_what_fails_it_does_not(pipeline, name, seed, has_tags):
    chance = random.Random(seed)
    lists = mutate(schedule(pipeline, name), chance)
    try:
        check_actions(pipeline, lists, has_tags=has_tags)
    except FileFault:
        with pytest.raises(Wrong):
            Ranks(pipeline, lists, has_tags=has_tags).run(chance)
    else:
        Ranks(pipeline, lists, has_tags=has_tags).run(chance)


@given(pipelines(), NAMES, st.integers(0, 99))
def test_a_retired_send_has_been_received_in_every_order_of_ranks(pipeline, name, seed):
    lists = schedule(pipeline, name)
    retire = check_actions(pipeline, lists, has_tags=True).retire
    ranks, chance = Ranks(pipeline, lists, has_tags=True), random.Random(seed)
    while left := [r for r, own in enumerate(lists) if ranks.at[r] < len(own)]:
        chance.shuffle(left)
        rank = next(r for r in left if ranks.act(r))
        for position in retire[rank][ranks.at[rank]]:
            assert_received(ranks, rank, lists[rank][position])
        ranks.at[rank] += 1


def assert_received(ranks, rank, send):
    """Nothing that an action of a rank has sent is still on its way."""
    kind = str(send.kind)[-1]
    sent = {
        (kind, link, x)
        for link in ranks.edges(send.stage, kind)[1]
        for x in ranks.samples(rank, send.stage, send.index)
    }
    for (sender, _), queue in ranks.mail.items():
        assert sender != rank or sent.isdisjoint(queue)


@settings(max_examples=200)
@given(pipelines(), NAMES, DEPTHS, st.integers(0, 10**6))
def test_without_static_order_whatever_is_ready_may_come_next(pipeline, name, depth, seed):
    lists = schedule(pipeline, name, depth=depth)
    proof = check_actions(pipeline, lists, has_tags=True)
    lags = (0,) * len(pipeline.stages)
    loose = [
        loosen(pipeline, rank, own, in_flight=proof.in_flight[rank], lags=lags)
        for rank, own in enumerate(lists)
    ]
    ranks, chance = (
        Ranks(pipeline, [list(own) for own in lists], has_tags=True),
        random.Random(seed),
    )
    left = [dict.fromkeys(range(len(own))) for own in lists]
    in_flight = [dict.fromkeys(own, 0) for own in proof.in_flight]
    while any(left):
        ready = [
            (rank, at)
            for rank, own in enumerate(left)
            for at in own
            if own.keys().isdisjoint(loose[rank].needs[at])
        ]
        chance.shuffle(ready)
        rank, at = next((one for one in ready if can_do(ranks, lists, left, *one)), (-1, -1))
        assert rank >= 0, "stuck"
        del left[rank][at]
        ranks.at[rank] += 1
        action = lists[rank][at]
        in_flight[rank][action.stage] += {"F": 1, "B": -1, "W": -1}.get(str(action.kind), 0)
        assert in_flight[rank][action.stage] <= proof.in_flight[rank][action.stage]
        for position in loose[rank].retire[at]:
            assert_received(ranks, rank, lists[rank][position])
    assert all(
        ("U", r, s) in ranks.done for s, own in enumerate(pipeline.stages) for r in own.devices
    )
    assert not any(ranks.mail.values())


def can_do(ranks, lists, left, rank, at):
    """Let a rank do an action of its list instead of the next one; False if it must wait."""
    rest = [lists[rank][other] for other in left[rank] if other != at]
    ranks.lists[rank][ranks.at[rank] :] = [lists[rank][at], *rest]
    return ranks.act(rank)


class Stuck(Exception):
    """All wait for each other."""


def posts_ahead(own, ready):
    """By position, the positions of receives that are posted before it."""
    receives = [position for position, action in enumerate(own) if action.kind in RECEIVES]
    posts, num_posted, num_ahead = defaultdict(list), 0, RECEIVES_AHEAD
    for position, action in enumerate(own):
        num_ahead += action.kind in RECEIVES
        while num_posted < min(num_ahead, len(receives)):
            if ready.get(receives[num_posted], 0) > position:
                break
            posts[position].append(receives[num_posted])
            num_posted += 1
    return posts


class Devices:
    """What devices do with action lists on a transport without tags, as NCCL has it.

    A host gives its device work and goes on. A device has a stream that computes, and a stream for
    each queue. A message moves when its send is first in its queue at one end, its receive at the
    other, and each end's computing stream has got to where it was issued. Then both end.

    One host may be `waiting`: after every action, for everything that it has given its device. So
    nothing may be there that waits for what it would give later.
    """

    def __init__(self, pipeline, lists, proof, *, waiting=None, is_ready=True):
        self.pipeline, self.lists, self.proof = pipeline, lists, proof
        self.waiting = waiting
        ready = proof.ready if is_ready else [{} for _ in lists]
        self.posts = [posts_ahead(own, ready[rank]) for rank, own in enumerate(lists)]
        self.issued = [0] * len(lists)  # positions that the host is done with
        self.streams = [deque() for _ in lists]  # of what a computing stream waits for; () computes
        self.given = [0] * len(lists)  # entries that a stream was given so far,
        self.reached = [0] * len(lists)  # and that it is done with
        self.ends = defaultdict(deque)  # by queue and side, (rank, entries before it, what)
        self.done = set()
        self.open = [
            set() for _ in lists
        ]  # messages that a rank has issued and that have not ended

    def messages(self, rank, position):
        action = self.lists[rank][position]
        for message in self.pipeline.moved(rank, action):
            is_back = action.kind in (SENDS[1], RECEIVES[1])
            yield (message.source_stage, message.target_stage, is_back, message.sender,
                   message.receiver), message.micro_batch  # fmt: skip

    def give(self, rank, waits):
        self.streams[rank].append(waits)
        self.given[rank] += 1

    def issue(self, rank, position, side):
        for queue, index in self.messages(rank, position):
            what = (side, queue, index)
            self.ends[queue, side].append((rank, self.given[rank], what))
            self.open[rank].add(what)

    def host(self, rank):
        """Give the device the next action; False if the host waits or is done."""
        own, position = self.lists[rank], self.issued[rank]
        if position == len(own):
            return False
        if rank == self.waiting and (self.open[rank] or self.streams[rank]):
            return False
        for receive in self.posts[rank][position]:
            self.issue(rank, receive, "receive")
        action = own[position]
        if action.kind in SENDS:
            self.issue(rank, position, "send")
        elif action.kind in RECEIVES:
            self.give(rank, [("receive", *one) for one in self.messages(rank, position)])
        else:
            self.give(rank, [])
        for send in self.proof.retire[rank][position]:
            self.give(rank, [("send", *one) for one in self.messages(rank, send)])
        self.issued[rank] += 1
        return True

    def device(self, rank):
        """Let the computing stream go on."""
        stream = self.streams[rank]
        if not stream or not self.done.issuperset(stream[0]):
            return False
        stream.popleft()
        self.reached[rank] += 1
        return True

    def move(self):
        """Let one message move."""
        for queue in {queue for queue, _ in self.ends}:
            sends, receives = self.ends[queue, "send"], self.ends[queue, "receive"]
            if sends and receives:
                firsts = sends[0], receives[0]
                if all(self.reached[rank] >= number for rank, number, _ in firsts):
                    (_, _, sent), (_, _, received) = firsts
                    assert sent[1:] == received[1:], "a message lands in another's place"
                    for end, (rank, _, what) in zip((sends, receives), firsts, strict=True):
                        end.popleft()
                        self.open[rank].discard(what)
                        self.done.add(what)
                    return True
        return False

    def run(self, chance):
        steps = [self.move]
        for rank in range(len(self.lists)):
            steps += [lambda rank=rank: self.host(rank), lambda rank=rank: self.device(rank)]
        while any(n < len(own) for n, own in zip(self.issued, self.lists, strict=True)) or any(
            self.open
        ):
            chance.shuffle(steps)
            if not any(step() for step in steps):
                raise Stuck([str(own[min(n, len(own) - 1)]) for n, own in
                             zip(self.issued, self.lists, strict=True)])  # fmt: skip


@given(pipelines(), NAMES, DEPTHS, st.integers(0, 99))
def test_every_schedule_ends_on_devices_without_tags(pipeline, name, depth, seed):
    lists = schedule(pipeline, name, depth=depth)
    proof = check_actions(pipeline, lists)
    Devices(pipeline, lists, proof).run(random.Random(seed))


@given(pipelines(shares_ranks=False), NAMES, DEPTHS, st.integers(0, 5), st.integers(0, 99))
def test_with_a_stage_each_a_host_may_wait_for_its_device(pipeline, name, depth, waiting, seed):
    lists = schedule(pipeline, name, depth=depth)
    proof = check_actions(pipeline, lists)
    Devices(pipeline, lists, proof, waiting=waiting).run(random.Random(seed))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_seven_that_feed_one_end(make_pipeline, name):
    for micro_batches in (1, 2, 7):
        pipeline = make_pipeline([[0, 1, 2, 3, 4, 5, 6], [7]], micro_batches=micro_batches)
        lists = schedule(pipeline, name)
        proof = check_actions(pipeline, lists)
        for waiting in (None, 0, 7):
            Devices(pipeline, lists, proof, waiting=waiting).run(random.Random(0))


def test_a_receive_that_is_posted_too_early_keeps_a_waiting_host_forever(make_pipeline):
    pipeline = make_pipeline([[0], [1]], micro_batches=2)
    lists = schedule(pipeline, "1f1b")
    devices = Devices(pipeline, lists, check_actions(pipeline, lists), waiting=0, is_ready=False)
    with pytest.raises(Stuck):
        devices.run(random.Random(0))
