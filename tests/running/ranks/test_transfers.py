"""Transfers between pieces, with a mailbox in place of the network."""

from dataclasses import dataclass, field

import pytest
import torch

from bayplan.running.collectives import transports
from bayplan.running.ranks.transfers import Arrival, Departure, Form, Parcel, Route
from bayplan.tracing.stages.whole import Samples

CPU = torch.device("cpu")
SOURCE = (0, 0)


@dataclass
class Mail:
    """Does when waited for what gloo does when it likes."""

    sent: dict = field(default_factory=dict)
    num_waits: int = 0

    @dataclass
    class Work:
        mail: "Mail"
        action: object

        def wait(self):
            self.mail.num_waits += 1
            self.action()

    def isend(self, message, peer, *, tag):
        self.sent[peer, tag] = message
        return self.Work(self, lambda: None)

    def irecv(self, landing, peer, *, tag):
        def land():
            # Bytes, whatever they are taken for at either end.
            message = self.sent.pop((peer, tag)).contiguous().view(-1).view(torch.uint8)
            landing.view(-1).view(torch.uint8).copy_(message)

        return self.Work(self, land)


@pytest.fixture
def mail(monkeypatch):
    mail = Mail()
    monkeypatch.setattr(transports, "distributed", mail)
    return mail


def rows(name="rows", width=2):
    return Form.of(name, torch.empty(3, width), Samples(0, 1, 1, (0, 1)))


def same_for_all(name="same"):
    return Form.of(name, torch.empty(2), None)


def route(forms, here, there=None, *, tag=0, peer=0, is_shared=False):
    return Route(peer, SOURCE, Parcel(forms, *here), there or here, is_shared, tag=tag)


def test_pieces_of_two_senders_make_one_value(mail):
    value = torch.arange(10.0).view(5, 2)
    for tag, (begin, end) in enumerate([(0, 2), (2, 5)]):
        departure = Departure((route((rows(),), (0, end - begin), tag=tag),))
        departure.send({"rows": value[begin:end]})
    arrival = Arrival(
        (rows(),), 5, (route((rows(),), (0, 2)), route((rows(),), (2, 5), tag=1)), (), CPU
    )
    arrival.post()
    arrival.wait()
    assert torch.equal(arrival.take({})["rows"], value)
    assert arrival.take.__self__._values == {}  # nothing is kept


def test_a_sent_message_is_kept_until_it_was_received(mail):
    departure = Departure((route((rows(),), (0, 2)),))
    departure.send({"rows": torch.ones(2, 2)})
    assert len(departure._sent) == 1
    departure.wait()
    assert not departure._sent
    departure.wait()
    assert mail.num_waits == 1


def test_waiting_for_what_one_batch_sent_leaves_that_of_later_ones_on_its_way(mail):
    """With stale weights, waiting for the oldest message waited for the newest: nothing overlapped,
    and memory was another than planned.
    """
    departure = Departure((route((rows(),), (0, 2)),))
    first, second = ({"rows": torch.full((2, 2), float(number))} for number in (1, 2))
    departure.send(first)
    departure.send(second)
    departure.wait()
    assert mail.num_waits == 1
    (kept,) = departure.held()
    assert torch.equal(kept, second["rows"])


def test_the_whole_of_a_rank_s_own_value_is_handed_over_without_a_copy():
    value = torch.ones(3, 2)
    arrival = Arrival((rows(),), 3, (), (route((rows(),), (0, 3)),), CPU)
    assert arrival.sources == (SOURCE,)
    assert arrival.take({SOURCE: {"rows": value}})["rows"].data_ptr() == value.data_ptr()


def test_a_part_of_a_rank_s_own_value_is_handed_over_without_a_copy():
    value = torch.arange(10.0).view(5, 2)
    arrival = Arrival((rows(),), 3, (), (route((rows(),), (0, 3), (2, 5)),), CPU)
    taken = arrival.take({SOURCE: {"rows": value}})["rows"]
    assert torch.equal(taken, value[2:5])
    assert taken.data_ptr() == value[2].data_ptr()


