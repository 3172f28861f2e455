"""What a rank of these tests runs: `python training.py FOLDER`, with the cases in a file there.

Every case is trained twice, by this process alone and as one of the ranks, and the difference is
written down. Many cases in one start of the processes, for that is what takes the time.
"""

import hashlib
import importlib.util
import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch import distributed, nn
from torch.nn import functional

from bayplan.data import files
from bayplan.data.errors import BayplanError
from bayplan.data.plan import RankPlan
from bayplan.devices.device import device_of
from bayplan.running.ranks.failures import ToldFailure
from bayplan.running.ranks.pipelined import bind
from bayplan.step import TrainingStep, call_model, loss_of, split_batch

NUM_STEPS = 4
SMALLEST = 1e-3  # a tensor without a larger element is compared as if it had one
WIDTH, LENGTH, VOCABULARY = 6, 4, 13


def cross_entropy(output, target):
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


class Plain(nn.Sequential):
    def __init__(self):
        layers = [nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Dropout(0.3)]
        layers += [nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.GELU()]
        super().__init__(*layers, nn.Linear(8, 3))


class Mixed(nn.Module):
    """What stages stumble over: a tied weight, a skip, a bias without samples, samples second."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        # Without a bias: that of the keys has gradient zero, and Adam makes steps of its rounding.
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, bias=False)
        self.last = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, ids):
        bias = torch.tanh(self.places) * self.scale
        start = self.embedding(ids) + bias
        value = (torch.tanh(self.first(start)) + start).transpose(0, 1)
        value = value + self.attention(value, value, value)[0]
        value = value.transpose(0, 1) + start
        return self.head(self.last(value) * bias + value)


def real_models():
    """The other file, found beside this one whoever runs it."""
    name = "bayplan_tests_real_models"
    if name not in sys.modules:
        path = Path(__file__).with_name("real_models.py")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name].BUILDERS


def build(model, num_samples, dtype="float64", *, seed=0, device="cpu"):
    """A step, the same in every process with this seed."""
    step = build_on_cpu(model, num_samples, dtype, seed=seed)
    if device == "cpu":
        return step
    batch = step.batch if isinstance(step.batch, tuple) else (step.batch,)
    batch = tuple(tensor.to(device) for tensor in batch)
    return replace(step, model=step.model.to(device), batch=batch)


def build_on_cpu(model, num_samples, dtype, *, seed):
    torch.manual_seed(seed)
    if model not in ("plain", "mixed"):
        dtype = getattr(torch, dtype)
        module, batch, loss_fn = real_models()[model](num_samples, dtype)
        return TrainingStep(model=module.to(dtype), batch=batch, loss_fn=loss_fn)
    if model == "plain":
        module, inputs = Plain(), torch.randn(num_samples, WIDTH, dtype=torch.float64)
        targets = torch.randint(3, (num_samples,))
    else:
        module, inputs = Mixed(), torch.randint(VOCABULARY, (num_samples, LENGTH))
        targets = torch.randint(VOCABULARY, (num_samples, LENGTH))
    return TrainingStep(model=module.double(), batch=(inputs, targets), loss_fn=cross_entropy)


def optimizer_of(model):
    if not isinstance(model, Plain | Mixed):
        # Some gradients of real models are zero but for rounding, of which Adam makes steps.
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def called(model, seen, *args, **options):
    return torch.func.functional_call(model, seen, args, options)


def loss_alone(alone, seen, plan):
    """The loss of a batch; where BatchNorm sees micro-batches, that of each counts its part."""
    inputs, targets = split_batch(alone.batch, alone.loss_fn)
    call = partial(called, alone.model, seen)
    if not (plan.sync_batch_norm and plan.num_micro_batches > 1):
        return loss_of(call_model(call, inputs), alone.loss_fn, targets)
    parts = zip(*(one.chunk(plan.num_micro_batches) for one in (inputs, *targets)), strict=True)
    losses = [alone.loss_fn(call(part), *rest) * len(part) / len(inputs) for part, *rest in parts]
    return torch.stack(losses).sum()


def train_alone(case, plan):
    """In this process; where the plan allows stale weights, with those each batch would see."""
    alone = build(case["model"], case["batch"], case["dtype"], device=case.get("device", "cpu"))
    optimizer, named = optimizer_of(alone.model), dict(alone.model.named_parameters())
    lag_of = {
        name: plan.lags[bucket.stages[0]] if plan.lags else 0
        for bucket in plan.buckets
        for name in bucket.parameters
    }
    if plan.vertical_sync:
        lag_of = dict.fromkeys(lag_of, max(plan.lags))
    versions, losses = [], []
    torch.manual_seed(1)
    for step in range(case["steps"]):
        versions.append({name: one.detach().clone() for name, one in named.items()})
        seen = {
            name: versions[max(0, step - lag_of[name])][name].requires_grad_() for name in named
        }
        loss = loss_alone(alone, seen, plan)
        for one, gradient in zip(
            named.values(), torch.autograd.grad(loss, list(seen.values())), strict=True
        ):
            one.grad = gradient
        optimizer.step()
        losses.append(loss.item())
    return alone, losses


def apart(wanted, found):
    """The largest difference of two tensors, relative to the largest element."""
    return (wanted - found).abs().max().item() / max(wanted.abs().max().item(), SMALLEST)


def compare(case, plan):
    """Train both ways, and return how far they are apart."""
    alone, alone_losses = train_alone(case, plan)
    device = device_of(case.get("device", "cpu"))
    random_state = device.generator_state()

    own = build(case["model"], case["batch"], case["dtype"], device=case.get("device", "cpu"))
    batch = own.batch if isinstance(own.batch, tuple) else (own.batch,)
    step = bind(
        own.model, optimizer_of(own.model), plan, loss_fn=own.loss_fn, swap=case.get("swap")
    )
    torch.manual_seed(1)
    losses = [step(*batch).item() for _ in range(case["steps"])]
    losses = losses[max(plan.lags, default=0) :] + [loss.item() for loss in step.flush()]
    is_same_state = torch.equal(random_state, device.generator_state())
    wanted, found = alone.model.state_dict(), own.model.state_dict()
    step.close()
    return {
        "loss": max(abs(a - b) / abs(a) for a, b in zip(alone_losses, losses, strict=True)),
        "state": max(apart(wanted[name], found[name]) for name in wanted),
        "names": list(found) == list(wanted),
        "random_state": is_same_state,
        "staleness": list(step.staleness),
        "moved": abs(alone_losses[0] - alone_losses[-1]) > 1e-4,
        "digest": digest_of(losses, found),
        "repeats": any(
            len(one.order.schedule) > len(set(one.order.schedule)) for one in plan.stage_orders
        ),
    }


def digest_of(losses, state):
    """Tells trainings apart by every bit of what came out."""
    digest = hashlib.sha256(repr(losses).encode())
    for tensor in state.values():
        digest.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def main():
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    cases = json.loads((folder / "cases.json").read_text())
    for given in cases:
        case = {"dtype": "float64", "steps": NUM_STEPS, **given}
        plan = files.read(folder / case.get("plans", {}).get(str(rank), case["plan"]), RankPlan)
        result = compare(case, plan)
        (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(result))
        torch.compiler.reset()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ToldFailure:  # printed by one rank for all
        raise
    except BayplanError as fault:
        print(f"bayplan: rank {os.environ['RANK']}: {fault}", file=sys.stderr, flush=True)
        sys.exit(fault.exit_code)
