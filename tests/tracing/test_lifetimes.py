"""Lifetimes against brute force: random programs, and every byte that malloc saw of them.

A program is drawn, captured without memory, then run for real and plainly, while the counter
writes down the live bytes at every allocation. The graph must tell the same story, allocation by
allocation: a storage that lives one operator too long or too short shows at the next one.
"""

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bayplan.data.graph import StepGraph
from bayplan.devices.malloc_counter import MallocCounter
from bayplan.step import TrainingStep
from bayplan.tracing.capture import capture_step

# A tensor is one unit; the smallest part that a program makes of one is an eighth.
UNIT_BYTES = 512 * 1024
PART_BYTES = UNIT_BYTES // 8
SHAPE = (8, UNIT_BYTES // 4 // 8)


def scale_rows_in_place(x):
    y = x * 3
    y[2:5].mul_(2.0)
    return y


def swap_halves(x):
    top, bottom = x.chunk(2)
    return torch.cat([bottom, top])


class AddsSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient + y


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, left, right):
        return left + right


OF_ONE = {
    "itself": lambda x: x,
    "neg": torch.neg,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "exp": torch.exp,
    "clone": torch.clone,
    "scale": lambda x: x * 2.0,
    "in place": lambda x: torch.relu_(x * 1.5),
    "in place on a view": scale_rows_in_place,
    "view": lambda x: x.view(4, -1).view(SHAPE),
    "view, added": lambda x: x.view(-1).view(SHAPE) + x,
    "transpose": lambda x: x.t().exp().t(),
    "expand": lambda x: x + x[:1].expand(SHAPE),
    "detach": lambda x: x.detach() * x,
    "column sums": lambda x: x * x.sum(0),
    "half precision": lambda x: (x.to(torch.bfloat16) * 2).float(),
    "chunks": swap_halves,
    "own formula": AddsSaved.apply,
    "two outputs": lambda x: torch.mul(*TwoOutputs.apply(x)),
    "no gradient": lambda x: torch.no_grad()(torch.exp)(x) * x,
}
OF_TWO = {
    "mul": torch.mul,
    "add": torch.add,
    "sub": torch.sub,
    "add in place": lambda x, y: (x * 2).add_(y),
    "cat": lambda x, y: torch.cat([x[:4], y[4:]]),
}
Line = tuple[str, str, tuple[str, ...]]  # operator, name of the result, names of the operands


class Program(nn.Module):
    """Runs lines as the body of a forward would, with Python variables that come and go."""

    def __init__(self, lines: list[Line], num_weights: int) -> None:
        super().__init__()
        self.lines = lines
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(SHAPE)) for _ in range(num_weights))

    def forward(self, x):
        variables = {"x": x} | {f"w{i}": weight for i, weight in enumerate(self.weights)}
        for op, name, operands in self.lines:
            if op == "del":
                del variables[name]
            elif op in OF_ONE:
                variables[name] = OF_ONE[op](variables[operands[0]])
            else:
                variables[name] = OF_TWO[op](*(variables[operand] for operand in operands))
        return variables[name]


@st.composite
def programs(draw) -> tuple[list[Line], int]:
    num_weights = draw(st.integers(1, 2))
    names = ["x", *(f"w{i}" for i in range(num_weights))]
    lines: list[Line] = []
    for index in range(draw(st.integers(1, 8))):
        op = draw(st.sampled_from([*OF_ONE, *OF_TWO]))
        # The last result and a weight come first: what is drawn small keeps to the point.
        operands = tuple(draw(st.sampled_from([names[-1], *names])) for _ in range(2))
        lines.append((op, f"t{index}", operands))
        old = [name for name in names if name.startswith("t")]
        names.append(f"t{index}")
        if old and draw(st.booleans()):
            gone = draw(st.sampled_from(old))
            names.remove(gone)
            lines.append(("del", gone, ()))
    lines.append(("mul", "out", (names[-1], "w0")))  # so that there is a gradient
    return lines, num_weights


def live_at_allocations(graph: StepGraph) -> list[int]:
    """Live bytes after each allocation of a part or more, as the graph has it."""
    live = sum(s.size_bytes for s in graph.storages if s.born is None)
    found = []
    for index in range(len(graph.nodes)):
        for storage in graph.storages:
            if storage.born == index:
                live += storage.size_bytes
                if storage.size_bytes >= PART_BYTES:
                    found.append(live)
        live -= sum(s.size_bytes for s in graph.storages if s.released == index)
    return found


def measured_at_allocations(step: TrainingStep, counter: MallocCounter) -> list[int]:
    """The same, of a plain step without anyone watching but malloc."""
    step()  # kernels and autograd keep what they make once
    step.model.zero_grad()
    gc.collect()
    resident = step.batch.nbytes + sum(p.nbytes for p in step.model.parameters())
    before = last = counter.live_bytes
    counter.start_curve(minimum_bytes=PART_BYTES)
    step()
    counter.stop_curve()
    found = []
    for live in counter.read_curve().live_bytes:
        if live > last + PART_BYTES // 2:
            found.append(resident + live - before)
        last = live
    return found


def in_parts(sizes: list[int]) -> list[int]:
    """Bytes in eighths of a tensor, which leaves out malloc's rounding and small objects."""
    return [round(size / PART_BYTES) for size in sizes]


def test_random_programs_allocate_and_release_as_their_graphs_say(counter):
    @settings(max_examples=50)
    @given(programs())
    def check(program):
        lines, num_weights = program
        step = TrainingStep(
            model=Program(lines, num_weights), batch=torch.rand(SHAPE), loss_fn=lambda y: y.sum()
        )
        graph = capture_step(step)
        expected = live_at_allocations(graph)
        assert in_parts(expected) == in_parts(measured_at_allocations(step, counter))

    gc.freeze()  # so that collecting what one program leaves does not walk all of torch
    try:
        check()
    finally:
        gc.unfreeze()
