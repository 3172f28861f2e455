"""BatchNorm over replicas has the numbers of one device on all their samples.

The replicas are threads of this process, each with a model and a piece of the batch of its own.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bayplan.costing.pricing import free_prices
from bayplan.data.errors import CaptureError
from bayplan.planning.memory.orders import by_strategy
from bayplan.rewriting.synchronised_norm import norm_of_replicas, norm_of_replicas_backward
from bayplan.running.compiled_stage import KEEP_ALL, compile_stage
from bayplan.step import TrainingStep
from bayplan.tracing.stages.drawing import Streams
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.synchronising import norms_to_synchronise, synchronised_buffers
from bayplan.tracing.stages.whole import InputKind, batch_dimensions
from bayplan.tracing.stages.whole_trace import batch_tensors, named_tensors, trace_whole
from bayplan.tracing.traced_step import MemoryContext

pytestmark = pytest.mark.usefixtures("own_planner_cache")

TOLERANCE = 1e-12
SIZES = (4, 2, 3)
aten = torch.ops.aten


class RankTopology:
    """What replicas say to each other, and how often."""

    def __init__(self, num_replicas):
        self.here, self.said = threading.Barrier(num_replicas, timeout=60), [None] * num_replicas
        self.counts = [0] * num_replicas


class Replica:
    def __init__(self, meeting, number):
        self.meeting, self.number = meeting, number

    def gathered(self, own):
        self.meeting.said[self.number] = own.clone()
        self.meeting.counts[self.number] += 1
        self.meeting.here.wait()
        found = torch.stack(self.meeting.said)
        self.meeting.here.wait()
        return found

    def total(self, own):
        return self.gathered(own).sum(0)

    def __repr__(self):
        return "Replica()"


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


def on_replicas(
    num_replicas: int, work: Callable[[Replica], Any]
) -> tuple[list[Any], RankTopology]:
    """What each replica's work gives, and what was said on the way."""
    meeting = RankTopology(num_replicas)
    replicas = [Replica(meeting, at) for at in range(num_replicas)]
    return in_threads([partial(work, replica) for replica in replicas]), meeting


class Net(nn.Module):
    """BatchNorms of every kind, and what only looks like one; no bias that they would cancel."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.first = nn.BatchNorm2d(4)
        self.middle = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bare = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
        self.single = nn.InstanceNorm2d(4, affine=True)
        self.frozen = nn.BatchNorm2d(4).eval()
        self.head = nn.Linear(4, 5, bias=False)
        self.last = nn.BatchNorm1d(5, momentum=0.3)

    def forward(self, images):
        value = self.first(self.stem(images)).relu()
        value = self.single(self.bare(self.middle(value)) + value).relu()
        return self.last(self.head(self.frozen(value).mean((2, 3))))


def build_step():
    torch.manual_seed(0)
    model = Net().double()
    batch = torch.randn(sum(SIZES), 3, 6, 6, dtype=torch.float64) * 3 + 2
    return TrainingStep(
        model=model, batch=(batch, torch.randint(5, (sum(SIZES),))), loss_fn=nn.CrossEntropyLoss()
    )


@pytest.fixture(scope="module")
def graphs():
    """By number of samples."""
    step = build_step()
    return {size: trace_whole(step, num_samples=size) for size in range(2, 6)}


def names_in(graphs):
    staged = StagedStep(graphs[3], (0,))
    dimensions = batch_dimensions(graphs[3], graphs[2])
    return norms_to_synchronise(graphs[3], staged.assignment, [0], dimensions)


def test_only_batch_norms_in_training_are_synchronised(graphs):
    names = names_in(graphs)
    nodes = [node for node in graphs[3].nodes if node.name in names]
    places = [list(node.meta["nn_module_stack"].values())[-1][0] for node in nodes]
    assert places == [f"L['self'].model.{name}" for name in ("first", "bare", "last")]


def test_a_stage_of_one_replica_is_left_alone(graphs):
    staged = StagedStep(graphs[3], (0,))
    dimensions = batch_dimensions(graphs[3], graphs[2])
    assert not norms_to_synchronise(graphs[3], staged.assignment, [], dimensions)


def test_a_batch_norm_of_another_kind_is_refused(graphs, make_step):
    batch = torch.randn(4, 3, dtype=torch.float64)
    step = make_step(lambda: (nn.BatchNorm1d(3), batch, lambda output: output.mean()))
    whole, other = (trace_whole(step, num_samples=size) for size in (2, 3))
    staged = StagedStep(whole, (0,))
    (norm,) = (one for one in whole.nodes if "legit" in str(one.target))
    where, dimensions = staged.assignment, batch_dimensions(whole, other)
    norm.target = aten.cudnn_batch_norm.default
    with pytest.raises(CaptureError, match=r"cudnn_batch_norm.* cannot be synchronised"):
        norms_to_synchronise(whole, where, [0], dimensions)


@dataclass
class Prepared:
    """A replica's stages, its own model, and its piece of the batch."""

    stages: list
    tensors: dict
    batch: list
    weight: float


