"""`start_alike`: every rank begins with what rank 0 has, or says what it has instead.

Ranks meet with models that each has built for itself. As `DistributedDataParallel` does, values of
parameters and buffers are taken from rank 0, so that ranks with different seeds still train one
model. The state of torch's generator is taken too: dropout is then that of one process, and a
loader that shuffles gives the same batches everywhere. What cannot be taken over is compared.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch import distributed

from bayplan.data.errors import ForeignPlan, UsageError
from bayplan.data.plan import Plan

__all__ = ["start_alike", "take_model", "take_values"]

_CHUNK_BYTES = 4 << 20  # small tensors travel together; more would only need more memory
_FIRST = 0  # the rank whose values count


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """What must be the same before values can be taken over."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name} ({size} {self.dtype}{'' if self.is_trained else ', not trained'})"


class _Start(msgspec.Struct, frozen=True):
    """What a rank has."""

    tensors: tuple[_Tensor, ...]
    optimizer: str = ""
    plan: Plan | None = None


def take_model(tensors: Mapping[str, torch.Tensor]) -> None:
    """Take the parameters and buffers of rank 0, on all ranks at once.

    Args:
        tensors: by name, each once.

    Raises:
        UsageError: rank 0 has another model.
    """
    _start(_Start(tensors=_described_tensors(tensors)), tensors)


def start_alike(
    plan: Plan, tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Take the values of rank 0, on all ranks at once.

    Args:
        plan: of this rank.
        tensors: parameters and buffers by name, each once.
        optimizer: of this rank; its state is not taken over.

    Raises:
        ForeignPlan: rank 0 has another plan.
        UsageError: it has another model, or optimizer.
    """
    own = _Start(plan=plan, optimizer=_described(optimizer), tensors=_described_tensors(tensors))
    device = _start(own, tensors)
    state = torch.get_rng_state()
    random_state = state.to(device)
    distributed.broadcast(random_state, _FIRST)
    torch.set_rng_state(random_state.to(state.device))


def _start(own: _Start, tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """Compare with rank 0 and take its values; returns the device that values travel from."""
    device = next((one.device for one in tensors.values()), torch.device("cpu"))
    content = _broadcast(msgspec.json.encode(own), device)
    _compare(own, msgspec.json.decode(content, type=_Start))
    take_values(list(tensors.values()))
    return device


def take_values(tensors: Sequence[torch.Tensor]) -> None:
    """Take what rank 0 has in tensors that are alike everywhere."""
    for group in _chunks([one.detach() for one in tensors if one.numel()]):
        _take_over(group)


def _described_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[_Tensor, ...]:
    return tuple(
        _Tensor(
            name=name,
            shape=tuple(one.shape),
            dtype=str(one.dtype).removeprefix("torch."),
            is_trained=one.requires_grad,
        )
        for name, one in tensors.items()
    )


def _described(optimizer: torch.optim.Optimizer) -> str:
    """What replicas of a parameter must share, in words."""
    groups = (
        ", ".join(
            f"{len(value)} parameters" if key == "params" else f"{key}={value}"
            for key, value in group.items()
            if not key.startswith("_")
        )
        for group in optimizer.param_groups
    )
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def _compare(own: _Start, first: _Start) -> None:
    rank = distributed.get_rank()
    for field in msgspec.structs.fields(Plan) if own.plan != first.plan else ():
        if getattr(own.plan, field.name) != getattr(first.plan, field.name):
            raise ForeignPlan(
                f"rank {rank} has another plan than rank {_FIRST}: they differ in `{field.name}`;"
                " give all of them the same file"
            )
    for at, (one, other) in enumerate(zip(own.tensors, first.tensors, strict=False)):
        if one != other:
            raise UsageError(
                f"rank {rank} has another model than rank {_FIRST}: its tensor {at} is {one}, there"
                f" it is {other}; build the same model everywhere"
            )
    if len(own.tensors) != len(first.tensors):
        raise UsageError(
            f"rank {rank} has another model than rank {_FIRST}: {len(own.tensors)} parameters and"
            f" buffers, there {len(first.tensors)}; build the same model everywhere"
        )
    if own.optimizer != first.optimizer:
        raise UsageError(
            f"rank {rank} has another optimizer than rank {_FIRST}: {own.optimizer}, there"
            f" {first.optimizer}; make it the same everywhere"
        )


def _broadcast(content: bytes, device: torch.device) -> bytes:
    """The bytes of the first rank; not as an object, for that is pickle."""
    length = torch.tensor([len(content)], device=device)
    distributed.broadcast(length, _FIRST)
    if distributed.get_rank() == _FIRST:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    else:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    distributed.broadcast(data, _FIRST)
    return data.cpu().numpy().tobytes()


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


def _take_over(group: Sequence[torch.Tensor]) -> None:
    """Write the values of the first rank into the tensors of this one."""
    is_plain = len(group) == 1 and group[0].is_contiguous()
    whole = group[0].reshape(-1) if is_plain else torch.cat([one.reshape(-1) for one in group])
    # As bytes, for gloo does not know every dtype.
    distributed.broadcast(whole.view(torch.uint8), _FIRST)
    if is_plain or distributed.get_rank() == _FIRST:
        return
    begin = 0
    for tensor in group:
        tensor.copy_(whole[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
