"""`TunedRun`: training steps on many ranks while rank 0 tunes them.

Settings must change at the same step on all ranks, or ranks would sum different buckets. So rank 0
alone decides, and tells all of them between two steps: which setting, and for how many steps. Until
those are over no rank has to ask, and afterwards no message is sent any more. What is measured is
the slowest rank's time of each step, which is the time that the step took.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import msgspec
import torch
from torch import distributed

from bayplan.data.errors import BayplanError, UsageError
from bayplan.data.exchange_settings import ExchangeSettings
from bayplan.tuning.trial import Purpose, Trial
from bayplan.tuning.tuner import Tuner

__all__ = ["TunedRun"]

_DECIDES = 0  # the rank that has the tuner
_CPU = torch.device("cpu")


class _Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What rank 0 tells: what to run next, or why it cannot."""

    trial: Trial | None = None
    fault: str = ""
    is_users: bool = False  # a mistake of theirs, not a bug of ours


class TunedRun:
    """Used on every rank, around every step; made on all ranks at once.

    Attributes:
        setting: the current one; None before the first step.

    Args:
        tuner: on rank 0; None on all others.
        apply: makes the next step run with a setting; called between steps, on every rank.
        device: of messages: cpu for gloo, this rank's GPU for NCCL.
        clock: seconds from any moment on, when all that was begun is done; by default the process's
            clock, on a GPU after waiting for it.

    On every rank of a script::

        run = TunedRun(tuner if rank == 0 else None, apply=model.use)
        for batch in loader:
            with run.step():
                train(batch)
    """

    def __init__(
        self,
        tuner: Tuner | None,
        apply: Callable[[ExchangeSettings], None],
        *,
        device: torch.device = _CPU,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if not distributed.is_initialized():
            raise UsageError("tuning needs torch.distributed.init_process_group() first")
        self.setting: ExchangeSettings | None = None
        self._tuner, self._apply, self._device = tuner, apply, device
        self._clock = clock or self._waited_clock
        # Of its own, so that its messages never meet those of a step that is still on its way.
        group = distributed.new_group()
        assert isinstance(group, distributed.ProcessGroup), "every rank is a member"
        self._group = group
        self._check_tuners()
        self._trial: Trial | None = None
        self._seconds: list[float] = []
        self._fault: Exception | None = None  # on rank 0

    @property
    def is_tuning(self) -> bool:
        """Whether the current steps are measured to find a setting; the same on all ranks."""
        return self._trial is None or self._trial.purpose in (Purpose.FIRST, Purpose.COMPARE)

    @contextlib.contextmanager
    def step(self) -> Iterator[ExchangeSettings]:
        """Run one step inside; gives its setting. A step that raises is not counted."""
        trial = self._current()
        if trial.num_steps is None:
            yield trial.setting
            return
        begun = self._clock()
        yield trial.setting
        self._seconds.append(self._clock() - begun)
        if len(self._seconds) == trial.num_steps:
            self._end()

    def _check_tuners(self) -> None:
        """Refuse on all ranks at once, so that none waits for one that has gone."""
        found = torch.zeros(distributed.get_world_size(), dtype=torch.int32, device=self._device)
        found[distributed.get_rank()] = int(self._tuner is not None)
        distributed.all_reduce(found, group=self._group)
        having = [rank for rank, has_one in enumerate(found.tolist()) if has_one]
        if having != [_DECIDES]:
            told = f"ranks {', '.join(map(str, having))} have one" if having else "no rank has one"
            raise UsageError(f"rank {_DECIDES} alone must have the tuner, but {told}")

    def _current(self) -> Trial:
        """The trial that goes on, or what rank 0 says is next."""
        if self._trial is not None and (self._trial.num_steps is None or self._seconds):
            return self._trial
        decision = self._decided()
        if decision.trial is None:
            kind = UsageError if decision.is_users else RuntimeError
            raise kind(f"tuning failed on rank {_DECIDES}: {decision.fault}") from self._fault
        self._trial = decision.trial
        if self._trial.setting != self.setting:
            self._apply(self._trial.setting)
            self.setting = self._trial.setting
        return self._trial

    def _decided(self) -> _Decision:
        """What rank 0 decides, on all ranks; JSON, for objects would travel as pickle."""
        content = b""
        if self._tuner is not None:
            content = msgspec.json.encode(self._decide(self._tuner))
        length = torch.tensor([len(content)], device=self._device)
        distributed.broadcast(length, _DECIDES, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        if self._tuner is not None:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        distributed.broadcast(data, _DECIDES, group=self._group)
        return msgspec.json.decode(data.cpu().numpy().tobytes(), type=_Decision)

    def _decide(self, tuner: Tuner) -> _Decision:
        if self._fault is None:
            self._attempt(tuner.ask)
        if self._fault is None:
            return _Decision(trial=tuner.ask())
        told = f"{type(self._fault).__name__}: {self._fault}"
        return _Decision(fault=told, is_users=isinstance(self._fault, BayplanError))

    def _end(self) -> None:
        """Let rank 0 know how long the slowest rank took for each step."""
        slowest = torch.tensor(self._seconds, dtype=torch.float64, device=self._device)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX, group=self._group)
        self._seconds = []
        if self._tuner is not None:
            tuner = self._tuner
            self._attempt(lambda: tuner.tell(slowest.tolist()))

    def _attempt(self, job: Callable[[], object]) -> None:
        """Do what may fail on rank 0 alone; the others are told instead of left waiting."""
        try:
            job()
        except Exception as fault:  # whatever it is, all ranks raise it before the next step
            self._fault = fault

    def _waited_clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
