import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.actions import Action, ActionKind

NUMBERS = st.integers(0, 10**6)
ACTIONS = st.builds(Action, NUMBERS, st.sampled_from(ActionKind), NUMBERS)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, ActionKind.FORWARD, 0)),
        ("0B12", Action(0, ActionKind.BACKWARD, 12)),
        ("0I1", Action(0, ActionKind.BACKWARD_INPUT, 1)),
        ("0W1", Action(0, ActionKind.BACKWARD_WEIGHT, 1)),
        ("1SEND_F3", Action(1, ActionKind.SEND_FORWARD, 3)),
        ("0RECV_B2", Action(0, ActionKind.RECEIVE_BACKWARD, 2)),
        ("10REDUCE3", Action(10, ActionKind.REDUCE, 3)),
        ("1OUT1", Action(1, ActionKind.SWAP_OUT, 1)),
        ("1IN1", Action(1, ActionKind.SWAP_IN, 1)),
    ],
)
def test_an_action_reads_as_it_prints(text, action):
    assert Action.parse(text) == action
    assert str(action) == text


@given(ACTIONS)
def test_every_action_prints_and_reads_back(action):
    assert Action.parse(str(action)) == action


@given(st.from_regex(r"\A\d{1,3}(F|B|I|IN|W|RECV_F|SEND_B|REDUCE|U|OUT)\d{1,3}\Z"))
def test_what_reads_as_an_action_prints_the_same(text):
    with contextlib.suppress(ValueError):
        assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2F", "2f0", "2Z0", "-1F0", "2F0 ", "2F0\n", "2 F 0", "²F0", "٢F0", "02F0", "2F00"],
)
def test_what_is_no_action_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="is not an action; write stage, kind, index, like 2F0"):
        Action.parse(text)


@pytest.mark.parametrize("text", ["2SEND0", "2RECV_0", "2SEND_I0", "2S0", "2A0", "2RED0", "2OU0"])
def test_a_kind_is_written_whole(text):
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


def test_action_kinds_are_all_written_differently():
    assert len({kind.value for kind in ActionKind}) == len(ActionKind) == 13
