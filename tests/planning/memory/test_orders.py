"""Deciding: within the limit, kept on disk for the next time, and the fastest of the variants."""

import json
import math
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import nn

from bayplan.data.errors import DoesNotFit
from bayplan.data.program import Op, Program
from bayplan.data.units import Limit
from bayplan.planning.memory import orders
from bayplan.planning.memory.orders import FastestWithin, as_planned, by_strategy, order_of
from bayplan.planning.memory.search import plan_rounds
from bayplan.planning.memory.strategies import keep
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement, Tier
from bayplan.step import TrainingStep
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.traced_step import MemoryContext, TracedStep

pytestmark = pytest.mark.usefixtures("own_planner_cache")
FAST = Tier(out_bytes_per_second=1e12, in_bytes_per_second=1e12)
SLOW = Tier(out_bytes_per_second=1.0, in_bytes_per_second=1.0)


@pytest.fixture
def traced(context: MemoryContext) -> TracedStep:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)]
    step = TrainingStep(
        model=nn.Sequential(*layers), batch=torch.randn(256, 32), loss_fn=lambda y: y.sum()
    )
    return trace_step(step, context)


def plain_peak_bytes(traced: TracedStep) -> int:
    program = traced.with_packs().program
    return replay_schedule(program, plain_schedule(program)).peak_bytes


def within(share: float, cache: Path, **settings) -> FastestWithin:
    return FastestWithin(Limit(share=share), cache, **{"time_limit_seconds": 0.5, **settings})


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "orders").glob("*.json"))


def test_order_is_within_the_limit_and_says_what_it_costs(traced, tmp_path):
    order = within(0.7, tmp_path)(traced)
    plain_bytes = plain_peak_bytes(traced)
    assert order.peak_bytes <= 0.7 * plain_bytes
    assert order.plain_peak_bytes == plain_bytes
    assert order.strategy == "auto"
    assert order.seconds >= order.plain_seconds
    assert order.time_ratio >= 1
    assert order.gap is None or order.gap >= 0
    assert len(order.schedule) > len(traced.with_packs().program.ops)


def test_only_the_fastest_variant_is_searched_beyond_its_first_round(
    context, tmp_path, monkeypatch
):
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*layers)
    step = TrainingStep(model=model, batch=torch.randn(2048, 64), loss_fn=lambda y: y.sum())
    traced = trace_step(step, context)
    assert len(orders.pack_variants(traced)) > 1
    rounds: dict[str, list[float]] = {}

    def counting(program, limit_bytes, **options):
        seconds = rounds.setdefault(program.fingerprint, [])
        for planned in plan_rounds(program, limit_bytes, **options):
            seconds.append(planned.seconds)
            yield planned

    monkeypatch.setattr(orders, "plan_rounds", counting)
    order = within(0.7, tmp_path, time_limit_seconds=60)(traced)
    firsts = {seconds[0] for seconds in rounds.values()}
    (longest,) = (seconds for seconds in rounds.values() if len(seconds) > 1)
    assert len(rounds) > 1
    assert longest[0] == min(firsts)
    assert order.seconds == longest[-1]


def test_enough_memory_needs_no_search(traced, tmp_path):
    order = within(1.0, tmp_path)(traced)
    assert order.schedule == plain_schedule(traced.with_packs().program)
    assert not kept(tmp_path)


def test_share_is_of_the_peak_that_is_given(traced, tmp_path):
    plain_bytes = plain_peak_bytes(traced)
    order = within(0.5, tmp_path, plain_peak_bytes=2 * plain_bytes)(traced)
    assert order.schedule == plain_schedule(traced.with_packs().program)
    assert order.plain_peak_bytes == 2 * plain_bytes


def test_kept_order_is_not_taken_for_another_plain_peak(traced, tmp_path):
    """What it saves is told against that peak: a kept order once told it against another."""
    plain_bytes = plain_peak_bytes(traced)
    limit = Limit(size_bytes=int(0.7 * plain_bytes))
    first = FastestWithin(limit, tmp_path, time_limit_seconds=0.5)(traced)
    other = FastestWithin(
        limit, tmp_path, time_limit_seconds=0.5, plain_peak_bytes=2 * plain_bytes
    )(traced)
    assert (first.plain_peak_bytes, other.plain_peak_bytes) == (plain_bytes, 2 * plain_bytes)


def test_same_step_is_planned_once(traced, tmp_path, monkeypatch):
    decide = within(0.7, tmp_path)
    order = decide(traced)
    (path,) = kept(tmp_path)
    assert json.loads(path.read_text())["schema"] == "bayplan/order"
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(FastestWithin, "_search", None)
    assert decide(traced) == order
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "changes", [{"share": 0.75}, {"may_pack": False}, {"tier": FAST}, {"time_limit_seconds": 0.6}]
)
def test_another_question_is_planned_anew(traced, tmp_path, changes):
    within(0.7, tmp_path)(traced)
    within(**{"share": 0.7, "cache": tmp_path, **changes})(traced)
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["{", "[]", '{"schema": "bayplan/order", "version": 99}'])
def test_damaged_file_counts_as_none(traced, tmp_path, damage):
    decide = within(0.7, tmp_path)
    decide(traced)
    (path,) = kept(tmp_path)
    path.write_text(damage)
    assert decide(traced).peak_bytes <= 0.7 * plain_peak_bytes(traced)
    assert path.read_text() != damage


