"""Programs to plan, random or drawn by hand, and the optimum by looking at every schedule."""

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from bayplan.data.program import Op, Program


def random_repeat(rng: random.Random, reads: tuple, writes: tuple) -> dict:
    """How repeats of an op differ from its first execution, mostly not at all."""
    costs = {"repeat_seconds": rng.randint(1, 8) / 8, "repeat_workspace_bytes": rng.choice((0, 2))}
    if len(writes) == 1:
        return costs if rng.random() < 0.1 else {}
    if rng.random() < 0.3:
        return {}
    made_once = rng.choice(writes)
    others = rng.sample(range(writes[0]), k=rng.randint(0, 1))
    return {
        "repeat_writes": tuple(buffer for buffer in writes if buffer != made_once),
        "repeat_reads": (*rng.sample(reads, k=rng.randint(0, 1)), *others, made_once),
        **(costs if rng.random() < 0.8 else {}),
    }


def random_program(seed: int, *, num_forward: int = 6, num_backward: int = 6) -> Program:
    """Any graph the rules allow.

    With multi-output ops, take-overs, ops that cannot repeat and ops whose repeats need other
    buffers, some of them made by the op's first execution alone.
    """
    rng = random.Random(seed)
    sizes = [rng.randint(0, 6) for _ in range(2)]
    inputs = set(range(len(sizes)))
    ops: list[Op] = []
    outputs: set[int] = set()
    for index in range(num_forward + num_backward):
        reads = tuple(rng.choices(range(len(sizes)), k=rng.randint(1, 3)))
        num_writes = rng.choice((1, 1, 1, 2))
        writes = tuple(range(len(sizes), len(sizes) + num_writes))
        sizes += [rng.randint(0, 9) for _ in writes]
        takes_over: tuple[int, ...] = ()
        if num_writes == 1 and rng.random() < 0.4:
            taken = rng.choice(reads)
            sizes[-1], takes_over = sizes[taken], (taken,)
        outputs.update(buffer for buffer in writes if rng.random() < 0.15)
        ops.append(
            Op(
                name=f"{'f' if index < num_forward else 'b'}{index}",
                reads=reads,
                writes=writes,
                seconds=rng.randint(1, 8) / 8,
                workspace_bytes=rng.choice((0, 0, 3)),
                can_repeat=rng.random() < 0.85,
                takes_over=takes_over,
                **random_repeat(rng, reads, writes),
            )
        )
    return Program(
        buffers=tuple(sizes),
        ops=tuple(ops),
        first_backward=num_forward,
        inputs=frozenset(inputs),
        outputs=frozenset(outputs),
        resident_bytes=rng.choice((0, 5)),
    )


def chain_program(num_layers: int, *, size: int = 10, gradient: int = 1) -> Program:
    """x -> f0 -> f1 -> ... and back; backward of layer i reads layer i's input and a gradient."""
    ops: list[Op] = []
    for layer in range(num_layers):
        ops.append(Op(name=f"f{layer}", reads=(layer,), writes=(layer + 1,), seconds=1.0))
    last = num_layers
    for layer in reversed(range(num_layers)):
        ops.append(Op(name=f"b{layer}", reads=(layer, last), writes=(last + 1,), seconds=2.0))
        last += 1
    return Program(
        buffers=(size,) * (num_layers + 1) + (gradient,) * num_layers,
        ops=tuple(ops),
        first_backward=num_layers,
        inputs=frozenset({0}),
        outputs=frozenset({last}),
    )


