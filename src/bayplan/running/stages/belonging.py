"""Whether a plan belongs to the model that it is given with; plans come from files.

Each check trusts those before it: stages that are cut from other operators have no meaning.
"""

from collections.abc import Mapping, Sequence

from bayplan.data.errors import ForeignPlan
from bayplan.data.plan import Plan
from bayplan.running.stages.cutting import Carried

__all__ = ["check_buckets", "check_cuts", "check_fingerprint", "check_links"]


def check_fingerprint(plan: Plan, here: str) -> None:
    """Refuse a plan that was made for other operators."""
    if plan.step_fingerprint != here:
        raise ForeignPlan(
            f"the plan cuts a step with fingerprint {plan.step_fingerprint}, this model's is"
            f" {here}; plan this model anew"
        )


def check_cuts(plan: Plan, num_operators: int) -> None:
    """Refuse stages that end before they begin, or after the model."""
    firsts, lasts = zip(*((stage.first, stage.last) for stage in plan.stages), strict=True)
    if firsts[0] or any(last + 1 != first for last, first in zip(lasts, firsts[1:], strict=False)):
        raise ForeignPlan(
            f"the plan's stages begin with operators {firsts} and end with {lasts}; they must"
            " follow each other from 0. Plan this model anew"
        )
    if lasts[-1] != num_operators - 1:
        raise ForeignPlan(
            f"the plan's stages end with operator {lasts[-1]}, this model's last is"
            f" {num_operators - 1}; plan this model anew"
        )


def check_links(plan: Plan, carried: Carried) -> None:
    """Refuse a plan whose stages exchange other values than these do."""
    found = (carried.links, carried.gradient_links)
    if found != (plan.links, plan.gradient_links):
        raise ForeignPlan(
            f"the plan's stages exchange values over {plan.links} and gradients over"
            f" {plan.gradient_links}, this model's over {found[0]} and {found[1]}; plan this model"
            " anew"
        )


def check_buckets(plan: Plan, gradients: Sequence[Mapping[str, object]]) -> None:
    """Refuse buckets that leave out a gradient: replicas would drift apart without a word.

    Args:
        plan: with its buckets.
        gradients: by stage, those that its backward makes, by parameter.
    """
    needed: dict[str, tuple[int, ...]] = {}
    for stage, own in enumerate(gradients):
        for name in own:
            needed[name] = (*needed.get(name, ()), stage)
    found: dict[str, tuple[int, ...]] = {}
    for at, bucket in enumerate(plan.buckets):
        for name in bucket.parameters:
            if name in found or name not in needed:
                problem = "is in another one too" if name in found else "has no gradient"
                raise ForeignPlan(f"buckets[{at}] has {name!r}, which {problem}; plan anew")
            found[name] = bucket.stages
    for name, stages in needed.items():
        if found.get(name) != stages:
            given = f"of stages {found[name]}" if name in found else "in no bucket"
            raise ForeignPlan(
                f"the gradient of {name!r} comes from stages {stages}, in the plan it is {given};"
                " plan anew"
            )
