"""What a training is made of between two steps, by name: saved from here, restored into here.

Names are those of the whole model, whichever plan runs it: `model.<name>` for parameters and
buffers, `optimizer.<name>.<key>` for what an optimizer keeps of a parameter. So a checkpoint of one
plan is read under any other. A process saves what it owns, and restores what it holds.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from bayplan.data.checkpoint import Checkpoint
from bayplan.data.errors import FileFault, ForeignPlan, UsageError
from bayplan.devices.device import device_of
from bayplan.running.checkpoints.storage import MODEL, CheckpointReader, dtype_of, room_for
from bayplan.running.checkpoints.trees import decoded, encoded, named_in
from bayplan.step import TrainingStep
from bayplan.tracing.stages.whole_trace import named_tensors, own_tensors

__all__ = ["Saved", "Stateful", "TrainingState", "joined", "place_of"]

_OPTIMIZER = "optimizer"
_NAMELESS = (
    "the optimizer has something that is no parameter of the model, for which a checkpoint has no"
    " name; make the optimizer of model.parameters()"
)


class Stateful(Protocol):
    """A scheduler, a scaler, a data loader: whatever has a state beside model and optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass
class Saved:
    """One process's part of a state: tensors by name, and a tree of all else that names them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, value: Any) -> None:
        self.trees[name] = encoded(value, name, self.tensors)


def joined(trees: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The trees of all processes in one."""
    return {name: tree for own in trees for name, tree in own.items()}


