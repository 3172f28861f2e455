"""Watches of several ranks in one process, on a store in memory; real ones: test_lost_ranks.py."""

import threading
import time

import pytest
import torch.distributed as dist

from bayplan.data.errors import DoesNotFit
from bayplan.running.ranks.failures import REPORT_MARK, ToldFailure, is_symptom
from bayplan.running.ranks.judging import Board, Entry, Verdict
from bayplan.running.ranks.watching import Watch, host_of_store

pytestmark = pytest.mark.alone  # who is too busy to say that it lives counts as lost
SILENCE_SECONDS = 0.8
PATIENCE_SECONDS = 20.0  # far beyond what is needed: a busy machine must not fail a test
CLOSED = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:21890")


class Ends:
    """Collects the exit codes by which watches would have ended their processes."""

    def __init__(self):
        self.codes = {}
        self._changed = threading.Condition()

    def of(self, rank):
        def end(code):
            with self._changed:
                self.codes[rank] = code
                self._changed.notify_all()

        return end

    def wait_for(self, codes):
        with self._changed:
            self._changed.wait_for(lambda: self.codes == codes, PATIENCE_SECONDS)
        assert self.codes == codes


@pytest.fixture
def ends():
    return Ends()


def open_watches(world_size, ends, *, num_open=None, store=None, **options):
    store = store or dist.HashStore()
    options = {"silence_seconds": SILENCE_SECONDS, "host": None} | options
    return [
        Watch(store, rank=rank, world_size=world_size, end=ends.of(rank), **options)
        for rank in range(num_open or world_size)
    ]


def test_telling_what_is_done_is_a_plain_attribute(ends):
    watch = Watch(dist.HashStore(), rank=0, world_size=1)
    watch.doing = "step 1, 0F0"
    assert vars(watch)["doing"] == "step 1, 0F0"


def test_a_rank_alone_needs_no_store_and_passes_errors_on():
    with (
        pytest.raises(ValueError, match="bad"),
        Watch(dist.HashStore(), rank=0, world_size=1),
    ):
        raise ValueError("bad")


def test_an_exception_stops_the_others_and_one_of_them_tells_it(ends, capfd):
    watches = open_watches(3, ends)
    watches[1].doing = "step 12, stage 1, 1B3"
    with pytest.raises(ValueError, match="bad"), watches[1]:
        raise ValueError("bad\nnumber")
    ends.wait_for({0: 1, 2: 1})
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"{REPORT_MARK}rank 1 (pid ")
    assert "failed at [step 12, stage 1, 1B3]: ValueError: bad number" in lines[0]
    assert lines[0].endswith("Read the log of rank 1.")


@pytest.mark.parametrize(
    ("fault", "code"), [(DoesNotFit("needs 9"), 3), (KeyboardInterrupt(), 130), (SystemExit(7), 7)]
)
def test_the_others_take_the_exit_code_of_the_one_that_failed(fault, code, ends):
    watches = open_watches(2, ends)
    with pytest.raises(type(fault)), watches[0]:
        raise fault
    ends.wait_for({1: code})


def test_a_rank_that_never_beats_is_found(ends, capfd):
    open_watches(3, ends, num_open=2)
    ends.wait_for({0: 1, 1: 1})
    assert capfd.readouterr().err.count("rank 2 fell silent") == 1


def test_a_clean_end_is_no_silence(ends, capfd):
    watches = open_watches(2, ends)
    with watches[0]:
        pass
    time.sleep(3 * SILENCE_SECONDS)
    watches[1].close()
    watches[1].close()
    assert ends.codes == {}
    assert capfd.readouterr().err == ""


def test_the_host_stays_until_the_others_are_done(ends):
    # So long that a busy machine makes nobody look silent.
    watches = open_watches(2, ends, host=0, silence_seconds=PATIENCE_SECONDS)
    is_closed = threading.Event()
    closing = threading.Thread(target=lambda: (watches[0].close(), is_closed.set()))
    closing.start()
    assert not is_closed.wait(0.5)
    watches[1].close()
    assert is_closed.wait(PATIENCE_SECONDS)


def test_a_symptom_is_explained_by_the_error_behind_it(ends, capfd):
    watches = open_watches(2, ends)
    with pytest.raises(DoesNotFit), watches[1]:
        raise DoesNotFit("needs 9 GiB, limit 8 GiB")
    with pytest.raises(SystemExit) as ended, watches[0]:
        raise CLOSED
    assert ended.value.code == 3
    assert capfd.readouterr().err.count("DoesNotFit: needs 9 GiB, limit 8 GiB") == 1


