"""A walk over a list in the order in which things become ready."""

import threading
from typing import Any

import pytest

from bayplan.running.ranks.picking import Picker

WAIT_SECONDS = 30


class Message:
    """Comes when it is told to."""

    def __init__(self, *, comes=False, fault=None):
        self.is_posted = False
        self._fault, self._here = fault, threading.Event()
        if comes:
            self._here.set()

    def post(self):
        assert not self.is_posted
        self.is_posted = True

    def come(self):
        self._here.set()

    def wait(self):
        assert self._here.wait(WAIT_SECONDS), "the message never came"
        if self._fault is not None:
            raise self._fault


class Waits:
    """Lets messages come once the rank has nothing to do, in a given order."""

    def __init__(self, *messages):
        self.at, self._messages = [], list(messages)

    def began(self, position):
        self.at.append(position)
        if self._messages:
            self._messages.pop(0).come()


# Of two micro-batches: 0 RECV_F0, 1 F0, 2 RECV_B0, 3 B0, 4 RECV_F1, 5 F1, 6 RECV_B1, 7 B1, 8 U.
NEEDS = [(), (0,), (1,), (1, 2), (1,), (1, 4), (3, 5), (3, 5, 6), tuple(range(8))]
TAKERS = {0: 1, 2: 3, 4: 5, 6: 7}


def walk(order_of_coming, *, num_ahead=2, due=range(9)):
    messages = {at: Message() for at in TAKERS}
    receives = [{at: messages[at] for at in own if at in due} for own in ((0, 4), (2, 6))]
    listener = Waits(*(messages[at] for at in order_of_coming))
    picker = Picker(NEEDS, TAKERS, num_ahead)
    return list(picker.walk(due, receives, listener.began)), listener.at


def test_messages_that_come_in_order_leave_the_order():
    assert walk([0, 2, 4, 6]) == (list(range(9)), [0, 2, 4, 6])


def test_a_forward_goes_first_where_its_message_does():
    found, waits = walk([0, 4, 2, 6])
    assert found == [0, 1, 4, 5, 2, 3, 6, 7, 8]
    assert waits == [0, 2, 2, 6]  # for the first of the list that is not done


def test_what_is_not_due_is_not_waited_for():
    # The first batch with stale weights: forwards only, and then no update.
    assert walk([4], due=[4, 5])[0] == [4, 5]
    assert walk([2, 6], due=[2, 3, 6, 7, 8])[0] == [2, 3, 6, 7, 8]


def test_messages_may_come_before_anyone_waits():
    messages = {at: Message(comes=True) for at in TAKERS}
    receives = [{at: messages[at] for at in own} for own in ((0, 4), (2, 6))]
    found = list(Picker(NEEDS, TAKERS, 2).walk(range(9), receives, Waits().began))
    assert sorted(found) == list(range(9))
    where = {position: at for at, position in enumerate(found)}
    assert all(where[one] < where[at] for at, needs in enumerate(NEEDS) for one in needs)
    assert all(where[taker] == where[receive] + 1 for receive, taker in TAKERS.items())


def test_no_more_receives_are_posted_than_said():
    messages = {at: Message(comes=True) for at in range(0, 8, 2)}
    needs = [(), (0,), (), (2,), (), (4,), (), (6,)]
    most = 0
    for _ in Picker(needs, {at: at + 1 for at in messages}, 1).walk(
        range(8), [messages], Waits().began
    ):
        most = max(most, sum(one.is_posted for one in messages.values()))
        if sum(one.is_posted for one in messages.values()) == 1:
            assert not messages[2].is_posted
    assert most == 4


def test_a_picker_walks_again():
    picker = Picker([(), (0,)], {0: 1}, 2)
    for _ in range(3):
        message: Any = Message()
        assert list(picker.walk(range(2), [{0: message}], Waits(message).began)) == [0, 1]


def test_a_message_that_fails_fails_the_rank():
    message: Any = Message(fault=RuntimeError("connection closed by peer"))
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        list(Picker([(), (0,)], {0: 1}, 2).walk(range(2), [{0: message}], Waits(message).began))
