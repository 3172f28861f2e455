"""Every rank begins alike: the same model and batch, and only the tensors that its stages read.

Every rank is given the whole batch. One with a part of it, as a `DistributedSampler` hands out, or
with one that was shuffled otherwise, would train on other samples than its neighbours, and no
number would look wrong. So each step's loss is summed up together with a number made of the batch's
form and a few of its values: the sums of the numbers and of their squares show whether all are the
same, and cost no message of their own. Values on a GPU are never read by the host, which would have
to wait for them: the GPU makes the number.

Every rank starts with the whole model. What only other ranks read is released, and comes back when
somebody asks for the model's state: then all ranks must ask, as each has what others lack.

Each rank has built its model for itself. As `DistributedDataParallel` does, values of parameters
and buffers are taken from rank 0, so that ranks with different seeds still train one model. The
state of torch's generator is taken too: dropout is then that of one process, and a loader that
shuffles gives the same batches everywhere. What cannot be taken over is compared.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import msgspec
import torch
from torch import distributed, nn

from bayplan import torch_compat as torch_compat
from bayplan.data.errors import ForeignPlan, UsageError
from bayplan.data.plan import RankPlan
from bayplan.devices.device import device_of

__all__ = [
    "BatchMark",
    "Holdings",
    "are_alike",
    "exchange_flat",
    "form_of",
    "of_first",
    "start_alike",
    "take_model",
    "take_values",
]

_BITS = 20  # so that squares of all ranks' numbers add up in a float64 without rounding
_NUM_VALUES = 8  # of the first sample and of the last
_PRIME = 7919  # sets places apart that are next to each other


@dataclass(frozen=True)
class BatchMark:
    """The shapes and dtypes of a batch in words, and a number made of them and of a few values.

    `on_device` are numbers that a device has made of its values, to be added.
    """

    form: str
    number: int
    on_device: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "BatchMark":
        form = form_of(tensors)
        number = zlib.crc32(form.encode())
        on_device: list[torch.Tensor] = []
        for values in (_few_values(tensor) for tensor in tensors if tensor.numel()):
            if device_of(values.device).has_host_memory:
                number = zlib.crc32(values.numpy().tobytes(), number)
            else:
                on_device.append(_summed_up(values))
        return cls(form, number >> (32 - _BITS), tuple(on_device))

    def beside(self, loss: torch.Tensor) -> torch.Tensor:
        """A part of the loss, with what is summed up beside it."""
        number = torch.full((1,), float(self.number), dtype=loss.dtype, device=loss.device)
        for more in self.on_device:
            number = (number + more.to(loss.device)).remainder_(1 << _BITS)
        return torch.cat([loss.reshape(1), number, number * number])

    def check(self, sums: torch.Tensor) -> None:
        """Raise UsageError on all ranks if the sums over them show that marks differ."""
        if are_alike(sums, distributed.get_world_size()):
            return
        numbers = [self.number, *map(int, self.on_device), zlib.crc32(self.form.encode())]
        own = torch.tensor(numbers, device=sums.device)
        marks = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(marks, own)
        rows = [mark.tolist() for mark in marks]
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if len({row[-1] for row in rows}) == 1:
            what = f"its form is the same, {self.form}, its values are not"
        else:
            what = f"rank {distributed.get_rank()} has {self.form}"
        raise UsageError(
            f"rank {', '.join(map(str, others))} was given another batch than rank 0: {what};"
            " give every rank the whole batch, the same everywhere (a loader without"
            " DistributedSampler, with the same seed)"
        )


def are_alike(sums: torch.Tensor, num_ranks: int) -> bool:
    """Whether numbers that add up so, with their squares, are all the same (Cauchy and Schwarz)."""
    total, squares = map(int, sums[1:].tolist())  # whole, so that nothing is rounded
    return total * total == squares * num_ranks


def form_of(tensors: Sequence[torch.Tensor]) -> str:
    """The shapes and dtypes of a batch.

    Example:
        >>> form_of([torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)])
        '4x3 float32, 4 int64'
    """
    return ", ".join(
        f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors
    )


def _few_values(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes."""
    rows = tensor if tensor.dim() else tensor.reshape(1)
    first, last = rows[0].reshape(-1)[:_NUM_VALUES], rows[-1].reshape(-1)[-_NUM_VALUES:]
    return torch.cat([first, last]).detach().view(torch.uint8)


def _summed_up(values: torch.Tensor) -> torch.Tensor:
    """A number of bytes and of their places, made where they are; whole, as few are added."""
    places = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
    return (values.double() * (places * _PRIME).remainder_(1 << _BITS)).sum(0, keepdim=True)


