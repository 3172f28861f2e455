import logging
import os
from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import distributed, nn
from torch.utils.data import TensorDataset


@pytest.fixture(autouse=True)
def _alone(own_planner_cache) -> Iterator[None]:
    """Accelerate has one state per process, whatever precision the test before asked for.

    It and Lightning also tell processes that they start of ranks and ports, by the environment.
    """
    environment = dict(os.environ)
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    if distributed.is_initialized():  # by a strategy that shards
        distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def network():
    """Batch statistics and random numbers; the same at each call."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1))
            for _ in range(4)
        ]
        return nn.Sequential(*blocks, nn.Linear(32, 5))

    return made


@pytest.fixture(scope="session")
def dataset():
    """Three batches of 256 and a smaller one."""
    generator = torch.Generator().manual_seed(1)
    samples = 3 * 256 + 100
    inputs = torch.randn(samples, 32, generator=generator)
    return TensorDataset(inputs, torch.randint(5, (samples,), generator=generator))


@pytest.fixture(scope="session")
def assert_bits():
    """Two trainings, each as losses and state, have the same bits."""

    def check(plain, planned) -> None:
        (losses, state), (planned_losses, planned_state) = plain, planned
        assert len(losses) > 1
        assert torch.tensor(losses).tolist() == torch.tensor(planned_losses).tolist()
        assert [name for name in state if not torch.equal(state[name], planned_state[name])] == []

    return check
