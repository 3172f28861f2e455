"""What a rank of these tests runs: `python training.py FOLDER`, with the cases in a file there.

Every case is trained twice, by this process alone and as one of the ranks, and the difference is
written down. Many cases in one start of the processes, for that is what takes the time.
"""

import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch import distributed, nn
from torch.nn import functional

from bayplan.data import files
from bayplan.data.errors import BayplanError
from bayplan.data.plan import Plan
from bayplan.pipelined import bind
from bayplan.running.ranks.failures import ToldFailure
from bayplan.training import TrainingStep

NUM_STEPS = 4
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


def build(model, num_samples, *, seed=0):
    """A step in float64, the same in every process with this seed."""
    torch.manual_seed(seed)
    if model == "plain":
        module, inputs = Plain(), torch.randn(num_samples, WIDTH, dtype=torch.float64)
        targets = torch.randint(3, (num_samples,))
    else:
        module, inputs = Mixed(), torch.randint(VOCABULARY, (num_samples, LENGTH))
        targets = torch.randint(VOCABULARY, (num_samples, LENGTH))
    return TrainingStep(model=module.double(), batch=(inputs, targets), loss_fn=cross_entropy)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train_alone(case, plan):
    """In this process; where the plan allows stale weights, with those each batch would see."""
    alone = build(case["model"], case["batch"])
    optimizer, named = optimizer_of(alone.model), dict(alone.model.named_parameters())
    lag_of = {
        name: plan.lags[bucket.stages[0]] if plan.lags else 0
        for bucket in plan.buckets
        for name in bucket.parameters
    }
    if plan.vertical_sync:
        lag_of = dict.fromkeys(lag_of, max(plan.lags))
    versions, losses = [], []
    inputs, targets = alone.batch
    torch.manual_seed(1)
    for step in range(NUM_STEPS):
        versions.append({name: one.detach().clone() for name, one in named.items()})
        seen = {
            name: versions[max(0, step - lag_of[name])][name].requires_grad_() for name in named
        }
        output = torch.func.functional_call(alone.model, seen, (inputs,))
        loss = alone.loss_fn(output, targets)
        for one, gradient in zip(
            named.values(), torch.autograd.grad(loss, list(seen.values())), strict=True
        ):
            one.grad = gradient
        optimizer.step()
        losses.append(loss.item())
    return alone, losses


def compare(case, plan):
    """Train both ways, and return how far they are apart."""
    alone, alone_losses = train_alone(case, plan)
    random_state = torch.get_rng_state()

    own = build(case["model"], case["batch"])
    step = bind(
        own.model, optimizer_of(own.model), plan, loss_fn=own.loss_fn, swap=case.get("swap")
    )
    torch.manual_seed(1)
    losses = [step(*own.batch).item() for _ in range(NUM_STEPS)]
    losses = losses[max(plan.lags, default=0) :] + [loss.item() for loss in step.flush()]
    is_same_state = torch.equal(random_state, torch.get_rng_state())
    wanted, found = alone.model.state_dict(), own.model.state_dict()
    step.close()
    return {
        "loss": max(abs(a - b) for a, b in zip(alone_losses, losses, strict=True)),
        "state": max((wanted[name] - found[name]).abs().max().item() for name in wanted),
        "names": list(found) == list(wanted),
        "random_state": is_same_state,
        "staleness": list(step.staleness),
        "moved": abs(alone_losses[0] - alone_losses[-1]) > 1e-4,
        "digest": digest_of(losses, found),
    }


def digest_of(losses, state):
    """Tells trainings apart by every bit of what came out."""
    digest = hashlib.sha256(repr(losses).encode())
    for tensor in state.values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main():
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    cases = json.loads((folder / "cases.json").read_text())
    for case in cases:
        plan = files.read(folder / case.get("plans", {}).get(str(rank), case["plan"]), Plan)
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