class Holdings:
    """The tensors of one rank's model, whose `state_dict` is to be whole, on all ranks at once.

    Each parameter or buffer has `holders`, by rank; what nobody holds stays where it is.
    """

    def __init__(self, model: nn.Module, holders: Mapping[str, tuple[int, ...]], rank: int) -> None:
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._holders = {name: ranks for name, ranks in holders.items() if name in named}
        self._tensors = named
        self._foreign = {
            name: torch.empty_like(named[name], device="meta")
            for name, ranks in self._holders.items()
            if rank not in ranks
        }
        self._is_whole = True
        model.register_state_dict_pre_hook(lambda *_: self.collect())
        model.register_load_state_dict_pre_hook(lambda *_: self.collect())

    def release(self) -> None:
        """Free the memory of what only other ranks hold."""
        if self._is_whole:
            for name in self._foreign:
                tensor = self._tensors[name]
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._is_whole = False

    def collect(self) -> None:
        """Bring everything up to date, from the first rank that holds it; on all ranks at once."""
        if not self._is_whole:
            for name, like in self._foreign.items():
                tensor = self._tensors[name]
                tensor.data = torch.empty_like(like, device=tensor.device)
        for name, ranks in self._holders.items():
            if len(ranks) < distributed.get_world_size():
                tensor, source = self._tensors[name].data, ranks[0]
                exchange_flat([tensor], partial(distributed.broadcast, src=source))
        self._is_whole = True


_CHUNK_BYTES = 4 << 20  # small tensors travel together; more would only need more memory
_FIRST = 0  # the rank whose values count


class _Start(msgspec.Struct, frozen=True):
    """What must be the same before values can be taken over; the optimizer and tensors in words."""

    tensors: tuple[str, ...]
    optimizer: str = ""
    plan: RankPlan | None = None


def take_model(
    tensors: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    plan: RankPlan | None = None,
) -> None:
    """Take the values of rank 0's parameters and buffers, on all ranks at once.

    Args:
        tensors: by name, each once.
        optimizer: its state is not taken over.

    Raises:
        ForeignPlan: rank 0 has another plan.
        UsageError: it has another model, or optimizer.
    """
    described = tuple(
        f"{name} ({form_of([tensor])}{'' if tensor.requires_grad else ', not trained'})"
        for name, tensor in tensors.items()
    )
    own = _Start(described, "" if optimizer is None else _described(optimizer), plan)
    content = of_first(msgspec.json.encode(own))
    _compare(own, msgspec.json.decode(content, type=_Start))
    take_values(list(tensors.values()))


def start_alike(
    plan: RankPlan, tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """The same, and take the state of torch's generator."""
    take_model(tensors, optimizer, plan)
    device = next(iter(tensors.values())).device  # that values travel from
    random_state = torch.get_rng_state().to(device)
    take_values([random_state])
    torch.set_rng_state(random_state.cpu())


def take_values(tensors: Sequence[torch.Tensor]) -> None:
    """Take what rank 0 has in tensors that are alike everywhere."""
    for group in _chunks([tensor.detach() for tensor in tensors if tensor.numel()]):
        # As bytes, because gloo does not know every dtype.
        exchange_flat(group, lambda flat: distributed.broadcast(flat.view(torch.uint8), _FIRST))


def exchange_flat(
    tensors: Sequence[torch.Tensor], exchange: Callable[[torch.Tensor], object]
) -> None:
    """Let a collective change tensors of one dtype, in one message; it takes contiguous ones only.

    A single tensor that is contiguous is changed where it is, without a copy.
    """
    is_plain = len(tensors) == 1 and tensors[0].is_contiguous()
    flat = tensors[0].reshape(-1) if is_plain else torch.cat([t.reshape(-1) for t in tensors])
    exchange(flat)
    if not is_plain:
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _described(optimizer: torch.optim.Optimizer) -> str:
    """What replicas of a parameter must share, in words."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return f"{' '.join(repr(optimizer).split())} of {sizes} parameters"


def _compare(own: _Start, first: _Start) -> None:
    has_another = f"rank {distributed.get_rank()} has another"
    # Figures that were predicted are of whoever planned, and no rank acts on them.
    decided = [name for name in RankPlan.__struct_fields__ if not name.startswith("predicted_")]
    apart = [
        name for name in decided if getattr(own.plan, name, None) != getattr(first.plan, name, None)
    ]
    if apart:
        raise ForeignPlan(
            f"{has_another} plan than rank 0: they differ in {', '.join(apart)}; give all of them"
            " the same file"
        )
    pairs = zip_longest(own.tensors, first.tensors, fillvalue="missing")
    for number, (here, there) in enumerate(pairs):
        if here != there:
            raise UsageError(
                f"{has_another} model than rank 0: its tensor {number} is {here}, there it is"
                f" {there}; build the same model everywhere"
            )
    if own.optimizer != first.optimizer:
        raise UsageError(
            f"{has_another} optimizer than rank 0: {own.optimizer}, there {first.optimizer}; make"
            " it the same everywhere"
        )


def of_first(content: bytes) -> bytes:
    """What rank 0 has; through the store, because objects that are broadcast are pickled."""
    store, rank = torch_compat.default_store(), distributed.get_rank()
    key = f"bayplan/start{store.add(f'bayplan/starts{rank}', 1)}"  # the same on all ranks
    if rank == _FIRST:
        store.set(key, content.decode())
    return store.get(key)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device that follow each other, a few megabytes together."""
    group: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        is_alike = group and (group[0].dtype, group[0].device) == (tensor.dtype, tensor.device)
        if group and (not is_alike or filled + tensor.nbytes > _CHUNK_BYTES):
            yield group
            group, filled = [], 0
        group.append(tensor)
        filled += tensor.nbytes
    if group:
        yield group
