"""A bound step saved and resumed: each tensor once, by the first rank that has it.

Parameters and buffers are held by the ranks whose stages read them, and known by the whole model's
names; so what was saved under one plan is taken up under any other. Which parameters a rank trains
is known only when a batch has come, so optimizer state and batches in flight are taken up then.

NOTE [ Batches in flight ]
Under stale weights a save finds batches half done: their activations, the weights that they saw,
gradients on their way, and losses still owed. They are saved by rank, and go on only under the same
plan, on as many ranks: then a resumed run has the bits of one that was never interrupted. Under
another plan they are left out, and a line says so; to have none, call `flush` before `save`.
"""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import distributed

from bayplan import torch_compat
from bayplan.data.checkpoint import Checkpoint
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.plan import RankPlan
from bayplan.running.checkpoints.folders import newest_whole, read_manifest
from bayplan.running.checkpoints.saving import Saver, StoreMeeting
from bayplan.running.checkpoints.storage import CheckpointReader
from bayplan.running.checkpoints.training_state import Stateful, TrainingState
from bayplan.running.checkpoints.trees import decoded
from bayplan.running.ranks.failures import write_line
from bayplan.running.ranks.starting import of_first

__all__ = ["Owners", "RankCheckpoints", "Resumed"]

_MOST_LAG = 2  # a rank that is further behind would wait for the others to go on


@dataclass(frozen=True)
class Resumed:
    """What was taken up.

    Attributes:
        step: how many steps were done.
        data: where the training was in its data, as it was given to `save`.
        folder: the checkpoint.
    """

    step: int
    data: Any
    folder: Path


@dataclass(frozen=True)
class Owners:
    """By name, the ranks that hold a tensor, and those that train it."""

    holders: Mapping[str, tuple[int, ...]]
    trainers: Mapping[str, tuple[int, ...]]


class RankCheckpoints:
    """Saves and resumes one rank's part; every call is made on all ranks, after the same step."""

    def __init__(self, state: TrainingState, plan: RankPlan) -> None:
        self._state, self._plan = state, plan
        self._digest = _digest(plan)
        self._rank = distributed.get_rank()
        self._savers: dict[Path, Saver] = {}
        self._pending: tuple[Path, Checkpoint] | None = None

    def save(
        self,
        root: Path,
        *,
        step: int,
        owners: Owners | None,
        in_flight: Callable[[], dict[str, Any] | None],
        parts: Mapping[str, Stateful],
        data: Any,
        keep: int,
    ) -> Future[Path]:
        """Begin to save; `owners` are known once a batch has come, until then rank 0 has all."""
        if self._pending is not None:  # nothing has happened since
            done: Future[Path] = Future()
            done.set_result(self._pending[0])
            return done
        self.check()

        holders, trainers = ({}, {}) if owners is None else (owners.holders, owners.trainers)
        saved = self._state.saved(
            lambda name: holders.get(name, (0,))[0] == self._rank,
            lambda name: trainers.get(name, (0,))[0] == self._rank,
            is_first=not self._rank,
            parts=parts,
            data=data,
        )
        flight, tree = in_flight(), None
        if flight is not None:
            name = f"in_flight.{self._rank}"
            saved.put(name, flight)
            tree = saved.trees.pop(name)
        return self._saver(root, keep).save(
            saved, step=step, aliases=self._state.aliases, plan=self._digest, in_flight=tree
        )

    def wait(self) -> None:
        """Wait until all that is being written is written."""
        for saver in self._savers.values():
            saver.wait()

    def load(
        self, root: Path, *, holds: Callable[[str], bool], parts: Mapping[str, Stateful]
    ) -> Resumed | None:
        """Take up what is known without a batch; the rest by `take_up`."""
        self.wait()
        found = self._agreed(root)
        if found is None:
            return None
        folder, checkpoint = found
        self._state.check(checkpoint, parts)
        data = self._state.restore(folder, checkpoint, holds=holds, parts=parts)
        self._pending = found
        return Resumed(checkpoint.step, data, folder)

    def take_up(self, trains: Callable[[str], bool]) -> dict[str, Any] | None:
        """Take the optimizer's state; returns what was in flight, if it goes on here."""
        if self._pending is None:
            return None
        (folder, checkpoint), self._pending = self._pending, None
        self._state.restore_optimizer(folder, checkpoint, trains)
        if not checkpoint.in_flight:
            return None
        if checkpoint.plan != self._digest or checkpoint.num_ranks != len(self._plan.actions):
            if not self._rank:
                write_line(
                    f"bayplan: {folder.name} was saved under another plan with batches in flight:"
                    " early stages do not train on those; step.flush() before step.save() ends them"
                )
            return None
        return decoded(
            checkpoint.in_flight[self._rank], CheckpointReader(folder, checkpoint).tensor
        )

    def _agreed(self, root: Path) -> tuple[Path, Checkpoint] | None:
        """What rank 0 finds whole, on all ranks."""
        found = None
        if not self._rank:
            found = newest_whole(root, lambda line: write_line(f"bayplan: {line}"))
        own = b"" if found is None else _mark(*found)
        told = of_first(own)
        if not told or found is not None:
            return found
        name = told.decode().split()[0]
        checkpoint = read_manifest(root / name)
        if _mark(root / name, checkpoint) != told:
            raise FileFault(
                f"{root / name} is another one for rank {self._rank} than for rank 0; ranks need"
                " one folder that all of them reach"
            )
        return root / name, checkpoint

    def _saver(self, root: Path, keep: int) -> Saver:
        if root not in self._savers:
            store = torch_compat.default_store()
            self._savers[root] = Saver(
                root,
                keep=keep,
                meeting=StoreMeeting(store, self._rank, distributed.get_world_size()),
                tell=lambda line: write_line(f"bayplan: {line}; training goes on"),
            )
        return self._savers[root]

    def check(self) -> None:
        """Refuse a plan whose batches in flight cannot be saved."""
        lags = self._plan.lags
        if not any(lags):
            return
        problem = remedy = ""
        if max(lags) > _MOST_LAG:
            problem = f"{max(lags)} batches in flight"
            remedy = f"with at most {_MOST_LAG}"
        elif any(planned.order.swaps for planned in self._plan.stage_orders):
            problem, remedy = "swapped activations of batches in flight", "without --swap-dir"
        elif any(len({lags[n] for n in own.stages}) > 1 for own in self._plan.buckets):
            problem = "a sum over stages that are at different batches (of a tied weight)"
            remedy = "with the readers of the weight in one stage"
        if problem:
            raise UsageError(
                f"checkpoints cannot hold {problem} under stale weights; plan {remedy}, or without"
                " --staleness"
            )


def _mark(folder: Path, checkpoint: Checkpoint) -> bytes:
    return f"{folder.name} {hashlib.sha256(msgspec.json.encode(checkpoint)).hexdigest()}".encode()


def _digest(plan: RankPlan) -> str:
    """Of what a plan decides; what it predicts is of whoever planned."""
    fields = msgspec.to_builtins(plan)
    decided = {name: value for name, value in fields.items() if not name.startswith("predicted_")}
    return hashlib.sha256(msgspec.json.encode(decided, order="sorted")).hexdigest()
