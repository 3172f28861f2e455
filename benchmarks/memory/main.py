"""How fast is a step within a memory limit? Our plans against plain and against our peers.

Each model runs plainly, by every peer, and by our plans: at shares of the plain peak down to the
model's floor, and at the peak of every peer, so that the two can be compared at equal memory. All
of them take turns in one process. Peaks are live malloc bytes over the step's start, times are
processor time as multiples of the plain steps right before and after, one thread.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import _dynamo

from bayplan.devices.machine import describe_machine
from bayplan.devices.meters import open_meter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, keep_freed_memory, known_of_others, options, say
from memory.claims import KEEPING_ALL, claims
from memory.contest import Contest, Contestant
from memory.models import MODELS, QUICK_MODELS, Case
from memory.ours import Ours, open_swap_space
from memory.peers import PEERS
from memory.planning_times import DEEP, planning_times

SHARES = (0.80, 0.60, 0.50, 0.40, 0.35)
PACKED_SHARES = (0.40,)
QUICK_PEERS = ("checkpoint each block", "activation_memory_budget 0.5")
COLUMNS = (
    "model",
    "method",
    "against",
    "limit_bytes",
    "peak_bytes",
    "peak_share",
    "predicted_peak_bytes",
    "time_ratio",
    "predicted_time_ratio",
    "same_numbers",
    "same_buffers",
)


@dataclass(frozen=True)
class Settings:
    """How long to plan and to measure.

    Attributes:
        rounds: turns of all methods.
        seconds: to plan a model's curve.
        share_rounds: more turns of the plans for shares of the plain peak, which have targets.
        share_seconds: to plan each of these alone.
    """

    rounds: int
    seconds: float
    share_rounds: int
    share_seconds: float
    methods: Sequence[str] = tuple(PEERS)


def main() -> None:
    parser = options(__doc__ or "")
    known = {**MODELS, **QUICK_MODELS}
    parser.add_argument("--models", nargs="*", choices=list(known), help="these anew")
    parser.add_argument("--rounds", type=int, default=3, help="turns of all methods")
    parser.add_argument("--seconds", type=float, default=40.0, help="to plan a model's curve")
    parser.add_argument(
        "--share-seconds", type=float, default=30.0, help="to plan each share of the plain peak"
    )
    parser.add_argument(
        "--share-rounds", type=int, default=8, help="more turns of plans for such shares"
    )
    parser.add_argument(
        "--shares-only",
        action="store_true",
        help="measure only the shares of --models anew, and keep what is known of their peers",
    )
    parser.add_argument("--no-deep", action="store_true", help="leave planning times out")
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    # Every method is another version of one model's code, and all of them are alive.
    _dynamo.config.recompile_limit = 100
    settings = Settings(
        arguments.rounds, arguments.seconds, arguments.share_rounds, arguments.share_seconds
    )
    if arguments.quick:
        settings = Settings(1, 2.0, 1, 1.0, methods=QUICK_PEERS)
    if arguments.shares_only:
        settings = replace(settings, methods=(), rounds=0)
    folder = Path(__file__).parent / "results"
    partial = (folder / "quick" if arguments.quick else folder) / "partial.json"
    result: dict[str, Any] = {"rows": [], "failures": [], "planning": [], "runs": {}}
    result |= known_of_others(__file__, arguments, is_kept=_is_kept(arguments))
    with tempfile.TemporaryDirectory() as cache, suppress(KeyboardInterrupt):
        for name in arguments.models or (QUICK_MODELS if arguments.quick else MODELS):
            _compare(name, known[name], result, cache=Path(cache), settings=settings)
            of_shares = f"{name}, shares"
            result["runs"].pop(of_shares, None)  # of rows that are gone
            result["runs"][of_shares if arguments.shares_only else name] = {
                "rounds": settings.rounds,
                "share_rounds": settings.share_rounds,
                "options": sys.argv[1:],
                "processor": describe_machine()["processor"],
            }
            _keep(result, partial)
        deep = () if arguments.quick or arguments.no_deep else DEEP
        if deep:
            result["planning"].clear()
        for name in deep:
            result["planning"].append(planning_times(name, cache=Path(cache)))
            say("planning {model}: {planning_seconds:.1f} s".format(**result["planning"][-1]))
            _keep(result, partial)
    if result["rows"]:
        result["claims"] = claims(result["rows"])
        say(json.dumps(result["claims"], indent=1))
        finish(__file__, result, columns=COLUMNS, arguments=arguments)
        partial.unlink(missing_ok=True)


def _compare(
    name: str,
    case: Case,
    result: dict[str, Any],
    *,
    cache: Path,
    settings: Settings,
) -> None:
    """All methods on one model; its rows are added to the result."""
    _dynamo.reset()
    with ExitStack() as open_things:
        meter = open_things.enter_context(open_meter(torch.device("cpu"), cache))
        contest = Contest(*case.build(), meter)
        plain = Contestant("plain", contest.fresh_step())
        contest.admit(plain)
        contest.measure_peaks([plain])
        say(f"{name}: plain {plain.peak_bytes / 2**20:.0f} MiB")
        peers = list(_peers(name, contest, case, settings.methods, result["failures"]))
        contest.measure_peaks(peers)
        ours = Ours.of(plain.step, plain_peak_bytes=plain.peak_bytes, cache=cache)
        entries = [*_by_repeats(contest, ours, plain, peers, settings)]
        if settings.methods:
            entries.append(_keeping_all(contest, ours))
            entries += _packed(contest, ours, plain, cache, settings.seconds / 4)
        runners = {id(entry.contestant): entry.contestant for entry in entries}
        others = [*peers, *runners.values()]
        say(f"{name}: {len(others)} methods beside plain")
        contest.measure(plain, others, rounds=settings.rounds)
        # What targets are set for is measured more often: there a hundredth matters.
        targeted = {id(e.contestant): e.contestant for e in entries if e.has_target}
        contest.measure(plain, [*targeted.values()], rounds=settings.share_rounds)
    if not settings.methods:
        entries = [entry for entry in entries if entry.limit_share is not None]
    for entry in [*map(Entry, (plain, *peers) if settings.methods else ()), *entries]:
        row = {
            "model": name,
            "against": entry.against,
            "limit_share": entry.limit_share,
            "limit_bytes": entry.limit_bytes,
        }
        result["rows"].append({**row, **_row(entry.contestant, plain)})
        say(_line(result["rows"][-1]))


@dataclass(frozen=True)
class Entry:
    """A row to come; several may share a contestant, where one plan is the best for all.

    Attributes:
        limit_bytes: what was planned for.
        limit_share: the same as a share of the plain peak, where that was asked for.
        against: the peer whose peak is the limit.
    """

    contestant: Contestant
    limit_bytes: int | None = None
    limit_share: float | None = None
    against: str | None = None

    @property
    def has_target(self) -> bool:
        """Whether a figure is promised of it."""
        return self.limit_share is not None or self.contestant.method == KEEPING_ALL


def _peers(
    name: str,
    contest: Contest,
    case: Case,
    methods: Sequence[str],
    failures: list[dict[str, str]],
) -> Iterator[Contestant]:
    for method in methods:
        peer, step = PEERS[method], contest.fresh_step()
        peer.apply(step.model, case.chains)
        contestant = Contestant(method, step, first=peer.first)
        try:
            contest.admit(contestant)
        except RuntimeError as fault:  # some refuse layers that write in place
            say(f"{name}: {method} fails: {fault}")
            failures.append({"model": name, "method": method, "fault": str(fault)})
        else:
            say(f"{name}: {method} is ready")
            yield contestant


def _by_repeats(
    contest: Contest,
    ours: Ours,
    plain: Contestant,
    peers: Sequence[Contestant],
    settings: Settings,
) -> Iterator[Entry]:
    """Repeats and free rewrites alone: at shares, at the floor, and at each peer's peak."""
    shares = {int(share * plain.peak_bytes): share for share in SHARES}
    wanted: list[tuple[int, str | None]] = [(limit_bytes, None) for limit_bytes in shares]
    wanted += [(peer.peak_bytes, peer.method) for peer in peers]
    orders = ours.curve(
        [limit_bytes for limit_bytes, _ in wanted],
        seconds=settings.seconds,
        alone_bytes=shares.keys(),
        alone_seconds=settings.share_seconds,
    )
    if min(orders) not in shares:  # the floor
        wanted.append((min(orders), None))
    bound: dict[tuple[int, ...], Contestant] = {}
    for limit_bytes, against in wanted:
        order = orders.get(limit_bytes)
        if order is None:
            say(f"nothing fits {limit_bytes / plain.peak_bytes:.1%} of the plain peak")
            continue
        if order.schedule not in bound:
            bound[order.schedule] = ours.contestant(contest, "bayplan", order)
            contest.admit(bound[order.schedule])
            say(f"bayplan at {limit_bytes / plain.peak_bytes:.1%} of the plain peak is ready")
        share = None if against else shares.get(limit_bytes)
        yield Entry(bound[order.schedule], limit_bytes, share, against)


