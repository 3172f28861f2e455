import pytest

from bayplan.running.ranks.judging import Entry, Failure, Judge


def judge_of(rank=0, world_size=3, **limits):
    limits = {"silence_seconds": 8.0, "longest_round_seconds": 2.0, "patience": 1.0} | limits
    return Judge(rank=rank, world_size=world_size, **limits)


def entry(beat, doing="step 1, 0F0", **fields):
    place = {"process": 7, "host": "here", "place": "another machine"}
    return Entry(beat=beat, doing=doing, **place | fields)


def hear_rounds(judge, num_rounds, *, silent=(), first_beat=1, elapsed_seconds=1.0, **fields):
    """Rounds in which every rank beats but the silent ones, which beat in the first only."""
    for beat in range(first_beat, first_beat + num_rounds):
        ranks = {rank: first_beat if rank in silent else beat for rank in range(3)}
        entries = {rank: entry(own, doing=f"stage {rank}", **fields) for rank, own in ranks.items()}
        judge.hear(entries, elapsed_seconds=elapsed_seconds)


def test_ranks_that_beat_are_left_alone():
    judge = judge_of()
    hear_rounds(judge, 100)
    assert judge.verdict() is None


def test_a_heartbeat_that_stands_still_is_named_with_its_last_action_and_both_numbers():
    judge = judge_of()
    hear_rounds(judge, 9, silent=(1,))
    verdict = judge.verdict()
    assert (verdict.rank, verdict.exit_code, verdict.speaker) == (1, 1, 0)
    assert "rank 1 (pid 7 on here) fell silent: no heartbeat for 8.0 s, limit 8.0 s" in verdict.text
    assert "last action [stage 1]" in verdict.text


def test_a_silence_below_the_limit_is_no_failure():
    judge = judge_of()
    hear_rounds(judge, 8, silent=(1,))
    assert judge.verdict() is None


def test_a_rank_that_never_spoke_is_named():
    judge = judge_of(world_size=2)
    for beat in range(9):
        judge.hear({0: entry(beat)}, elapsed_seconds=1.0)
    assert "rank 1 fell silent" in judge.verdict().text
    assert "never opened its watch" in judge.verdict().text


def test_a_pause_of_the_whole_job_accuses_nobody():
    judge = judge_of()
    hear_rounds(judge, 5)
    hear_rounds(judge, 1, first_beat=5, elapsed_seconds=3600.0)
    assert judge.verdict() is None


def test_the_silence_of_a_rank_that_ended_well_is_no_failure():
    judge = judge_of(world_size=2)
    for beat in range(20):
        judge.hear({0: entry(beat), 1: entry(1, is_done=True)}, elapsed_seconds=1.0)
    assert judge.verdict() is None


def test_a_failure_goes_before_a_silence_and_brings_its_exit_code():
    judge = judge_of()
    hear_rounds(judge, 20, silent=(1,))
    failure = Failure(text="DoesNotFit: needs 9 GiB, limit 8 GiB", exit_code=3)
    judge.hear({2: entry(50, doing="2B1", failure=failure)}, elapsed_seconds=1.0)
    verdict = judge.verdict()
    assert (verdict.rank, verdict.exit_code) == (2, 3)
    assert verdict.text.endswith("failed at [2B1]: DoesNotFit: needs 9 GiB, limit 8 GiB")


def test_a_missing_pulse_is_named_without_waiting_for_the_beats():
    judge = judge_of(rank=0)
    entries = {rank: entry(1, doing=f"{rank}F0") for rank in range(3)}
    judge.hear(entries, elapsed_seconds=0.1, missed=frozenset([2]), felt=frozenset([1]))
    verdict = judge.verdict()
    assert (verdict.rank, verdict.exit_code, verdict.speaker) == (2, 1, 0)
    assert "rank 2 (pid 7 on here) fell silent: no heartbeat for 8.0 s, limit 8.0 s" in verdict.text


def test_a_pulse_that_is_felt_excuses_a_beat_that_stands_still_for_a_minute():
    judge = judge_of(world_size=2)
    for beat in range(59):
        entries = {0: entry(beat), 1: entry(1)}
        judge.hear(entries, elapsed_seconds=1.0, felt=frozenset([1]))
        assert judge.verdict() is None
        assert judge.num_to_leave == 2
    for beat in range(59, 62):
        judge.hear({0: entry(beat), 1: entry(1)}, elapsed_seconds=1.0, felt=frozenset([1]))
    assert "its process lives, so something in it holds" in judge.verdict().text


def test_a_beat_may_stand_still_for_longer_than_a_pulse_may_be_missing():
    judge = judge_of(world_size=2, patience=3.0)
    for beat in range(24):
        judge.hear({0: entry(beat), 1: entry(1)}, elapsed_seconds=1.0)
        assert judge.verdict() is None
    judge.hear({0: entry(24), 1: entry(1)}, elapsed_seconds=1.0)
    assert "no heartbeat for 24.0 s, limit 24.0 s" in judge.verdict().text


