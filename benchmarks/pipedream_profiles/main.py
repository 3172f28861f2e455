"""PipeDream's optimizer on PipeDream's own profiles of V100s, and our planner beside it.

First our re-implementation is asked what PipeDream's own program was asked: splits and times have
to be the same. Then both splits, PipeDream's and ours, are judged by the same simulation of events
on the same cluster, with memory that has to fit 16 GB with all weight versions. PipeDream's split
is passed in its own way, which never drains, and in all other ways that are known here; the fastest
that fits counts. Ours has the same batches and may be no staler. All of this is simulated.
"""

import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, options, say
from pipedream_profiles.clusters import CLUSTERS, cluster_of, name_of
from pipedream_profiles.profiled_chain import cut_layers, profiled_chain
from pipedream_profiles.published import (
    FOLDER,
    Question,
    further_questions,
    published_questions,
)

from bayplan.data.chain import Chain
from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.judging import judge
from bayplan.planning.clusters.planner import Candidate, memory_of, plan_on
from bayplan.planning.clusters.refining import passings
from bayplan.planning.clusters.split import Split, Training
from bayplan.planning.partitioners.pipedream import pipedream_split
from bayplan.simulating.cluster_network import ClusterNetwork

COLUMNS = (
    "profile",
    "cluster",
    "asked",
    "golden_equal",
    "num_ties",
    "pipedream_stages",
    "pipedream_fits",
    "pipedream_per_second",
    "ours_stages",
    "ours_per_second",
    "ours_over_pipedream",
    "synchronous_over_pipedream",
    "optimizer_seconds",
    "planning_seconds",
)
# Stochastic gradient descent with momentum, as PipeDream trains these models.
TRAINING = Training(state_per_parameter=1.0)
UNPUBLISHED = ("resnet101", "gnmt")
QUICK = ("alexnet", (8,), (1.4e9,))
MOST_PLANNING_SECONDS = 5.0
AS_FAST = 1.0


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("profiles", nargs="*", type=Path, help="further graph.txt files")
    arguments = parser.parse_args()
    rows = [_row(question) for question in _questions(arguments)]
    result: dict[str, Any] = {
        "rows": rows,
        "batch": "profiled samples x devices, x widest stage's replicas, or x devices / stages",
        "claims": _claims(rows),
    }
    say(result["claims"])
    finish(__file__, result, columns=COLUMNS, arguments=arguments)


def _questions(arguments: Any) -> list[Question]:
    if arguments.profiles:
        return further_questions(arguments.profiles, CLUSTERS)
    questions = published_questions()
    if arguments.quick:
        return [
            question
            for question in questions
            if (question.profile, question.machines, question.bandwidths) == QUICK
        ]
    paths = [FOLDER / "profiles" / f"{name}.graph.txt" for name in UNPUBLISHED]
    return questions + further_questions(paths, CLUSTERS)


def _row(question: Question) -> dict[str, Any]:
    say(question.profile, name_of(question.machines, question.bandwidths), question.asked)
    began = time.process_time()
    optimum = question.optimum()
    optimizer_seconds = time.process_time() - began
    states, machines = question.states, question.levels
    assert states.layers is not None, "states of a graph know their layers"
    ends = [stage.end - 1 for stage in optimum.levels[-1]]
    chain = profiled_chain(
        question.graph,
        name=question.profile,
        through=[states.layers[end] for end in ends],
        device="v100",
    )
    split = pipedream_split(
        optimum,
        machines,
        cuts=cut_layers(states.layers),
        num_samples=chain.num_samples * len(machines.devices),
        num_micro_batches=len(machines.devices),
    )
    verdict = _verdict(chain, split, question.machines, question.bandwidths)
    their, our = verdict.theirs, verdict.ours
    return {
        "profile": question.profile,
        "cluster": name_of(question.machines, question.bandwidths),
        "asked": question.asked,
        "golden_equal": question.is_equal(optimum),
        "num_ties": optimum.num_ties,
        "source": "simulated",
        "pipedream_own_per_second": chain.num_samples / optimum.stage_seconds,
        "pipedream_stages": _shown(split),
        "pipedream_fits": their.is_possible,
        "pipedream_per_second": _rate(their),
        "pipedream_passing": _passing(their.split),
        "pipedream_gb": _most_gb(their),
        "ours_stages": _shown(our.split),
        "ours_per_second": _rate(our),
        "ours_passing": _passing(our.split),
        "ours_gb": _most_gb(our),
        "ours_fits": our.judgement.fits,
        "ours_binding": str(our.judgement.binding),
        "ours_over_pipedream": _rate(our) / _rate(their),
        "synchronous_over_pipedream": _rate(verdict.fresh) / _rate(their),
        "optimizer_seconds": optimizer_seconds,
        "planning_seconds": verdict.planning_seconds,
    }