class TrainingState:
    """Model, optimizer, random numbers, and what the user names beside them, of one process."""

    def __init__(self, step: TrainingStep, optimizer: torch.optim.Optimizer | None) -> None:
        self._tensors = own_tensors(step)
        self._optimizer = optimizer
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        self.aliases = {
            MODEL + name: MODEL + names[id(tensor)]
            for name, tensor in named_tensors(step).items()
            if names[id(tensor)] != name
        }
        self._names = names
        self._with_extra = {
            name: module
            for name, module in step.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        device = next(iter(self._tensors.values())).device if names else torch.device("cpu")
        self._device = device_of(device)

    def saved(
        self,
        own: Callable[[str], bool],
        own_optimizer: Callable[[str], bool],
        *,
        is_first: bool,
        parts: Mapping[str, Stateful],
        data: Any,
    ) -> Saved:
        """This process's part.

        Args:
            own: whether it saves a parameter or buffer; `own_optimizer`, its optimizer state.
            is_first: whether it saves what is the same everywhere.
        """
        saved = Saved()
        for name, tensor in self._tensors.items():
            if own(name):
                saved.tensors[MODEL + name] = tensor.detach()
        for name, values in self._optimizer_state():
            if own_optimizer(name):
                saved.put(f"{_OPTIMIZER}.{name}", values)
        if is_first:
            saved.put("groups", self._optimizer_groups())
            saved.put("random", self._random())
            saved.put("extra", {n: own.get_extra_state() for n, own in self._with_extra.items()})
            saved.put("parts", {name: part.state_dict() for name, part in parts.items()})
            saved.put("data", data)
        return saved

    def check(self, checkpoint: Checkpoint, parts: Collection[str]) -> None:
        """Refuse a checkpoint of another model or optimizer, before anything is changed.

        Raises:
            ForeignPlan: it is.
            UsageError: it has not what is asked of it.
        """
        saved = checkpoint.tensors
        here = {MODEL + name: tensor for name, tensor in self._tensors.items()}
        there = {name for name in saved if name.startswith(MODEL)} - checkpoint.aliases.keys()
        for name in sorted(here.keys() ^ there):
            where = "has not" if name in here else "has beside this one's"
            raise ForeignPlan(
                f"the checkpoint is of another model, which {where} {name.removeprefix(MODEL)!r};"
                " build the model that was saved, or give another folder"
            )
        for name, tensor in here.items():
            entry = saved[name][1]
            if entry.shape != tuple(tensor.shape) or dtype_of(entry) != tensor.dtype:
                raise ForeignPlan(
                    f"the checkpoint is of another model: {name.removeprefix(MODEL)} is"
                    f" {entry.dtype} {entry.shape} there, {tensor.dtype} {tuple(tensor.shape)} here"
                )
        state = self.state_of(checkpoint)
        own = self._optimizer_groups()
        with _from_file():
            groups = decoded(state.get("groups"), _no_tensor)
            known = set(decoded(state.get("parts"), _no_tensor) or {})
            kinds = [None if given is None else given["kind"] for given in (groups, own)]
            names = [
                [group["params"] for group in (g or {"groups": []})["groups"]]
                for g in (groups, own)
            ]
        if kinds[0] != kinds[1] or names[0] != names[1]:
            raise ForeignPlan(
                f"the checkpoint is of another optimizer: {kinds[0]} of"
                f" {[*map(len, names[0])]} parameters there, {kinds[1]} of"
                f" {[*map(len, names[1])]} here; make the one that was saved"
            )
        if known != set(parts):
            raise UsageError(
                f"the checkpoint has the state of {sorted(known) or 'nothing beside the model'},"
                f" asked for is {sorted(parts)}; save and load the same (scheduler=…, scaler=…)"
            )

    def restore(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        *,
        holds: Callable[[str], bool],
        parts: Mapping[str, Stateful],
    ) -> Any:
        """Take the model's tensors that are held here, random numbers, and all parts.

        Returns where the training is in its data. The optimizer's state is another call, because
        ranks know only later which parameters they train.
        """
        reader, state = CheckpointReader(folder, checkpoint), self.state_of(checkpoint)
        find = reader.tensor
        with _from_file():
            groups, extra = (decoded(state.get(name), find) for name in ("groups", "extra"))
            self._set_random(decoded(state["random"], find))
        targets = {
            MODEL + name: tensor.detach() for name, tensor in self._tensors.items() if holds(name)
        }
        dcp.load(targets, storage_reader=reader, no_dist=True)
        if self._optimizer is not None and groups is not None:
            for group, saved in zip(self._optimizer.param_groups, groups["groups"], strict=True):
                _update(group, {key: value for key, value in saved.items() if key != "params"})
        for name, value in (decoded(state.get("parts"), find) or {}).items():
            parts[name].load_state_dict(value)
        for name, value in (extra or {}).items():
            self._with_extra[name].set_extra_state(value)
        return decoded(state.get("data"), find)

    def restore_optimizer(
        self, folder: Path, checkpoint: Checkpoint, trains: Callable[[str], bool]
    ) -> None:
        """Take the optimizer's state of the parameters that are trained here."""
        if self._optimizer is None:
            return
        reader = CheckpointReader(folder, checkpoint)
        state = self.state_of(checkpoint)
        capturable = {
            id(parameter): bool(group.get("capturable") or group.get("fused"))
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        for name, parameter in self._tensors.items():
            tree = state.get(f"{_OPTIMIZER}.{name}")
            if tree is None or not trains(name):
                continue
            rooms = {key: room_for(checkpoint.tensors[key][1]) for key in named_in(tree)}
            dcp.load(rooms, storage_reader=reader, no_dist=True)
            stays = not capturable.get(id(parameter), False)

            def placed(
                key: str,
                rooms: dict[str, torch.Tensor] = rooms,
                stays: bool = stays,
                device: torch.device = parameter.device,
            ) -> torch.Tensor:
                # Counters of steps are on the host, unless the optimizer wants them elsewhere.
                return rooms[key] if stays and not rooms[key].dim() else rooms[key].to(device)

            self._optimizer.state[parameter] = decoded(tree, placed)

    @staticmethod
    def state_of(checkpoint: Checkpoint) -> dict[str, Any]:
        if not isinstance(checkpoint.state, dict) or "random" not in checkpoint.state:
            raise FileFault("the checkpoint has no state beside its tensors")
        return checkpoint.state

    def _optimizer_state(self) -> Iterable[tuple[str, Any]]:
        if self._optimizer is None:
            return
        for parameter, values in self._optimizer.state.items():
            if id(parameter) in self._names:
                yield self._names[id(parameter)], values
            elif values:
                raise UsageError(_NAMELESS)

    def _optimizer_groups(self) -> dict[str, Any] | None:
        if self._optimizer is None:
            return None
        given = [own for group in self._optimizer.param_groups for own in group["params"]]
        if any(id(parameter) not in self._names for parameter in given):
            raise UsageError(_NAMELESS)
        groups = [
            {**group, "params": [self._names[id(parameter)] for parameter in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        return {"kind": type(self._optimizer).__name__, "groups": groups}

    def _random(self) -> dict[str, Any]:
        states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if not self._device.runs_cpu_kernels:
            states[self._device.where.type] = self._device.generator_state()
        if "numpy" in sys.modules:
            import numpy as np

            kind, keys, *rest = np.random.get_state(legacy=True)
            states["numpy"] = (kind, torch.from_numpy(np.array(keys)), *rest)
        return states

    def _set_random(self, states: dict[str, Any]) -> None:
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        if self._device.where.type in states:
            self._device.set_generator_state(states[self._device.where.type])
        if "numpy" in states:
            import numpy as np

            kind, keys, *rest = states["numpy"]
            np.random.set_state((kind, keys.numpy(), *rest))


def _update(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        here = group.get(key)
        if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor):
            here.copy_(value)  # graphs may have been made with this very tensor
        else:
            group[key] = value


@contextlib.contextmanager
def _from_file() -> Iterator[None]:
    """Tell of what a file has and no training would have written, whatever it breaks."""
    try:
        yield
    except FileFault:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as fault:
        raise FileFault(f"the checkpoint's state is none of a training: {fault}") from None


def place_of(checkpoint: Checkpoint) -> Any:
    """Where a saved training was in its data."""
    with _from_file():
        return decoded(TrainingState.state_of(checkpoint).get("data"), _no_tensor)


def _no_tensor(name: str) -> torch.Tensor:
    return torch.empty(0)