class _Builder:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ops: list[Op] = []

    def buffer(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def run(self, name, reads, sizes, seconds, takes_over=()) -> tuple[int, ...]:
        writes = tuple(self.buffer(size) for size in sizes)
        number = sum(op.name.startswith(name) for op in self.ops)
        op = Op(
            name=f"{name}_{number}",
            reads=tuple(reads),
            writes=writes,
            seconds=seconds,
            takes_over=tuple(takes_over),
        )
        self.ops.append(op)
        return writes


def residual_program(num_blocks: int, *, size: int = 1000) -> Program:
    """Blocks of conv, batch norm, relu and an add, saved for backward as autograd saves them."""
    make = _Builder()
    image = make.buffer(size)
    weights = [make.buffer(40) for _ in range(2 * num_blocks)]
    saved, x = [], image
    for block in range(num_blocks):
        kept, y = [], x
        for half in range(2):
            weight = weights[2 * block + half]
            (conv,) = make.run("conv", (y, weight), (size,), 10.0)
            norm, mean, rstd = make.run("norm", (conv,), (size, 2, 2), 1.0)
            if half:
                (norm,) = make.run("add", (norm, x), (size,), 0.5, (norm,))
            (relu,) = make.run("relu", (norm,), (size,), 0.5, (norm,))
            kept.append((y, weight, conv, mean, rstd, relu))
            y = relu
        saved.append(kept)
        x = y
    first_backward = len(make.ops)
    (grad,) = make.run("loss_backward", (x,), (size,), 0.1)
    outputs = set()
    for kept in reversed(saved):
        skip = None
        for half in (1, 0):
            y, weight, conv, mean, rstd, relu = kept[half]
            (grad,) = make.run("relu_backward", (grad, relu), (size,), 0.5, (grad,))
            skip = grad if half else skip
            (inner,) = make.run("norm_backward", (grad, conv, mean, rstd), (size,), 2.0)
            grad, weight_grad = make.run("conv_backward", (inner, y, weight), (size, 40), 20.0)
            outputs.add(weight_grad)
        (grad,) = make.run("add_backward", (grad, skip), (size,), 0.5, (grad, skip))
    return Program(
        buffers=tuple(make.sizes),
        ops=tuple(make.ops),
        first_backward=first_backward,
        inputs=frozenset({image, *weights}),
        outputs=frozenset(outputs),
    )


class _Exhaustive:
    """Dijkstra's search over all valid schedules.

    A state is the next plain op, the copies in memory beside the outputs' own, and the outputs
    whose latest copy is a repeat's. A copy in memory never hurts until it is dropped for room, so
    only the least sets of copies that make room for an op are dropped, just before it. Every
    schedule runs the plain ops once, so only repeats count on the way.
    """

    def __init__(self, program: Program, limit_bytes: int) -> None:
        self.program, self.limit_bytes = program, limit_bytes
        self.kept_until = [program.always_bytes]
        for op in program.ops:
            made = program.outputs.intersection(op.writes)
            self.kept_until.append(self.kept_until[-1] + self.size(made))

        forward = program.ops[: program.first_backward]
        self.from_forward = frozenset(buffer for op in forward for buffer in op.writes)
        # Where it makes a difference whether a copy is the first: fewer states to visit.
        takeable = frozenset(buffer for op in program.ops for buffer in op.takes_over)
        self.matters = program.outputs | takeable

    def size(self, buffers) -> int:
        return sum(self.program.buffers[buffer] for buffer in buffers)

    def seconds(self) -> float:
        begin = (0, frozenset(), frozenset())
        best, done = {begin: 0.0}, set()
        queue: list[tuple] = [(0.0, 0, begin)]
        numbers = itertools.count(1)
        while queue:
            seconds, _, state = heapq.heappop(queue)
            if state[0] == len(self.program.ops):
                return self.program.plain_seconds + seconds
            if state in done:
                continue
            done.add(state)
            for cost, after in self.steps(*state):
                if seconds + cost < best.get(after, math.inf):
                    best[after] = seconds + cost
                    heapq.heappush(queue, (seconds + cost, next(numbers), after))
        return math.inf

    def steps(self, following: int, there: frozenset, renewed: frozenset) -> Iterator[tuple]:
        repeats = range(following) if following >= self.program.first_backward else ()
        for index in (following, *repeats):
            is_repeat = index < following
            op = self.program.repeats[index] if is_repeat else self.program.ops[index]
            copies = there.difference(op.writes)
            needed = (set(op.reads) - self.program.inputs) - (self.program.outputs - renewed)
            if (is_repeat and not op.can_repeat) or not needed <= copies:
                continue
            made = frozenset(op.writes) - (frozenset() if is_repeat else self.program.outputs)
            now_renewed = renewed | (made & self.matters) if is_repeat else renewed
            last = following + (not is_repeat)
            is_backward = following >= self.program.first_backward
            handed = self.from_forward - renewed if is_backward else frozenset()
            taken_over = [None, *(b for b in op.takes_over if b in needed - handed)]
            for taken in taken_over:
                saved = 0 if taken is None else self.program.buffers[taken]
                fixed = self.kept_until[last] + self.size(made) + op.workspace_bytes - saved
                for held in self.largest_held(copies, needed, self.limit_bytes - fixed):
                    cost = op.seconds if is_repeat else 0.0
                    yield cost, (last, (held - {taken}) | made, now_renewed)

    def largest_held(self, copies: frozenset, needed: set, room_bytes: int) -> Iterator[frozenset]:
        """The largest sets of copies, the needed ones among them, that leave room."""
        others = sorted(b for b in copies - needed if self.program.buffers[b])
        dropped: list[set] = []
        for count in range(len(others) + 1):
            for group in map(set, itertools.combinations(others, count)):
                if any(smaller <= group for smaller in dropped):
                    continue
                if self.size(copies - group) <= room_bytes:
                    dropped.append(group)
                    yield copies - group


@pytest.fixture(scope="session")
def optimal_seconds():
    """The least seconds of any schedule within a limit, or infinity; for small programs."""
    return lambda program, limit_bytes: _Exhaustive(program, limit_bytes).seconds()


@pytest.fixture(scope="session")
def programs() -> st.SearchStrategy[Program]:
    """Random programs of twelve ops."""
    return st.builds(random_program, st.integers(0, 10**9))


@pytest.fixture(scope="session")
def tiny_programs() -> st.SearchStrategy[Program]:
    """Random programs of at most seven ops, small enough for exhaustive search."""
    return st.builds(
        random_program,
        st.integers(0, 10**9),
        num_forward=st.integers(2, 4),
        num_backward=st.integers(1, 3),
    )


@pytest.fixture(scope="session")
def make_chain():
    return chain_program


@pytest.fixture(scope="session")
def make_residual():
    return residual_program


@pytest.fixture(scope="session")
def make_random():
    return random_program


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the planner's inner loop is compiled once for all tests."""
    return tmp_path_factory.mktemp("compiled")
