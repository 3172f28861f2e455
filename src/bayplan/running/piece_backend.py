"""A backend that compiles the pieces of a forward, each by an order of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from bayplan import torch_answers, torch_compat, torch_joint
from bayplan.data.errors import CaptureError
from bayplan.rewriting.whole_operators import whole_operators
from bayplan.running.backend import device_of_casts, halves_by
from bayplan.running.call_faults import explained_run, once_differentiable
from bayplan.running.executor import compile_graph
from bayplan.tracing.checkpoints import with_checkpoints_checked
from bayplan.tracing.fake import correct_fakes
from bayplan.tracing.joint import MemoryContext
from bayplan.tracing.piece_gradients import (
    Inexact,
    Operators,
    PieceGradients,
    expecting_gradients,
    hand_out_one_by_one,
    mark_changed,
    operators_of,
    with_repeated_inputs,
)
from bayplan.tracing.shared_casts import sharing_casts
from bayplan.tracing.tangents import compile_with_tangents
from bayplan.tracing.traced_step import Decide, TracedStep

__all__ = ["Piece", "PieceBackend", "Unplanned"]


class Unplanned(CaptureError):
    """A call of a model ran a piece that its plan does not have.

    Attributes:
        operators: of a piece that was planned with other sizes or numbers.
        unseen: of a piece that was not there when the forward was planned.
        place: where such a piece ends, if torch tells.
    """

    operators: Operators | None = None
    unseen: Operators | None = None
    place: str = ""


@dataclass(frozen=True)
class Piece:
    """A part of a forward that is one graph; `end` says where it ends and why, if by a break."""

    traced: TracedStep
    operators: Operators
    end: str

    @property
    def fingerprint(self) -> str:
        return self.traced.with_packs().program.fingerprint


@dataclass
class PieceBackend:
    """Compiles every piece by an order, and tells when each begins and ends."""

    traces_as_eager: ClassVar[bool] = True  # see `torch_answers.answer_as_eager`

    decide: Decide
    context: MemoryContext
    gradients: Mapping[Operators, PieceGradients]  # of what is planned
    written: frozenset[Operators] = frozenset()  # what runs as it is written
    unseen: frozenset[Operators] = frozenset()  # as well: was planned as what lies between pieces
    pieces: list[Piece] = field(default_factory=list)
    largest_bytes: dict[Operators, int] = field(default_factory=dict)  # inputs of what is written
    casts_on: torch.device | None = None  # where a piece casts parameters, if one does
    is_planning: bool = False
    # Hears the piece, whether forward runs, and whether it begins.
    on_run: Callable[[int, bool, bool], None] = field(default=lambda *_: None)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        correct_fakes()
        torch_joint.guard_global_hooks()
        is_trained = any(tensor.requires_grad for tensor in torch_compat.tensors_in(inputs))
        if not is_trained or not torch.is_grad_enabled():
            return module.forward  # keeps nothing for a backward, so it may be of any size
        operators = operators_of(module)
        if operators in self.unseen:
            return module.forward
        if operators in self.written:
            return self._as_written(module, operators)
        if operators not in self.gradients:
            fault = Unplanned("a piece of the forward that the plan does not have")
            fault.unseen = operators
            fault.place = torch_answers.break_after(module) or torch_answers.last_line(module)
            raise fault
        gradients = self.gradients[operators]
        end = torch_answers.break_after(module)
        module, again = with_repeated_inputs(module, gradients.uses)
        inputs = [*inputs, *(inputs[position] for position in again)]
        # The piece, and whether forward: of the graphs that are still to be compiled. Those of
        # backward are, when it first runs.
        waiting: list[tuple[int, bool]] = []

        def partition(
            joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            try:
                hand_out_one_by_one(joint, num_fwd_outputs, len(inputs), again)
                mark_changed(joint, len(inputs), gradients.changed)
                traced = TracedStep.of(joint, num_fwd_outputs, self.context)
                order = self.decide(traced)
            except (Inexact, Unplanned) as fault:
                # Of a call that is not only planned: torch cut it with other inputs.
                told = fault if self.is_planning else Unplanned(str(fault))
                told.operators = operators
                raise told from None
            halves = halves_by(order, traced, None)
            _copy_outside_tracing(halves[1])
            waiting.extend([(len(self.pieces), True), (len(self.pieces), False)])
            self.pieces.append(Piece(traced, operators, end))
            return halves

        def compile_half(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            run = explained_run(compile_graph(graph))
            if not waiting:  # a forward without gradients
                return run
            return self._told(run, *waiting.pop(0))

        with sharing_casts(module, inputs) as casts:
            run = compile_with_tangents(
                module,
                inputs,
                gradients.outputs,
                partition=with_checkpoints_checked(module, partition),
                compile_graph=compile_half,
                whole=whole_operators(),
            )
        self.casts_on = device_of_casts(inputs, casts) or self.casts_on
        once = once_differentiable(expecting_gradients(run, gradients))
        return lambda *args: once(*args, *(args[position] for position in again))

    def _as_written(self, module: fx.GraphModule, operators: Operators) -> Callable[..., Any]:
        """Run a piece that is not planned, whose inputs must not be larger than when planned."""

        def run(*args: Any) -> Any:
            if torch.is_grad_enabled():
                size_bytes = sum(each.nbytes for each in torch_compat.tensors_in(args))
                if self.is_planning:
                    known_bytes = self.largest_bytes.get(operators, 0)
                    self.largest_bytes[operators] = max(known_bytes, size_bytes)
                elif size_bytes > self.largest_bytes.get(operators, 0):
                    raise Unplanned("a piece of the forward that is larger than planned")
            return module.forward(*args)

        return run

    def _told(
        self, run: Callable[..., Any], piece: int, is_forward: bool
    ) -> Callable[[list[Any]], Any]:
        def told(arguments: list[Any]) -> Any:
            self.on_run(piece, is_forward, True)
            outputs = run(arguments)
            self.on_run(piece, is_forward, False)
            return outputs

        return torch_compat.boxed(told)


def _copy_outside_tracing(module: fx.GraphModule) -> None:
    """Let torch copy a backward graph with its constants in a step that runs on fake tensors.

    It does so where backward first runs, and constants are real.
    """

    def copied(memo: dict[int, Any]) -> Any:
        with torch_compat.outside_tracing():
            return type(module).__deepcopy__(module, memo)

    module.__deepcopy__ = copied