def test_a_shared_gradient_is_copied_for_it_may_be_overwritten():
    value = torch.ones(3, 2)
    local = route((rows(),), (0, 3), is_shared=True)
    taken = Arrival((rows(),), 3, (), (local,), CPU).take({SOURCE: {"rows": value}})["rows"]
    taken.zero_()
    assert value.sum() == 6


def test_own_samples_and_those_of_others_make_one_value(mail):
    forms = (rows("a"), rows("b", width=3))
    others = {"a": torch.full((2, 2), 7.0), "b": torch.full((2, 3), 8.0)}
    Departure((route(forms, (0, 2), tag=3),)).send(others)
    own = {"a": torch.ones(1, 2), "b": torch.ones(1, 3)}
    arrival = Arrival(
        forms, 3, (route(forms, (1, 3), tag=3),), (route(forms, (0, 1), (0, 1)),), CPU
    )
    arrival.post()
    arrival.wait()
    taken = arrival.take({SOURCE: own})
    assert torch.equal(taken["a"], torch.cat([own["a"], others["a"]]))
    assert torch.equal(taken["b"], torch.cat([own["b"], others["b"]]))


def test_gradients_of_what_is_the_same_for_all_samples_are_added_up(mail):
    forms = (same_for_all(),)
    Departure((route(forms, (0, 2), tag=1),)).send({"same": torch.tensor([1.0, 2.0])})
    arrival = Arrival(
        forms, 4, (route(forms, (2, 4), tag=1),), (route(forms, (0, 2)),), CPU, is_sum=True
    )
    arrival.post()
    arrival.wait()
    taken = arrival.take({SOURCE: {"same": torch.tensor([10.0, 20.0])}})
    assert taken["same"].tolist() == [11.0, 22.0]


def test_gradients_whose_parts_all_went_elsewhere_are_zero():
    arrival = Arrival((same_for_all(),), 2, (), (), CPU, is_sum=True)
    assert arrival.take({})["same"].tolist() == [0.0, 0.0]
    assert arrival.take({})["same"].tolist() == [0.0, 0.0]


def test_spread_samples_are_handed_over_as_values():
    form = Form.of("spread", torch.empty(3 * 4, 5), Samples(0, 3, 1, (0, 1)))
    value = torch.arange(3 * 4 * 5.0).view(12, 5)
    local = route((form,), (0, 2), (1, 3))
    taken = Arrival((form,), 2, (), (local,), CPU).take({SOURCE: {"spread": value}})["spread"]
    assert torch.equal(taken, value.view(3, 4, 5)[:, 1:3].reshape(6, 5))


def test_what_repeats_itself_arrives_as_it_was_from_others_and_from_the_rank_itself(mail):
    value = torch.arange(10.0).view(5, 2, 1).expand(5, 2, 3)
    form = Form.of("repeated", value, Samples(0, 1, 1, (0, 1, 2)))
    Departure((route((form,), (0, 2), tag=1),)).send({"repeated": value[:2]})
    local = (route((form,), (2, 5), (0, 3)),)
    arrival = Arrival((form,), 5, (route((form,), (0, 2), tag=1),), local, CPU)
    arrival.post()
    arrival.wait()
    taken = arrival.take({SOURCE: {"repeated": value[2:]}})["repeated"]
    assert torch.equal(taken, value)
    assert taken.stride() == value.stride()
    whole = Arrival((form,), 5, (), (route((form,), (0, 5)),), CPU)
    taken = whole.take({SOURCE: {"repeated": value}})["repeated"]
    assert taken.data_ptr() == value.data_ptr()
    assert taken.stride() == value.stride()


def test_an_arrival_serves_step_after_step(mail):
    arrival = Arrival((rows(),), 2, (route((rows(),), (0, 2)),), (), CPU)
    for number in (1.0, 2.0):
        Departure((route((rows(),), (0, 2)),)).send({"rows": torch.full((2, 2), number)})
        arrival.post()
        arrival.wait()
        assert torch.equal(arrival.take({})["rows"], torch.full((2, 2), number))