@pytest.mark.parametrize(
    "edit",
    [
        lambda order: {"schedule": order["schedule"][:3]},
        lambda order: {"schedule": sorted({*order["schedule"]})},  # above the limit
        lambda order: {"packs": ["no_such_value"]},
        lambda order: {"program_fingerprint": "another"},
    ],
)
def test_kept_order_that_does_not_hold_is_planned_anew(traced, tmp_path, edit):
    decide = within(0.7, tmp_path, may_pack=False)
    decide(traced)
    (path,) = kept(tmp_path)
    content = json.loads(path.read_text())
    content["order"].update(edit(content["order"]))
    path.write_text(json.dumps(content))
    order = decide(traced)
    assert order.peak_bytes <= 0.7 * plain_peak_bytes(traced)
    assert json.loads(path.read_text())["order"]["schedule"] == [*order.schedule]


def test_cache_that_cannot_be_written_costs_nothing_else(traced, tmp_path):
    (tmp_path / "orders").touch()  # where a folder should be
    assert within(0.7, tmp_path)(traced).peak_bytes <= 0.7 * plain_peak_bytes(traced)


def test_swaps_only_where_they_pay(traced, tmp_path):
    assert within(0.7, tmp_path, tier=FAST)(traced).swaps
    assert not within(0.7, tmp_path, tier=SLOW)(traced).swaps


def test_what_never_fits_is_refused_with_what_would(traced, tmp_path):
    with pytest.raises(DoesNotFit, match=r"limit .* Fits with \d+ bytes"):
        FastestWithin(Limit(size_bytes=1000), tmp_path, time_limit_seconds=0.5)(traced)


def test_limit_that_a_refusal_names_has_a_plan_however_short_the_search(traced, tmp_path):
    with pytest.raises(DoesNotFit) as refused:
        FastestWithin(Limit(size_bytes=1000), tmp_path, time_limit_seconds=0.5)(traced)
    named_bytes = refused.value.smallest_bytes
    assert named_bytes is not None
    decide = FastestWithin(Limit(size_bytes=named_bytes), tmp_path, time_limit_seconds=1e-6)
    assert decide(traced).peak_bytes <= named_bytes


def test_progress_rises_to_the_end(traced, tmp_path):
    heard: list[float] = []
    # Compiling the inner loop into a new cache counts as well.
    within(0.7, tmp_path, time_limit_seconds=2.0, may_pack=False, on_progress=heard.append)(traced)
    assert heard
    assert all(0 <= share <= 1 for share in heard)
    assert heard == sorted(heard)


def test_strategy_by_name(traced):
    order = by_strategy("keep", keep(), plain_peak_bytes=123)(traced)
    assert order.strategy == "keep"
    assert order.plain_peak_bytes == 123
    assert order.peak_bytes == plain_peak_bytes(traced)
    assert order.gap is None


def test_plan_is_taken_as_it_is(traced):
    order = by_strategy("keep", keep())(traced)
    assert as_planned(order)(traced) is order


def test_gap_is_known_only_for_repeats_within_a_limit(traced):
    program = traced.with_packs().program
    known = {"strategy": "keep", "plain_peak_bytes": 1, "plain_seconds": 1.0}
    bounded = order_of(program, keep()(program), limit_bytes=2**40, **known)
    assert bounded.gap == pytest.approx(0.0, abs=1e-9)
    assert order_of(program, keep()(program), **known).gap is None
    packed = order_of(program, keep()(program), limit_bytes=2**40, packs=("gelu",), **known)
    assert packed.gap is None


def test_ratio_is_uncertain_by_the_spread_of_prices():
    """Forward ops a and b, backward op c; a is repeated, so its price counts twice in the plan."""
    a = Op(name="a", reads=(0,), writes=(1,), seconds=2.0, spread_seconds=0.2)
    b = Op(name="b", reads=(1,), writes=(2,), seconds=1.0, spread_seconds=0.1)
    c = Op(name="c", reads=(1, 2), writes=(3,), seconds=1.0, spread_seconds=0.3)
    buffers, outputs = (1, 1, 1, 1), frozenset({3})
    program = Program(
        buffers=buffers, ops=(a, b, c), first_backward=2, inputs=frozenset({0}), outputs=outputs
    )
    order = order_of(
        program, Arrangement((0, 1, 0, 2)), strategy="auto", plain_peak_bytes=4, plain_seconds=4.0
    )
    assert order.time_ratio == 1.5
    # dr = (n - r) dp / 4, with n = 2 for a and 1 for the others.
    assert order.time_ratio_spread == pytest.approx(math.hypot(0.5 * 0.2, 0.5 * 0.1, 0.5 * 0.3) / 4)
    assert order.price_spread == pytest.approx(0.15)
    twins = structs.replace(program, ops=(a, b, structs.replace(c, spread_seconds=0.1)))
    order = order_of(
        twins, Arrangement((0, 1, 0, 2)), strategy="auto", plain_peak_bytes=4, plain_seconds=4.0
    )
    # b and c now have one price, measured once: they are off together.
    assert order.time_ratio_spread == pytest.approx(math.hypot(0.5 * 0.2, 2 * 0.5 * 0.1) / 4)
    plain = order_of(
        program, Arrangement((0, 1, 2)), strategy="keep", plain_peak_bytes=4, plain_seconds=4.0
    )
    assert (plain.time_ratio, plain.time_ratio_spread) == (1.0, 0.0)


def test_again_searches_although_an_order_is_kept(traced, tmp_path):
    decide = within(0.7, tmp_path)
    first = decide(traced)
    assert not decide.took_kept
    assert decide(traced) == first
    assert decide.took_kept
    anew = within(0.7, tmp_path, again=True)
    assert anew(traced).peak_bytes <= first.plain_peak_bytes
    assert not anew.took_kept
    assert len(kept(tmp_path)) == 1
