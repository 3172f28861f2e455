"""What a rank says it does."""

import time

import pytest

from bayplan.data.actions import Action
from bayplan.data.record import Lane
from bayplan.running.ranks.journal import Journal, PeakBreakdown


def do(journal, positions):
    journal.began_step()
    for position in positions:
        journal.began(position)
        journal.ended(position)


def journal_of(*texts):
    return Journal([Action.parse(text) for text in texts])


def test_journal_tells_step_stage_and_action():
    journal = journal_of("1RECV_F0", "1F0", "1B0", "1U0")
    do(journal, range(4))
    journal.began_step()
    journal.began(0)
    assert str(journal) == "step 1, stage 1, 1RECV_F0"
    journal.ended(0)
    journal.began(1)
    assert str(journal) == "step 1, stage 1, 1F0"


def test_events_are_those_of_the_last_step_in_order():
    journal = journal_of("0F0", "0SEND_F0", "0RECV_B0", "0B0", "0REDUCE0", "0U0")
    do(journal, range(6))
    do(journal, [0, 1])  # with stale weights, a call may do a part of the list
    events = journal.events()
    assert [event.name for event in events] == ["0F0", "0SEND_F0"]
    assert [event.lane for event in events] == [Lane.COMPUTE, Lane.SEND]
    assert events[0].start_seconds == 0
    assert events[1].start_seconds >= events[0].seconds
    do(journal, range(6))
    assert len(journal.events()) == 6
    assert journal.now == (2, 5)


def test_an_update_is_a_wait_and_then_computes():
    journal = journal_of("0F0", "0U0")
    update = journal.updating(lambda: "done")
    do(journal, [0])
    journal.began(1)
    assert update() == "done"
    journal.ended(1)
    _, wait, compute = journal.events()
    assert (wait.name, wait.lane, compute.name, compute.lane) == (
        *("0U0", Lane.REDUCE),
        *("0U0", Lane.COMPUTE),
    )
    assert compute.start_seconds == pytest.approx(wait.start_seconds + wait.seconds)


def test_a_listener_hears_of_every_action():
    heard = []

    class Listener(PeakBreakdown):
        def __init__(self):
            pass

        def began(self, position):
            heard.append(("began", position))

        def ended(self, position):
            heard.append(("ended", position))

    journal = journal_of("0F0", "0B0")
    journal.listener = Listener()
    do(journal, [0, 1])
    assert heard == [("began", 0), ("ended", 0), ("began", 1), ("ended", 1)]


def test_a_wait_for_a_message_is_part_of_its_receive():
    journal = journal_of("0RECV_F0", "0F0")
    journal.began_step()
    journal.began(0)
    waited = time.perf_counter()
    time.sleep(0.01)
    waited = time.perf_counter() - waited
    for position in (0, 1):
        journal.began(position)
        journal.ended(position)
    assert journal.events()[0].seconds >= waited


def test_a_step_in_another_order_is_one_step():
    journal = journal_of("0RECV_F0", "0F0", "0RECV_B0", "0B0", "0U0")
    do(journal, [2, 3, 0, 1, 4])
    assert journal.now == (0, 4)
    assert [event.name for event in journal.events()] == [
        "0RECV_B0",
        "0B0",
        "0RECV_F0",
        "0F0",
        "0U0",
    ]


def test_journal_without_a_step_has_no_events():
    assert journal_of("0F0").events() == ()
