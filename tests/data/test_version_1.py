"""Plan files of version 1, as its last release wrote them, read as plans of version 2.

`version_1/device.json` and `ranks.json` were written by `bayplan plan train:build --memory 85%` and
`bayplan plan train:build --placement 0:0-1.0:2 --micro-batches 2 --memory-per-rank 95KiB`, with the
`train.py` beside them.
"""

import json
from pathlib import Path

import pytest

from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.data.plan import Choice, DevicePlan, Plan, RankPlan
from bayplan.reporting.plans import explanation_text
from bayplan.reporting.ranks import whole_pipeline_text
from bayplan.simulating.checking import check_rank_plan

FOLDER = Path(__file__).parent / "version_1"


def edited(name: str, **changes: object) -> bytes:
    return json.dumps(json.loads((FOLDER / name).read_bytes()) | changes).encode()


def test_a_plan_for_one_device_is_read_and_explained():
    plan = files.read(FOLDER / "device.json", Plan)
    assert isinstance(plan, DevicePlan)
    assert plan.version == 2
    assert plan.request is not None
    assert (plan.request.target, plan.limit_bytes) == ("train:build", 108371)
    assert [one.choice for one in plan.decisions] == [Choice.RECOMPUTE] * 2
    assert plan.predicted_peak_bytes == (plan.order.peak_bytes,)
    assert "2 recomputed\nstrategy auto, limit 105.8 KiB" in explanation_text(plan)


def test_a_plan_for_ranks_is_read_checked_and_explained():
    plan = files.read(FOLDER / "ranks.json", Plan)
    assert isinstance(plan, RankPlan)
    assert plan.version == 2
    assert [stage.devices for stage in plan.stages] == [(0, 1), (2,)]
    assert [order.num_samples for order in plan.stage_orders] == [64, 128]
    assert [len(actions) for actions in plan.actions] == [10, 10, 9]
    assert check_rank_plan(plan) is plan
    assert "bucket 1: 4 gradients, 2.1 KiB, of stage 0" in whole_pipeline_text(plan)


@pytest.mark.parametrize("name", ["device.json", "ranks.json"])
def test_nothing_is_lost_but_what_the_order_says_again(name):
    """What version 1 had and version 2 has not is a default, or stands in the order."""
    old = json.loads((FOLDER / name).read_bytes())
    new = json.loads(files.encode(files.read(FOLDER / name, Plan)))
    for order in [new.get("order"), *(each["order"] for each in new.get("stage_orders", ()))]:
        if order is not None:  # what nobody knew then has its default
            assert (order.pop("time_ratio_spread"), order.pop("price_spread")) == (0.0, 0.0)
            assert order.pop("reserved_bytes") is None
            assert order.pop("in_step") is False
    assert new["request"].pop("operators") == ""
    assert {field: old[field] for field in new.keys() & old.keys() - {"version"}} == {
        field: new[field] for field in new.keys() & old.keys() - {"version"}
    }
    lost = {field: old[field] for field in old.keys() - new.keys() if old[field]}
    if name == "device.json":
        assert lost.pop("gap") == new["order"]["gap"]
        assert lost.pop("actions") == [["0F0", "0B0", "0U0"]]
        assert [stage["devices"] for stage in lost.pop("stages")] == [[0]]
        assert lost.pop("route") == "split"
        assert (lost.pop("num_micro_batches"), lost.pop("static_order")) == (1, True)
    assert lost == {}
    again = files.decode(files.encode(files.read(FOLDER / name, Plan)), Plan, name="again")
    assert again == files.read(FOLDER / name, Plan)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("device.json", {"version": 99}, "version 99, this bayplan reads versions 1 to 2"),
        ("device.json", {"version": 0}, "version 0, this bayplan reads versions 1 to 2"),
        ("device.json", {"colour": "red"}, "unknown field `colour`"),
        ("device.json", {"order": {"schedule": 3}}, r"got `int` - at `\$\.order\.schedule`"),
        ("device.json", {"order": {}}, "required field `program_fingerprint`"),
        ("device.json", {"actions": [[], []]}, "there are 2 lists of `actions`"),
        ("ranks.json", {"colour": "red"}, "unknown field `colour`"),
        ("ranks.json", {"stages": [{"first": "a"}]}, r"at `\$\.stages\[0\]\.first`"),
        ("ranks.json", {"actions": [["0X0"]]}, "for 1 devices"),
        ("ranks.json", {"links": [[1, 0]]}, r"links\[0\] is 1, 0"),
    ],
)
def test_a_fault_is_named_where_it_stands(name, changes, message):
    with pytest.raises(FileFault, match=message):
        files.decode(edited(name, **changes), Plan, name=name)


def test_a_plan_for_one_device_is_no_plan_for_ranks():
    with pytest.raises(FileFault, match=r"'device' - at `\$\.kind`"):
        files.read(FOLDER / "device.json", RankPlan)