def test_a_symptom_is_explained_by_the_silence_behind_it(ends):
    watches = open_watches(2, ends, num_open=1)
    cause = watches[0].explain(CLOSED)
    assert isinstance(cause, ToldFailure)
    assert "rank 1 fell silent" in str(cause)


def test_a_symptom_without_a_cause_is_told_as_it_is(ends):
    watches = open_watches(2, ends, silence_seconds=2 * SILENCE_SECONDS)
    symptom = RuntimeError(str(CLOSED))
    assert watches[0].explain(symptom) is None
    (note,) = symptom.__notes__
    assert "No other rank failed or fell silent within" in note
    assert "look at the network" in note
    for watch in watches:
        watch.close()


class Doing:
    """Has a text only when it is asked for."""

    def __init__(self, text):
        self._text = text

    def __str__(self):
        return self._text


def test_what_is_done_is_put_into_words_by_the_watch(ends, capfd):
    watches = open_watches(2, ends)
    watches[1].doing = Doing("action 42")
    with pytest.raises(ValueError, match="bad"), watches[1]:
        raise ValueError("bad")
    ends.wait_for({0: 1})
    assert "failed at [action 42]" in capfd.readouterr().err


def test_a_text_that_cannot_be_made_does_not_look_like_a_dead_rank(ends):
    watches = open_watches(2, ends)
    for watch in watches:
        watch.doing = Doing(None)
    time.sleep(3 * SILENCE_SECONDS)
    for watch in watches:
        watch.close()
    assert ends.codes == {}


def test_a_second_watch_on_the_same_store_does_not_read_the_first(ends):
    store = dist.HashStore()
    watches = open_watches(2, ends, store=store)
    with pytest.raises(ValueError, match="bad"), watches[1]:
        raise ValueError("bad")
    ends.wait_for({0: 1})
    ends.codes.clear()
    for watch in open_watches(2, ends, store=store):
        watch.close()
    assert ends.codes == {}


def test_an_entry_survives_the_board():
    store = dist.HashStore()
    boards = [Board(store, rank=r, world_size=2, patience_seconds=5.0) for r in range(2)]
    entry = Entry(beat=1, process=7, host="café", doing="0F0")
    assert boards[0].exchange(entry) == ({}, None)
    assert boards[1].exchange(entry) == ({0: entry}, None)
    verdict = Verdict(rank=0, text="", exit_code=1, speaker=1)
    assert boards[1].agree(verdict) == verdict
    assert boards[0].exchange(entry) == ({1: entry}, verdict)


def test_a_silence_of_no_length_is_refused():
    with pytest.raises(ValueError, match="silence_seconds is 0, must be more than 0"):
        Watch(dist.HashStore(), rank=0, world_size=2, silence_seconds=0)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (CLOSED, True),
        (RuntimeError("Timed out waiting 8000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_only_what_another_ranks_end_looks_like_is_a_symptom(fault, expected):
    assert is_symptom(fault) is expected


def test_the_store_of_torchrun_is_hosted_by_no_rank():
    assert host_of_store({"TORCHELASTIC_USE_AGENT_STORE": "True"}) is None
    assert host_of_store({"TORCHELASTIC_USE_AGENT_STORE": "False"}) == 0
    assert host_of_store({}) == 0


def test_the_same_mistake_of_all_ranks_is_told_once_and_keeps_its_kind(ends, capfd):
    watches = open_watches(3, ends)
    caught = []

    def fail(watch):
        try:
            with watch.telling():
                raise DoesNotFit("needs 9")
        except DoesNotFit as fault:
            caught.append(fault)

    threads = [threading.Thread(target=fail, args=(watch,)) for watch in watches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert [(type(one).__name__, one.code, str(one)) for one in caught] == [
        ("ToldDoesNotFit", 3, "needs 9")
    ] * 3
    assert all(isinstance(one, SystemExit) for one in caught)  # quiet where nobody catches it
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("failed at [start]: DoesNotFit: needs 9")
    assert ends.codes == {}


def test_a_rank_alone_tells_of_its_mistake(capfd):
    watch = Watch(dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(DoesNotFit), watch.telling():
        raise DoesNotFit("needs 9")
    assert capfd.readouterr().err == "bayplan: rank 0: needs 9\n"


def test_telling_leaves_the_watch_open_without_an_exception(ends):
    watches = open_watches(2, ends)
    with watches[0].telling():
        pass
    time.sleep(2 * SILENCE_SECONDS)
    assert ends.codes == {}
    for watch in watches:
        watch.close()
