"""Models that real ranks train together, next to one process and to `DistributedDataParallel`."""

import json

import pytest

from bayplan.running.ranks.launching import launch

TIMEOUT_SECONDS = 250.0
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch import distributed, nn
import bayplan
from bayplan.data.exchange import ExchangeSettings
from bayplan.running.collectives.averaging import AveragingFault

results = Path(sys.argv[1])
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
STEPS, SAMPLES = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.frozen = nn.Linear(20, 20)
        self.frozen.requires_grad_(False)
        self.even, self.odd, self.never = (nn.Linear(20, 20) for _ in range(3))
        self.head = nn.Linear(20, 4)

    def forward(self, x, way=None):
        x = self.norm(self.conv(x)).relu().flatten(1)
        x = self.frozen(x).tanh()
        for at, layer in enumerate((self.even, self.odd)):
            if way is None or way % 2 == at:
                x = layer(x).tanh()
        return self.head(x)


def made(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return Model().to(dtype)


def samples(step, of_rank, dtype=torch.float64):
    torch.manual_seed(1000 * step + of_rank)
    return torch.randn(SAMPLES, 3, 4, 4, dtype=dtype)


def optimizer_of(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def trained(model, backward, *, steps=STEPS, set_to_none=True):
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(step)
        optimizer.step()
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def apart(one, other):
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def same_on_all(tensors):
    flat = torch.cat([one.double().reshape(-1) for one in tensors.values()])
    low, high = flat.clone(), flat.clone()
    distributed.all_reduce(low, distributed.ReduceOp.MIN)
    distributed.all_reduce(high, distributed.ReduceOp.MAX)
    return torch.equal(low, high)


def loss_of(model, x, way=None):
    return model(x, way).square().mean()


found = {}

# One process on all samples, with statistics of each rank's own samples, as data parallel has.
alone = made()
def whole(step):
    torch.stack([loss_of(alone, samples(step, one)) for one in range(num_ranks)]).mean().backward()
expected = trained(alone, whole)

ours = made(seed=rank)  # rank 0's counts
keys = list(ours.state_dict())
returned = bayplan.data_parallel(ours)
found["is the same module"] = returned is ours and list(ours.state_dict()) == keys
got = trained(ours, lambda step: loss_of(ours, samples(step, rank)).backward())
found["apart from one process"] = apart(expected, got)
found["same on all ranks"] = same_on_all(got)
found["never used has no gradient"] = ours.never.weight.grad is None
buckets = bayplan.exchange_of(ours).averaging.buckets
found["all are in one bucket"] = sorted(name for own in buckets for name in own) == sorted(
    name for name, one in ours.named_parameters() if one.requires_grad)
times = bayplan.exchange_of(ours).times
found["times"] = (times.unhidden_seconds > 0 and times.exchange_seconds > 0
                  and len(times.sums) == len(buckets))
found["buffers are rank 0's"] = same_on_all({"mean": ours.norm.running_mean}) or rank >= 0
found["strides"] = ours.conv.weight.grad.stride() == ours.conv.weight.stride()

# As DistributedDataParallel, whose order of sums is another one for more than two ranks.
theirs = nn.parallel.DistributedDataParallel(made(torch.float32), find_unused_parameters=True)
ours = bayplan.data_parallel(made(torch.float32))
def single(step):
    return samples(step, rank, torch.float32)
found["apart from torch"] = apart(
    trained(theirs.module, lambda step: loss_of(theirs, single(step)).backward()),
    trained(ours, lambda step: loss_of(ours, single(step)).backward()))

# Other parameters are used on other ranks, and others in each step.
alone, ours = made(), bayplan.data_parallel(made())
def whole_unlike(step):
    torch.stack([loss_of(alone, samples(step, one), one + step)
                 for one in range(num_ranks)]).mean().backward()
found["unused"] = apart(
    trained(alone, whole_unlike),
    trained(ours, lambda step: loss_of(ours, samples(step, rank), rank + step).backward()))

# Gradients that are accumulated first, and zeroed rather than dropped.
alone, ours = made(), bayplan.data_parallel(made())
def accumulated_alone(step):
    for part in range(3):
        torch.stack([loss_of(alone, samples(3 * step + part, one))
                     for one in range(num_ranks)]).mean().backward()
def accumulated(step):
    with bayplan.no_sync(ours):
        for part in range(2):
            loss_of(ours, samples(3 * step + part, rank)).backward()
    loss_of(ours, samples(3 * step + 2, rank)).backward()
expected = trained(alone, accumulated_alone, set_to_none=False)
found["accumulated"] = apart(expected, trained(ours, accumulated, set_to_none=False))

# Settings change how gradients travel, at any time between two steps, and no result.
alone, ours = made(), bayplan.data_parallel(made())
SETTINGS = ("planned", "fusion_threshold=0", "fusion_threshold=1KiB", "algorithm=ring",
            "algorithm=reduce_scatter", "hierarchical_allreduce=on", "hierarchical_allreduce=off",
            "fusion_threshold=64MiB,cycle_time=5", "cycle_time=1", "strip=4KiB", "planned")
def whole_again(step):
    torch.stack([loss_of(alone, samples(step, one)) for one in range(num_ranks)]).mean().backward()
num_buckets = {}
def switched(step):
    exchange = bayplan.exchange_of(ours)
    exchange.use(ExchangeSettings.parse(SETTINGS[step]))
    loss_of(ours, samples(step, rank)).backward()
    num_buckets[SETTINGS[step]] = len(exchange.averaging.buckets)
steps = len(SETTINGS)
expected = trained(alone, whole_again, steps=steps)
found["switched"] = apart(expected, trained(ours, switched, steps=steps))
num_trained = sum(one.requires_grad for one in ours.parameters())
found["settings count"] = (num_buckets["fusion_threshold=0"] == num_trained
                           > num_buckets["fusion_threshold=1KiB"]
                           > num_buckets["fusion_threshold=64MiB,cycle_time=5"])
exchange = bayplan.exchange_of(ours)
found["text"] = exchange.text()
found["predicts"] = exchange.predict(exchange.settings) > 0

# Gradients large and small, copied by whoever makes them or beside, on each rank as it likes.
def wide():
    torch.manual_seed(0)
    layers = nn.Linear(24, 500), nn.Tanh(), nn.Linear(500, 500), nn.Linear(500, 4)
    return nn.Sequential(*layers).double()
alone, ours = wide(), bayplan.data_parallel(wide())
def row(step, one):
    return samples(step, one).flatten(1)[:, :24]
def whole_wide(step):
    losses = [alone(row(step, one)).square().mean() for one in range(num_ranks)]
    torch.stack(losses).mean().backward()
def copied(step):
    averaging = bayplan.exchange_of(ours).averaging
    averaging.lay_out(averaging.buckets, copies_beside=bool((step + rank) % 2))
    ours(row(step, rank)).square().mean().backward()
found["copied"] = apart(trained(alone, whole_wide), trained(ours, copied))

# Several dtypes.
mixed = made(torch.float32)
mixed.head.double(); mixed.even.bfloat16(); mixed.odd.bfloat16()
class Cast(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        inner = self.inner
        x = inner.frozen(inner.norm(inner.conv(x)).relu().flatten(1)).tanh()
        return inner.head(inner.odd(inner.even(x.bfloat16())).double())
mixed = bayplan.data_parallel(Cast(mixed))
got = trained(mixed, lambda step: mixed(single(step)).square().mean().backward())
are_finite = [bool(one.isfinite().all()) for one in got.values()]
found["several dtypes"] = same_on_all(got) and all(are_finite)

# A backward that fails is ended by the next forward, on all ranks.
ours = bayplan.data_parallel(made())
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("as told")
x = samples(0, rank)
hidden = Fails.apply(ours.norm(ours.conv(x)).relu().flatten(1))
try:
    ours.head(hidden).square().mean().backward()
except ValueError:
    found["failed"] = True
got = trained(ours, lambda step: loss_of(ours, samples(step, rank)).backward())
found["apart after a failure"] = same_on_all(got)

# A gradient that is not a number, on the last rank.
ours = bayplan.data_parallel(made(), check_finite=True)
optimizer = optimizer_of(ours)
def not_a_number():
    x = samples(0, rank)
    if rank == num_ranks - 1:
        x[0, 0, 0, 0] = float("nan")
    loss_of(ours, x).backward()
loss_of(ours, samples(0, rank)).backward()
try:
    not_a_number()
except AveragingFault as fault:
    found["not a number"] = str(fault)

# Mistakes.
def refusal(call):
    try:
        call()
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"
found["twice"] = refusal(lambda: bayplan.data_parallel(ours))
found["not exchanged"] = refusal(lambda: bayplan.exchange_of(made()))
found["nothing trained"] = refusal(lambda: bayplan.data_parallel(made().requires_grad_(False)))
os.environ["BAYPLAN_SHARED_MEMORY"] = "0"
found["unknown way"] = refusal(lambda: bayplan.data_parallel(made(), settings="algorithm=shared"))
del os.environ["BAYPLAN_SHARED_MEMORY"]
found["compression"] = refusal(lambda: bayplan.data_parallel(made(), settings="compression=int8"))
class Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ours.head(torch.ones(1, 20, dtype=torch.float64)).sum().backward()
        return gradient
def twice():
    x = torch.ones(1, 20, dtype=torch.float64)
    ours.head(Reentrant.apply(ours.even(x))).sum().backward()
found["second gradient"] = refusal(twice)
results.joinpath(f"{rank}.json").write_text(json.dumps(found))
distributed.barrier()
distributed.destroy_process_group()
"""


def run(folder, text, num_ranks):
    """Run a script on some ranks; returns its exit code and what was told."""
    script, lines = folder / "script.py", []
    script.write_text(text)
    code = launch(
        [str(script), str(folder)],
        num_ranks=num_ranks,
        log_folder=folder / "logs",
        timeout_seconds=TIMEOUT_SECONDS,
        on_line=lines.append,
    )
    return code, "\n".join(lines)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data_parallel")
    code, told = run(folder, SCRIPT, request.param)
    assert code == 0, told
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


YES = (
    "is the same module",
    "same on all ranks",
    "never used has no gradient",
    "all are in one bucket",
    "times",
    "strides",
    "several dtypes",
    "settings count",
    "predicts",
    "failed",
    "apart after a failure",
)


@pytest.mark.parametrize("what", YES)
def test_it_is_so_on_all_ranks(found, what):
    assert [own[what] for own in found] == [True] * len(found)


@pytest.mark.parametrize(
    "what", ["apart from one process", "unused", "accumulated", "switched", "copied"]
)
def test_float64_is_as_one_process(found, what):
    assert max(own[what] for own in found) < 1e-12


def test_what_was_exchanged_is_told(found):
    for rank, own in enumerate(found):
        assert "|count|mean size/MB|" in own["text"]
        assert "in the last of 11 backwards, sums were under way for" in own["text"]
        assert any("has waited" in line for line in own["text"].splitlines()) or rank


def test_float32_is_as_distributed_data_parallel(found):
    most = 0.0 if len(found) == 2 else 1e-6  # two numbers have one order
    assert max(own["apart from torch"] for own in found) <= most


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("twice", "UsageError: data_parallel was called twice"),
        ("not exchanged", "UsageError: nothing exchanges this model's gradients"),
        ("nothing trained", "UsageError: no parameter of the model is trained"),
        ("compression", "cannot read 'compression=int8' as settings"),
        (
            "unknown way",
            "gradients cannot be summed by shared here; there are ring, reduce_scatter",
        ),
        ("second gradient", "AveragingFault: head."),
        ("not a number", "gradients are infinite or not a number: head."),
    ],
)
def test_a_mistake_is_told(found, what, said):
    assert all(said in own[what] for own in found), [own[what] for own in found]


def test_the_rank_of_what_is_not_a_number_is_named(found):
    last = len(found) - 1
    assert all(f"on rank {last}. Lower the learning rate" in own["not a number"] for own in found)


BEGIN = """
import os, sys, time
import torch
from torch import distributed, nn
import bayplan
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank = distributed.get_rank()
"""
DIES = """
model = bayplan.data_parallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
for step in range(100):
    time.sleep(3.0 * (step == 4))  # ranks tell what they do once in a while
    if step == 4 and rank == 1:
        model[2].weight.register_hook(lambda gradient: os._exit(3))
    model(torch.ones(2, 64)).sum().backward()
"""
DIFFERS = """
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8 + rank))
bayplan.data_parallel(model)
"""


@pytest.mark.alone
def test_a_rank_that_dies_in_the_middle_of_an_exchange_is_named(tmp_path):
    code, told = run(tmp_path, BEGIN + DIES, 3)
    assert code != 0
    assert "rank 1" in told
    assert "after backward 4" in told


def test_another_model_on_a_rank_is_refused_on_all(tmp_path):
    code, told = run(tmp_path, BEGIN + DIFFERS, 2)
    assert code == 2
    assert "rank 1 has another model than rank 0: its tensor 2 is 1.weight (9x8 float32)" in told


NO_GROUP = """
import sys, torch, bayplan
try:
    bayplan.data_parallel(torch.nn.Linear(2, 2))
except bayplan.BayplanError as fault:
    print(fault, file=sys.stderr)
    sys.exit(7)
"""


def test_without_a_process_group_it_says_what_to_do(tmp_path):
    code, told = run(tmp_path, NO_GROUP, 1)
    assert code == 7
    assert "data_parallel needs a process group; start the script with torchrun" in told