def prepare(replica, graphs, *, cut, decide):
    step, at = build_step(), replica.number
    begin, size = sum(SIZES[:at]), SIZES[at]
    whole, other = graphs[size], graphs[size + 1]
    numbers, firsts = range(len(cut) + 1), (0, *cut)
    where = StagedStep(whole, firsts).assignment
    names = norms_to_synchronise(whole, where, numbers, batch_dimensions(whole, other))
    staged, context = StagedStep(whole, firsts, names), MemoryContext(prices=free_prices)
    return Prepared(
        [
            compile_stage(
                staged, stage, context, streams=Streams({}), decide=decide, replicas=replica
            )
            for stage in numbers
        ],
        named_tensors(step),
        [tensor[begin : begin + size] for tensor in batch_tensors(step.batch)],
        size / sum(SIZES),
    )


def whole_backward(stage, given):
    gradients = {}
    sent = stage.backward([*given, gradients.__setitem__])
    return [gradients[at] for at in range(len(stage.graph.parameters))], sent


def backward_in_halves(stage, given):
    outputs = stage.backward_input(given)
    num_sent = len(stage.graph.gradients_out)
    sent, handed = outputs[:num_sent], outputs[num_sent:]
    gradients = {}
    assert stage.backward_weight([*handed, gradients.__setitem__]) == []
    return [gradients[at] for at in range(len(stage.graph.parameters))], sent


def run(own: Prepared, *, backward_of):
    """A piece's loss and gradients; the model's buffers move on."""
    compiled, tensors, batch, weight = own.stages, own.tensors, own.batch, own.weight
    values, saved, loss, gradients = {}, [], None, {}
    for stage in compiled:
        graph = stage.graph
        arguments = [
            values[one.name]
            if one.kind is InputKind.CARRIED
            else batch[int(one.name)]
            if one.kind is InputKind.BATCH
            else tensors[one.name].detach()
            for one in graph.inputs
        ]
        outputs = stage.forward(arguments)
        for name, value in zip(graph.new_buffers, outputs, strict=False):
            tensors[name].copy_(value)
        values |= zip(graph.sent, outputs[len(graph.new_buffers) :], strict=False)
        loss = outputs[graph.num_forward_outputs - 1] * weight if graph.has_loss else loss
        saved.append(outputs[graph.num_forward_outputs :])
    back = {}
    for stage, kept in zip(reversed(compiled), reversed(saved), strict=True):
        graph = stage.graph
        given = [*kept, *(back[name].clone() for name in graph.gradients_in)]
        given += [graph.loss_gradient(weight)] if graph.has_loss else []
        of_weights, sent = backward_of(stage, given)
        gradients |= zip(graph.parameters, of_weights, strict=True)
        back |= zip(graph.gradients_out, sent, strict=True)
    return loss, gradients


