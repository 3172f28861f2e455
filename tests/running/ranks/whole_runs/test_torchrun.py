"""The example script under torchrun, on one host and on two: the numbers of one process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bayplan.data import files
from bayplan.data.placement import Placement
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.preparing.stages import PreparedStages
from bayplan.step import TrainingStep

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples" / "train_on_ranks.py"
MOST_SECONDS = 250
TOLERANCE = 2e-5  # of parameters in float32, after 20 steps in which they move by 0.01 and more


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example():
    return load(EXAMPLE, "bayplan_tests_example")


@pytest.fixture(scope="module")
def trained_alone(example):
    """The state after the example's training, in this process."""
    torch.manual_seed(0)
    model, _, loss_fn = example.build()
    optimizer = example.optimizer_of(model)
    start = {name: one.clone() for name, one in model.state_dict().items()}
    for images, labels in example.batches(example.STEPS):
        optimizer.zero_grad()
        loss_fn(model(images), labels).backward()
        optimizer.step()
    state = model.state_dict()
    assert max((state[name] - start[name]).abs().max() for name in state) > 0.01
    return state


@pytest.fixture
def planned(example, tmp_path):
    def write(placement):
        model, batch, loss_fn = example.build()
        step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn)
        wishes = RankPlanOptions(placement=Placement.parse(placement), shares_by=SharesBy.OPS)
        files.write(tmp_path / "plan.json", place(PreparedStages(step=step), wishes))
        torch.compiler.reset()
        return tmp_path / "plan.json"

    return write


def torchrun(options, plan, *, inside=(), **variables):
    """Start the example, which writes what it trained beside the plan."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(EXAMPLE)]
    return subprocess.Popen(
        [*inside, *command, str(plan.parent / "trained.pt")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "BAYPLAN_PLAN": str(plan), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check(jobs, plan, wanted):
    """All jobs end well, and rank 0 has what one process has."""
    try:
        outputs = [job.communicate(timeout=MOST_SECONDS)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * len(jobs), "\n".join(outputs)
    assert outputs[0].splitlines()[-1].startswith("step 20 of 20, loss ")
    found = torch.load(plan.parent / "trained.pt")
    assert list(found) == list(wanted)
    for name, one in wanted.items():
        assert (found[name] - one).abs().max() <= TOLERANCE, name


def test_one_host(planned, trained_alone):
    plan = planned("0:0-2.0:3")
    check([torchrun(["--standalone", "--nproc-per-node=4"], plan)], plan, trained_alone)


@pytest.mark.parametrize(
    "placement",
    [pytest.param("0:0-1,1:0-1.0:0-1,1:0-1", marks=pytest.mark.slow), "0:0-1,1:0.1:1"],
)
def test_two_hosts(planned, trained_alone, placement):
    hosts = load(ROOT / "benchmarks" / "ranks" / "hosts.py", "bayplan_tests_hosts")
    plan = planned(placement)
    made = hosts.two_hosts()
    try:
        pair = made.__enter__()
    except hosts.HostsUnavailable as reason:
        pytest.skip(str(reason))
    try:
        jobs = [
            torchrun(
                [
                    f"--nnodes={len(pair)}",
                    f"--node-rank={node}",
                    "--nproc-per-node=2",
                    f"--master-addr={pair[0].address}",
                    "--master-port=29511",
                ],
                plan,
                inside=["ip", "netns", "exec", host.name],
                GLOO_SOCKET_IFNAME=host.interface,
            )
            for node, host in enumerate(pair)
        ]
        check(jobs, plan, trained_alone)
    finally:
        made.__exit__(None, None, None)