class Verdict(NamedTuple):
    """The best of PipeDream's split, of ours, and of ours that are not stale."""

    theirs: Candidate
    ours: Candidate
    fresh: Candidate
    planning_seconds: float


@cache  # several ways to ask PipeDream have the same answer
def _verdict(
    chain: Chain, split: Split, machines: tuple[int, ...], bandwidths: tuple[float, ...]
) -> Verdict:
    """Judge PipeDream's split, and plan with the same batches.

    PipeDream sums up after a minibatch for each replica, and has one for each device under way. As
    batches of a `Split` that is as many samples as its widest stage has, or as few as make up the
    same memory.
    """
    cluster = cluster_of(machines, bandwidths)
    costs = ClusterCosts.of(
        chain, ClusterNetwork(cluster), memory=memory_of(cluster), training=TRAINING
    )
    staleness = len(split.stages) - 1
    batches = {
        split.num_samples,
        chain.num_samples * max(split.replicas),
        split.num_samples // len(split.stages),
    }
    theirs: list[Candidate] = []
    ours: list[Candidate] = []
    fresh: list[Candidate] = []
    planning_seconds = 0.0
    for num_samples in sorted(batches):
        given = replace(split, num_samples=num_samples)
        theirs += (_judged(costs, way) for way in passings(given, staleness=staleness))
        began = time.process_time()
        plan = plan_on(chain, cluster, num_samples, training=TRAINING, staleness=staleness)
        planning_seconds = max(planning_seconds, time.process_time() - began)
        ours.append(plan.best)
        fresh.append(
            plan_on(chain, cluster, num_samples, training=TRAINING).best if staleness else plan.best
        )
    return Verdict(
        theirs=max(theirs, key=lambda candidate: (candidate.is_possible, _rate(candidate))),
        ours=max(ours, key=_rate),
        fresh=max(fresh, key=_rate),
        planning_seconds=planning_seconds,
    )


def _judged(costs: ClusterCosts, split: Split) -> Candidate:
    judgement = judge(costs, split)
    return Candidate(name=split.partitioner, split=split, judgement=judgement)


def _rate(candidate: Candidate) -> float:
    return candidate.judgement.samples_per_second


def _shown(split: Split) -> str:
    """Last layers and replicas: `7x5 10x2 21`."""
    return " ".join(
        f"{stage.last}x{len(stage.devices)}" if len(stage.devices) > 1 else str(stage.last)
        for stage in split.stages
    )


def _passing(split: Split) -> str:
    stale = f", up to {max(split.lags)} batches stale" if any(split.lags) else ""
    size = f"{split.num_samples} samples, {split.num_micro_batches} micro-batches"
    return f"{size}, {split.schedule}{stale}"


def _most_gb(candidate: Candidate) -> float:
    return max(stage.memory.total_bytes for stage in candidate.judgement.stages) / 1e9


def _claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    published = [row for row in rows if row["golden_equal"] is not None]
    ratios = [row["ours_over_pipedream"] for row in rows]
    no_transfers = [
        row["ours_over_pipedream"]
        for row in rows
        if row["asked"].startswith("no transfers") and row["ours_stages"] != row["pipedream_stages"]
    ]
    longest = max(row["planning_seconds"] for row in rows)
    return {
        "golden_equal": {
            "equal": sum(row["golden_equal"] for row in published),
            "of": len(published),
            "of_these_without_a_tie": sum(not row["num_ties"] for row in published),
            "holds": all(row["golden_equal"] for row in published),
        },
        "ours_over_pipedream": {
            "least": min(ratios),
            "most": max(ratios),
            "target": AS_FAST,
            "holds": min(ratios) >= AS_FAST and all(row["ours_fits"] for row in rows),
        },
        "ours_over_pipedream_without_transfers": {
            "least": min(no_transfers, default=None),
            "target": "more than 1",
            "holds": all(ratio > 1.0 for ratio in no_transfers),
        },
        "longest_planning_seconds": {
            "found": longest,
            "target": MOST_PLANNING_SECONDS,
            "holds": longest <= MOST_PLANNING_SECONDS,
        },
    }


if __name__ == "__main__":
    main()
