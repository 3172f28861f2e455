"""What an action waits for on its own rank; `test_any_pipeline` shows that any choice ends."""

from bayplan.data.actions import Action
from bayplan.planning.pipelines.loosening import loosen
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.simulating.checking import check_actions


def loosened(pipeline, rank, name="1f1b", *, lags=(0, 0), **more):
    """By action, what it waits for; and the whole."""
    lists = schedule(pipeline, name, **more)
    proof = check_actions(pipeline, lists, has_tags=True)
    own = lists[rank]
    loose = loosen(pipeline, rank, own, in_flight=proof.in_flight[rank], lags=lags)
    texts = [str(action) for action in own]
    needs = {
        text: {texts[at] for at in found} for text, found in zip(texts, loose.needs, strict=True)
    }
    return needs, loose, own


def test_a_forward_waits_for_room_and_nothing_that_comes_in_between(make_pipeline):
    pipeline = make_pipeline([[0], [1]], micro_batches=4)
    needs, _, own = loosened(pipeline, 0, depth=2)
    listed = [str(action) for action in own if str(action)[1] in "FB"]
    assert listed == ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"]
    assert needs["0F2"] == {"0F1"}
    assert needs["0F3"] == {"0F2", "0B0"}  # three are in flight at most
    assert needs["0B1"] == {"0F1", "0RECV_B1", "0B0"}
    assert needs["0RECV_B1"] == {"0F1", "0B0"}  # as its taker
    assert needs["0SEND_F1"] == {"0F1"}


def test_all_forwards_may_be_overtaken_where_all_are_in_flight(make_pipeline):
    pipeline = make_pipeline([[0], [1]], micro_batches=3)
    needs, loose, own = loosened(pipeline, 1, "gpipe")
    assert needs["1B0"] == {"1F0"}
    assert needs["1F2"] == {"1F1", "1RECV_F2"}
    receive = own.index(Action.parse("1RECV_F2"))
    assert loose.takers[receive] == own.index(Action.parse("1F2"))


def test_a_gradient_that_comes_back_tells_that_the_value_was_received(make_pipeline):
    pipeline = make_pipeline([[0], [1, 2]], micro_batches=2)
    _, loose, own = loosened(pipeline, 0)
    assert loose.retire[own.index(Action.parse("0RECV_B1"))] == (
        own.index(Action.parse("0SEND_F1")),
    )
    one_way = make_pipeline([[0], [1]], micro_batches=2, gradient_links=())
    _, loose, _ = loosened(one_way, 0)
    assert not any(loose.retire)


def test_reduces_keep_their_order_and_updates_come_last(make_pipeline):
    pipeline = make_pipeline([[0, 1]], micro_batches=2, buckets=((0, 1, 2),))
    needs, _, own = loosened(pipeline, 0, lags=(0,))
    assert needs["0REDUCE1"] == {"0B0", "0B1", "0REDUCE0"}
    assert needs["0U0"] == {str(action) for action in own} - {"0U0"}


def test_a_backward_that_lags_is_of_an_older_batch_and_waits_for_no_forward(make_pipeline):
    pipeline = make_pipeline([[0], [1]], micro_batches=1)
    needs, _, _ = loosened(pipeline, 0, "one-by-one", lags=(1, 0))
    assert needs["0B0"] == {"0RECV_B0"}
    assert needs["0RECV_B0"] == set()
    needs, _, _ = loosened(pipeline, 1, "one-by-one", lags=(1, 0))
    assert needs["1B0"] == {"1F0"}