def test_a_process_that_is_gone_is_named_without_waiting_for_its_silence():
    judge = judge_of(rank=0)
    entries = {rank: entry(1, doing=f"{rank}F0") for rank in range(3)}
    judge.hear(entries, elapsed_seconds=0.1)
    assert judge.verdict() is None
    judge.hear(entries, elapsed_seconds=0.1, gone=frozenset([1]))
    verdict = judge.verdict()
    assert (verdict.rank, verdict.exit_code, verdict.speaker) == (1, 1, 0)
    assert "rank 1 (pid 7 on here) died, last action [1F0]" in verdict.text


@pytest.mark.parametrize("fields", [{"is_done": True}, {"is_terminated": True}])
def test_a_process_that_is_gone_with_a_word_or_by_a_signal_is_no_failure(fields):
    judge = judge_of(world_size=2)
    entries = {0: entry(1), 1: entry(1, **fields)}
    judge.hear(entries, elapsed_seconds=0.1, gone=frozenset([1]))
    assert judge.verdict() is None


def test_a_rank_that_is_gone_is_not_the_one_to_speak():
    judge = judge_of(rank=2)
    judge.hear({rank: entry(1) for rank in range(3)}, elapsed_seconds=0.1, gone=frozenset([0, 1]))
    assert judge.verdict().speaker == 2


@pytest.mark.parametrize(("silent", "speaker"), [((1,), 0), ((0,), 1), ((0, 1), 2)])
def test_the_lowest_living_rank_speaks(silent, speaker):
    judge = judge_of(rank=2)
    hear_rounds(judge, 12, silent=silent)
    assert judge.verdict().speaker == speaker


def test_a_rank_that_failed_is_not_the_one_to_speak():
    judge = judge_of(rank=0)
    entries = {rank: entry(1) for rank in range(3)}
    entries[0] = entry(1, failure=Failure(text="ValueError", exit_code=1))
    judge.hear(entries, elapsed_seconds=1.0)
    assert judge.verdict().speaker == 1


def test_a_lost_store_is_its_hosts_fault():
    judge = judge_of(rank=2)
    hear_rounds(judge, 3)
    verdict = judge.host_gone(0, "Connection reset by peer")
    assert (verdict.rank, verdict.speaker) == (0, 1)
    assert "rank 0 (pid 7 on here), the host of the store, is gone" in verdict.text
    assert "last action [stage 0]" in verdict.text


def test_a_store_that_goes_with_a_host_that_is_done_is_no_failure():
    judge = judge_of(rank=1, world_size=2)
    judge.hear({0: entry(1, is_done=True), 1: entry(1)}, elapsed_seconds=1.0)
    assert judge.host_gone(0, "Connection reset by peer") is None


def test_a_store_outside_the_ranks_blames_no_other_rank():
    judge = judge_of(rank=1, world_size=2)
    assert "kept outside the ranks" in judge.host_gone(None, "Connection reset by peer").text


def test_of_a_lost_store_outside_the_ranks_one_rank_speaks():
    # Each rank blamed itself and left the word to another, so the run ended without any.
    entries = {rank: entry(1) for rank in range(3)}
    speakers = set()
    for rank in range(3):
        judge = judge_of(rank=rank)
        judge.hear(entries, elapsed_seconds=0.1)
        speakers.add(judge.host_gone(None, "Connection reset by peer").speaker)
    assert speakers == {0}


def test_a_signal_to_all_ranks_is_no_ranks_fault():
    judge = judge_of(world_size=2)
    judge.hear({0: entry(1, is_terminated=True), 1: entry(1)}, elapsed_seconds=1.0)
    assert not judge.is_all_ending
    judge.hear({1: entry(2, is_terminated=True)}, elapsed_seconds=1.0)
    assert judge.is_all_ending


def test_a_rank_that_has_not_spoken_yet_is_waited_for_until_it_is_overdue():
    judge = judge_of(world_size=2)
    judge.hear({0: entry(1, is_done=True)}, elapsed_seconds=0.0)
    assert judge.num_to_leave == 2
    for beat in range(2, 5):
        judge.hear({0: entry(beat, is_done=True)}, elapsed_seconds=1.0)
    assert judge.num_to_leave == 1


def test_a_batch_of_another_form_is_blamed_at_the_same_number_only():
    judge = judge_of()
    first, second = entry(1, batch=(4, "8x3 float32")), entry(1, batch=(3, "4x3 float32"))
    judge.hear({0: first, 1: second}, elapsed_seconds=0.1)
    assert judge.verdict() is None  # a last batch may be smaller, and ranks are not in step
    judge.hear({0: first, 1: entry(2, batch=(4, "4x3 float32"))}, elapsed_seconds=0.1)
    verdict = judge.verdict()
    assert (verdict.rank, verdict.exit_code) == (1, 2)
    assert "its batch 4 is 4x3 float32, there it is 8x3 float32" in verdict.text