@pytest.mark.parametrize("backward_of", [whole_backward, backward_in_halves])
@pytest.mark.parametrize("is_repeated", [False, True], ids=["kept", "repeated"])
@pytest.mark.parametrize("cut", [(), (4,)], ids=["one stage", "two stages"])
def test_replicas_with_uneven_pieces_have_the_numbers_of_one_device(
    graphs, train_plain, repeat_everything, is_repeated, cut, backward_of
):
    decide = by_strategy("all", repeat_everything) if is_repeated else KEEP_ALL
    meeting = RankTopology(len(SIZES))
    replicas = [Replica(meeting, at) for at in range(len(SIZES))]
    prepared = [prepare(replica, graphs, cut=cut, decide=decide) for replica in replicas]
    results = in_threads([partial(run, own, backward_of=backward_of) for own in prepared])
    plain = train_plain(build_step())
    loss = sum(loss.item() for loss, _ in results)
    assert loss == pytest.approx(plain.loss.item(), rel=TOLERANCE)
    for name, wanted in plain.gradients.items():
        found = sum(gradients[name] for _, gradients in results)
        # A shift that a later BatchNorm takes away has a gradient of zero but for rounding.
        assert (found - wanted).abs().max() <= TOLERANCE * max(wanted.abs().max().item(), 0.1)
    for own in prepared:
        for name, wanted in plain.buffers.items():
            torch.testing.assert_close(own.tensors[name], wanted, rtol=TOLERANCE, atol=TOLERANCE)
    # Three BatchNorms, forward and backward: repeats said nothing.
    assert meeting.counts == [6] * len(SIZES)
    stages = prepared[0].stages
    assert {name for stage in stages for name in synchronised_buffers(stage.graph)} == {
        f"{name}.running_{what}" for name in ("first", "last") for what in ("mean", "var")
    }


CASES = {
    "images": ((9, 4, 5, 5), torch.float64, torch.float64, 1e-14),
    "rows": ((9, 4), torch.float64, torch.float64, 1e-14),
    "single precision": ((9, 4, 5), torch.float32, torch.float32, 1e-6),
    "mixed precision": ((9, 4, 5, 5), torch.bfloat16, torch.float32, 1e-2),
}


@pytest.mark.parametrize(("shape", "dtype", "kept", "tolerance"), CASES.values(), ids=CASES)
def test_pieces_of_any_sizes_give_what_torch_gives_for_all(shape, dtype, kept, tolerance):
    torch.manual_seed(0)
    image, gradient = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    image, gradient = (image * 3 + 9).to(dtype), gradient.to(dtype)
    weight, bias, mean, variance = (torch.rand(4, dtype=kept) + 0.5 for _ in range(4))
    running = (weight, bias, mean, variance)
    wanted = aten._native_batch_norm_legit_functional(image, *running, True, 0.1, 1e-5)
    statistics = (None, None, *wanted[1:3], True, 1e-5, [True] * 3)
    wanted_back = aten.native_batch_norm_backward(gradient, image, weight, *statistics)

    def work(replica):
        own, arriving = (tensor.split(SIZES)[replica.number] for tensor in (image, gradient))
        made = norm_of_replicas(replica, own, *running, 0.1, 1e-5, own.stride())
        _, mean, deviation, _, _ = made
        back = norm_of_replicas_backward(
            replica, arriving, own, weight, mean, deviation, [True] * 3, own.stride()
        )
        return made, back

    results, _ = on_replicas(len(SIZES), work)

    def check(found, wanted):
        assert found.dtype is wanted.dtype
        largest = wanted.abs().max().item()
        assert (found - wanted).abs().max().item() <= tolerance * largest

    check(torch.cat([made[0] for made, _ in results]), wanted[0])
    check(torch.cat([back[0] for _, back in results]), wanted_back[0])
    for at in (1, 2):
        check(sum(back[at] for _, back in results), wanted_back[at])
    for at in (1, 2, 3, 4):
        check(results[0][0][at], wanted[at])
        assert all(torch.equal(made[at], results[0][0][at]) for made, _ in results)


def test_without_a_gradient_of_the_image_nobody_is_waited_for():
    image = torch.randn(4, 3)

    def work(replica):
        mean, deviation = torch.zeros(3), torch.ones(3)
        given = (image, image, torch.ones(3), mean, deviation)
        return norm_of_replicas_backward(replica, *given, [False, True, True], ())

    ((of_image, of_weight, of_bias),), meeting = on_replicas(1, work)
    assert of_image is None
    assert (of_weight.shape, of_bias.shape) == ((3,), (3,))
    assert meeting.counts == [0]
