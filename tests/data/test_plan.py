import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data import files
from bayplan.data.actions import Action, ActionKind
from bayplan.data.plan import Choice, Decision, Plan, Route, Stage, StageOrder, StepOrder

replace = msgspec.structs.replace
NUMBERS = st.integers(0, 10**6)
ACTIONS = st.builds(Action, NUMBERS, st.sampled_from(ActionKind), NUMBERS)


# Stages.


def test_a_replicated_stage_has_a_share_for_each_device():
    stage = Stage(first=0, last=4, devices=(0, 1), shares=(7, 1))
    assert stage.shares == (7, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first": 5}, "first node 5 is after last node 4"),
        ({"devices": (), "shares": ()}, "devices is empty; a stage needs at least one"),
        ({"shares": (1, 2)}, "2 shares for 1 devices"),
        ({"devices": (-3,)}, r"devices\[0\] is -3, must be 0 or more"),
        ({"shares": (-1,)}, r"shares\[0\] is -1, must be"),
        ({"first": -1}, "first is -1, must be 0 or more"),
    ],
)
def test_an_impossible_stage_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Stage(**({"first": 0, "last": 4, "devices": (0,), "shares": (8,)} | fields))


# Orders of stages.

ORDER = StepOrder(
    program_fingerprint="",
    schedule=(0,),
    strategy="auto",
    peak_bytes=1,
    plain_peak_bytes=1,
    seconds=1.0,
    plain_seconds=1.0,
)


def test_a_stage_needs_what_is_held_by_all_in_flight_and_what_passes():
    order = StageOrder(
        stage=0, num_samples=4, order=ORDER, in_flight=3, held_bytes=10, passing_bytes=5
    )
    assert order.needed_bytes == 35


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": -1}, "stage is -1, must be 0 or more"),
        ({"num_samples": 0}, "num_samples is 0, must be at least 1"),
        ({"in_flight": 0}, "in_flight is 0, must be at least 1"),
        ({"held_bytes": -1}, "held_bytes is -1, must be 0 or more"),
        ({"swap_bytes": -1}, "swap_bytes is -1, must be 0 or more"),
    ],
)
def test_an_impossible_order_of_a_stage_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        StageOrder(**({"stage": 0, "num_samples": 4, "order": ORDER} | fields))


def test_an_order_of_a_stage_that_is_not_there_is_refused(plan):
    order = StageOrder(stage=2, num_samples=4, order=ORDER)
    with pytest.raises(ValueError, match=r"stage_orders\[0\]\.stage is 2, must be from 0 to 1"):
        replace(plan, stage_orders=(order,))


# Plans.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches is 0, must be at least 1"),
        (
            {
                "stages": (Stage(first=0, last=1, devices=(0,), shares=(1,)),),
                "actions": ((),),
                "predicted_peak_bytes": (1,),
                "static_order": False,
            },
            "static_order is false for 1 devices, must be true",
        ),
        ({"predicted_peak_bytes": (1,)}, "1 predicted peaks for 2 devices"),
        (
            {"stages": (Stage(first=0, last=1, devices=(0, 5), shares=(1, 1)),)},
            r"stages\[0\]\.devices\[1\] is 5, but only 2 devices have actions",
        ),
        (
            {"actions": (("0F0", "F1"), ())},
            r"actions\[0\]\[1\]: 'F1' is not an action; write stage",
        ),
        ({"actions": ((), ("2F0",))}, r"actions\[1\]\[0\] is '2F0', but there are only 2 stages"),
        (
            {"actions": (("0F2",), ())},
            r"actions\[0\]\[0\] is '0F2', but there are only 2 micro-batches",
        ),
        (
            {"actions": ((), ("1REDUCE1",))},
            r"actions\[1\]\[0\] is '1REDUCE1', but there are only 1 buckets",
        ),
        ({"predicted_seconds": float("nan")}, "predicted_seconds is nan, must be 0 or more"),
        ({"predicted_seconds": float("inf")}, "predicted_seconds is inf, must be 0 or more"),
        (
            {"sync_batch_norm": True, "route": Route.ROUND_ROBIN},
            "sync_batch_norm is true and route is round-robin, must be split",
        ),
        (
            {"sync_batch_norm": True, "static_order": False},
            "sync_batch_norm is true and static_order is false, must be true",
        ),
    ],
)
def test_an_impossible_plan_is_refused(plan, fields, message):
    with pytest.raises(ValueError, match=message):
        replace(plan, **fields)


@given(st.lists(st.lists(ACTIONS, max_size=5), min_size=2, max_size=4))
def test_any_list_of_actions_survives_a_file(plan, lists):
    fitting = tuple(
        tuple(str(replace(a, stage=a.stage % 2, index=0)) for a in actions) for actions in lists
    )
    written = replace(plan, actions=fitting, predicted_peak_bytes=(0,) * len(fitting))
    assert files.decode(files.encode(written), Plan, name="x").actions == fitting


@pytest.mark.parametrize("choice", list(Choice))
def test_choices_are_written_as_words(device_plan, choice):
    written = replace(device_plan, decisions=(Decision(value="relu_3", choice=choice),))
    assert f'"choice": "{choice}"'.encode() in files.encode(written)


def test_replicas_are_synchronised_where_there_are_several(plan):
    one, two = (
        Stage(first=0, last=1, devices=own, shares=(1,) * len(own)) for own in ((0,), (0, 1))
    )
    both = replace(plan, stages=(one, two), sync_batch_norm=True)
    assert both.synchronised_stages == (1,)
    assert replace(both, sync_batch_norm=False).synchronised_stages == ()


def test_a_plan_without_bound_says_so(device_plan):
    order = replace(device_plan.order, gap=None)
    assert b'"gap": null' in files.encode(replace(device_plan, order=order))