def _keeping_all(contest: Contest, ours: Ours) -> Entry:
    """A plan that changes nothing but by free rewrites: what it takes to run a plan at all."""
    contestant = ours.contestant(contest, KEEPING_ALL, ours.keeping_all())
    contest.admit(contestant)
    return Entry(contestant)


def _packed(
    contest: Contest, ours: Ours, plain: Contestant, cache: Path, seconds: float
) -> Iterator[Entry]:
    """With packing, and with packing and swapping."""
    space = open_swap_space(cache)
    for method, place in (("bayplan+pack", None), ("bayplan+pack+swap", space)):
        for share in PACKED_SHARES:
            limit_bytes = int(share * plain.peak_bytes)
            order = ours.packed(limit_bytes, seconds=seconds, space=place)
            if order is None:
                say(f"{method}: nothing fits {share:.0%} of the plain peak")
                continue
            contestant = ours.contestant(contest, method, order, space=place)
            contest.admit(contestant)
            yield Entry(contestant, limit_bytes, share)


def _row(contestant: Contestant, plain: Contestant) -> dict[str, Any]:
    assert contestant.numbers is not None, "it was admitted"
    assert plain.numbers is not None, "it was admitted"
    same_numbers = contestant.numbers.gradients == plain.numbers.gradients
    same_buffers = contestant.numbers.buffers == plain.numbers.buffers
    if contestant.method.startswith("bayplan"):
        assert same_numbers, f"{contestant.method} computes other gradients"
        assert same_buffers, f"{contestant.method} leaves other buffers"
    return {
        "method": contestant.method,
        "peak_bytes": contestant.peak_bytes,
        "peak_share": contestant.peak_bytes / plain.peak_bytes,
        "predicted_peak_bytes": contestant.predicted_peak_bytes,
        "predicted_time_ratio": contestant.predicted_time_ratio,
        **contestant.times,
        "same_numbers": same_numbers,
        "same_buffers": same_buffers,
    }


def _line(row: dict[str, Any]) -> str:
    predicted = row["predicted_time_ratio"]
    told = "" if predicted is None else f" (predicted {predicted:.3f})"
    against = "" if row["against"] is None else f", against {row['against']}"
    return (
        f"{row['model']}, {row['method']}{against}: {row['peak_share']:.1%} of the plain peak at"
        f" {row['time_ratio']:.3f}x{told}"
    )


def _is_kept(arguments: argparse.Namespace) -> Callable[[dict[str, Any]], bool]:
    """Which rows of models that are run again stay: with --shares-only, all others than shares."""

    def is_kept(row: dict[str, Any]) -> bool:
        is_share = row.get("method") == "bayplan" and row.get("limit_share") is not None
        return arguments.shares_only and not is_share

    return is_kept


def _keep(result: dict[str, Any], file: Path) -> None:
    """What is known so far, in case the rest never comes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
