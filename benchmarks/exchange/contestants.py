"""Ways to average gradients over ranks, each with a model of its own."""

from typing import Any

import torch
from exchange.horovod_ranks import open_horovod
from exchange.sets import GradientSet, model_of
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import bayplan

__all__ = ["Alone", "Horovod", "Ours", "Torch"]

_LEARNING_RATE = 1e-2  # so that a wrong gradient shows in the loss of the next step


class _Steps:
    """Forward, backward and exchange; the update is that of a single number of each layer."""

    def __init__(self, model: nn.Module, inner: nn.Module) -> None:
        self.model, self._inner = model, inner
        self._inputs = torch.full((1, 4), 1.0 + distributed.get_rank())

    def step(self) -> Tensor:
        """See `Contestant`."""
        loss = self.model(self._inputs).square().mean()
        loss.backward()
        self._exchange()
        with torch.no_grad():
            for parameter in self._inner.parameters():
                assert parameter.grad is not None, "every layer is used"
                # Only the first number of an emulated layer has any effect.
                parameter[0] -= _LEARNING_RATE * parameter.grad[0]
                parameter.grad = None
        return loss.detach() / distributed.get_world_size()

    def _exchange(self) -> None:
        """What is not done in backward."""

    def close(self) -> None:
        """See `Contestant`."""


class Alone(_Steps):
    """No exchange at all: the bound. Its numbers are those of one rank."""

    def __init__(self, given: GradientSet, backward_ms: float) -> None:
        model = model_of(given, backward_ms)
        super().__init__(model, model)


class Ours(_Steps):
    """`bayplan.data_parallel`."""

    def __init__(self, given: GradientSet, backward_ms: float) -> None:
        model = bayplan.data_parallel(model_of(given, backward_ms))
        super().__init__(model, model)

    def close(self) -> None:
        """See `Contestant`."""
        bayplan.exchange_of(self.model).close()


class Torch(_Steps):
    """`DistributedDataParallel` at its fastest: gradients are views of buckets, a static graph."""

    def __init__(self, given: GradientSet, backward_ms: float, cap_mb: float | None) -> None:
        inner = model_of(given, backward_ms)
        # The default is not named, for only then the first bucket is small and leaves early.
        cap: dict[str, Any] = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
        model = DistributedDataParallel(
            inner, gradient_as_bucket_view=True, static_graph=True, **cap
        )
        super().__init__(model, inner)


class Horovod(_Steps):
    """Horovod's optimizer, which averages gradients when it is asked to."""

    def __init__(self, given: GradientSet, backward_ms: float) -> None:
        horovod = open_horovod()
        model = model_of(given, backward_ms)
        super().__init__(model, model)
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        self._optimizer = horovod.DistributedOptimizer(
            plain, named_parameters=model.named_parameters()
        )

    def _exchange(self) -> None:
        self._optimizer.synchronize()
