"""What all parts of one search share: the judge of choices, the budget, chance and the moves."""

import random
from collections.abc import Sequence

from bayplan.planning.budget import Budget
from bayplan.planning.choices import Choices, Evaluator, Moves, Outcome, plain_choices
from bayplan.planning.moves import Move, Neighbourhood

__all__ = ["SearchSpace", "changed"]


class SearchSpace:
    """The choices of one program, and what judging them may still cost.

    Attributes:
        evaluator: judges choices.
        budget: what is left.
        rng: the only source of chance.
        around: the moves.
        plain: the choices without any repeat.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        budget: Budget,
        rng: random.Random,
        around: Neighbourhood | None = None,
    ) -> None:
        self.evaluator, self.budget, self.rng = evaluator, budget, rng
        self.program = evaluator.program
        self.around = around or Neighbourhood(self.program, evaluator.gaps)
        self.plain = plain_choices(evaluator.gaps)

    @property
    def plain_seconds(self) -> float:
        """The scale of all costs; never zero."""
        return self.program.plain_seconds or 1.0

    def judge(self, choices: Choices, limit_bytes: int) -> Outcome:
        """What the choices cost."""
        self.budget.used += 1
        return self.evaluator.evaluate(choices, limit_bytes=limit_bytes)

    def fits(self, choices: Choices, limit_bytes: int) -> bool:
        """Whether the peak is within the limit."""
        return self.judge(choices, limit_bytes).peak_bytes <= limit_bytes

    def rank(
        self, choices: Choices, moves: Sequence[Move], limit_bytes: int
    ) -> list[tuple[Move, Outcome]]:
        """What each move alone would cost."""
        self.budget.spend(len(moves))
        outcomes = self.evaluator.try_moves(choices, Moves.pack(moves), limit_bytes=limit_bytes)
        return list(zip(moves, outcomes, strict=True))


def changed(choices: Choices, move: Move) -> Choices:
    """A copy with the move made."""
    after = choices.copy()
    for gap, choice in move:
        after[gap] = choice
    return after
