"""Allocator traces are read with every fault named, and replayed to the GPU's own segments."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_truth import images, lm_tables, timing, trace_steps
from gpu_truth.batches import TRACED_BATCH, with_batch
from gpu_truth.brackets import Bracket, needed_bytes, offers
from gpu_truth.brackets import losses as bracket_losses
from gpu_truth.devices import device_of
from gpu_truth.fitting import best, is_fitted, leave_one_out
from gpu_truth.image_models import ImageRow, image_rows
from gpu_truth.kept import Kept
from gpu_truth.language_models import language_model
from gpu_truth.lm_tables import read_table
from gpu_truth.loops import Loop, _replay, peaks, record
from gpu_truth.main import BESIDE_REPOSITORY, EXAMPLE
from gpu_truth.replaying import found, replay
from gpu_truth.timing import RATIOS, SPEEDS, StepTime, seconds_of, step_time
from gpu_truth.trace_steps import loop_of
from gpu_truth.traces import read_trace, trace_from
from harness import finish, options

from bayplan.data.errors import FileFault, UsageError
from bayplan.simulating.allocator import CachingAllocator

MIB = 1 << 20
SHARED = Path(BESIDE_REPOSITORY)
TRACE = EXAMPLE / "traces" / "by_hand.json"
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE = range(5)


def fields():
    return json.loads(TRACE.read_text())


def trace_of(content):
    return trace_from(json.dumps(content).encode(), name="made up")


def is_exact(done):
    return (
        done.worst_error_pct == 0
        and done.predicted_peak_reserved_bytes == done.peak_reserved_bytes
        and done.predicted_peak_allocated_bytes == done.peak_allocated_bytes
        and done.num_elsewhere == done.num_other_segments == 0
    )


def recording(events, *, segments, live=(), streams=(), settings=None):
    """A trace of large segments given as address, size and blocks: address, size, state."""
    table = [
        [
            address,
            size,
            0,
            0,
            0,
            stream,
            "large",
            False,
            [[a, s, s, state] for a, s, state in blocks],
        ]
        for (address, size, blocks), stream in zip(
            segments, streams or [0] * len(segments), strict=True
        )
    ]
    return trace_of(
        fields()
        | {"events": events, "segments": table, "initial_live": live, "replay": {}}
        | ({"allocator_settings": settings} if settings else {})
    )


def test_a_trace_is_replayed_to_its_own_segments():
    trace = read_trace(TRACE)
    done = replay(trace)
    assert is_exact(done)
    assert done.num_allocations == 7
    assert done.predicted_peak_reserved_bytes == trace.peak_reserved_bytes == 38 * MIB
    assert done.predicted_peak_allocated_bytes == trace.peak_allocated_bytes


def test_a_trace_that_breaks_a_rule_is_told():
    content = fields()
    for event in content["events"]:
        if event[0] in (SEGMENT_ALLOC, SEGMENT_FREE) and event[2] == 16 * MIB:
            event[2] = 18 * MIB  # for 15 MiB, which take 16
    done = replay(trace_of(content))
    assert done.worst == (40 * MIB, 38 * MIB)
    assert done.worst_error_pct == pytest.approx(-5.0)


def test_a_recording_that_begins_in_the_middle_starts_with_what_was_there():
    content = fields()
    # Cut before the 16 MiB segment: three blocks are in use, and one of them is not at the end.
    first = next(i for i, event in enumerate(content["events"]) if event[2] == 16 * MIB)
    content["events"] = content["events"][first:]
    content["initial_live"] = [
        [0, 1000, 1024],
        [1024, 512, 512],
        [2 * MIB, 5 * MIB // 2, 3 * MIB],
        [5 * MIB, 4 * MIB, 4 * MIB],
    ]
    trace = trace_of(content)
    assert [segment.size_bytes for segment in trace.start] == [2 * MIB, 20 * MIB]
    assert is_exact(replay(trace))


def test_a_block_is_as_large_as_a_later_allocation_behind_it_shows():
    # The file takes the block at 0 for 2 MiB, but the next one lies at 2.5 MiB.
    trace = recording(
        [
            [ALLOC, 5 * MIB // 2, 3 * MIB, 0, 0, -1, 3 * MIB],
            [FREE_REQUESTED, 0, 2 * MIB, 0, 1],
            [FREE_COMPLETED, 0, 2 * MIB, 0, 2],
        ],
        segments=[
            (
                0,
                20 * MIB,
                [
                    [0, 5 * MIB // 2, 3],
                    [5 * MIB // 2, 3 * MIB, 0],
                    [11 * MIB // 2, 29 * MIB // 2, 3],
                ],
            )
        ],
        live=[[0, 2 * MIB, 2 * MIB]],
    )
    assert trace.grown_bytes == MIB // 2
    assert is_exact(replay(trace))


def test_a_block_that_another_stream_still_uses_is_not_given_away():
    trace = recording(
        [
            [FREE_REQUESTED, 0, 20 * MIB, 0, 0],
            [SEGMENT_ALLOC, 20 * MIB, 20 * MIB, 0, 1, -1],
            [ALLOC, 20 * MIB, 20 * MIB, 0, 2, -1, 20 * MIB],
            [FREE_COMPLETED, 0, 20 * MIB, 0, 3],
            [SEGMENT_ALLOC, 40 * MIB, 20 * MIB, 5, 4, -1],
            [ALLOC, 40 * MIB, 20 * MIB, 5, 5, -1, 20 * MIB],
            [ALLOC, 0, 20 * MIB, 0, 6, -1, 20 * MIB],
        ],
        segments=[(at * MIB, 20 * MIB, [[at * MIB, 20 * MIB, 0]]) for at in (0, 20, 40)],
        streams=[0, 0, 5],
        live=[[0, 20 * MIB, 20 * MIB]],
    )
    assert is_exact(replay(trace))


def test_settings_of_a_trace_are_those_of_its_replay():
    text = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:24"}
    assert trace_of(fields() | {"allocator_settings": text}).settings.max_split_bytes == 24 * MIB
    single = {"max_split_size": 24 * MIB, "expandable_segments": True}
    settings = trace_of(fields() | {"allocator_settings": single}).settings
    assert (settings.max_split_bytes, settings.expandable_segments) == (24 * MIB, True)


def changed(name, place, value):
    content = fields()
    target = content[name]
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    return content


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (fields() | {"format": "cuda-allocator-trace/9"}, "format is"),
        (fields() | {"events": [["alloc"]]}, r"\$\.events\[0\]\[0\]"),
        (fields() | {"segments": [[0]]}, r"\$\.segments\[0\]"),
        (fields() | {"actions": ["alloc", "steal"]}, r"\$\.actions.*steal"),
        (changed("events", (3, 0), 17), r"\$\.events\[3\]"),
        (changed("events", (3, 1), -1), r"\$\.events\[3\]: address -1"),
        (changed("events", (1, 6), 900), r"\$\.events\[1\]: 1000 bytes in a block of 900"),
        (changed("events", (0, 1), 512), r"\$\.events\[0\]: no such segment"),
        (changed("segments", (1, 0), MIB), r"\$\.segments\[1\]\.blocks\[0\]"),
        (changed("segments", (0, 1), 3 * MIB), r"\$\.segments\[0\]: 3145728 bytes"),
        (changed("segments", (0, 6), "medium"), r"\$\.segments\[0\]: pool"),
        (fields() | {"initial_live": [[1 << 40, 512, 512]]}, r"\$\.initial_live.*no segment"),
        (
            fields() | {"events": [], "initial_live": [[0, 900, 512]]},
            r"\$\.initial_live.*900 bytes",
        ),
        (
            fields() | {"events": [], "initial_live": [[0, 512, 1024], [512, 512, 512]]},
            r"\$\.initial_live.*another block",
        ),
        (
            fields() | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "backend:other"}},
            r"\$\.allocator_settings.*not simulated",
        ),
        (fields() | {"allocator_settings": {"max_split_size": "big"}}, r"\$\.allocator_settings"),
    ],
)
def test_every_fault_in_a_trace_is_named_with_its_place(content, fault):
    with pytest.raises(FileFault, match=fault):
        trace_of(content)


def test_a_free_of_what_is_not_there_is_named():
    content = changed("events", (6, 1), 12345)
    with pytest.raises(FileFault, match=r"\$\.events\[6\] frees what is not there"):
        replay(trace_of(content))


def test_an_allocation_inside_a_block_in_use_is_named():
    content = changed("events", (2, 1), 0)
    with pytest.raises(FileFault, match=r"\$\.events\[2\] allocates what is in use"):
        replay(trace_of(content))


def test_files_that_are_no_traces_are_refused(tmp_path):
    whole = gzip.compress(TRACE.read_bytes())
    path = tmp_path / "trace.json.gz"
    for content, fault in (
        (whole[: len(whole) // 2], "cut off or damaged"),
        (whole[:40] + bytes(20) + whole[60:], "damaged|not a gzip"),
        (b"\x80\x04K\x01.", "not a gzip file"),
        (gzip.compress(b"[" * 100_000), "trace.json.gz"),
        (gzip.compress(TRACE.read_bytes()[:500]), "truncated"),
    ):
        path.write_bytes(content)
        with pytest.raises(FileFault, match=fault):
            read_trace(path)
    with pytest.raises(FileFault, match="cannot read"):
        read_trace(tmp_path / "none.json.gz")


def test_a_folder_with_an_unreadable_trace_tells_of_it_and_of_the_others(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "good.json.gz").write_bytes(gzip.compress(TRACE.read_bytes()))
    (folder / "bad.json.gz").write_bytes(b"bad")
    (folder / "index.json").write_text("[]")
    told = found(tmp_path, is_quick=False)
    assert list(told.claims["unreadable"]) == ["bad.json.gz"]
    assert [row.error_pct for row in told.rows] == [0.0] * 3


@pytest.mark.skipif(
    not BESIDE_REPOSITORY.is_dir(), reason="no measurements of GPUs beside the repository"
)
def test_traces_of_real_gpus_are_replayed_to_their_segments():
    told = found(Path(BESIDE_REPOSITORY), is_quick=False)
    assert told.claims["holds"]
    assert told.claims["num_peaks_allocated_exact"] == told.claims["num_traces"] > 0
    assert not told.claims["unreadable"]


def test_words_of_a_trace_become_a_loop():
    loop = loop_of(
        {"grad": True, "optimizer": "torch.optim.AdamW lr=1e-3", "autocast": "bfloat16"},
        "five warm-up full steps, then recorded: zero_grad, forward, F.cross_entropy, backward,"
        " torch.optim.AdamW(lr=1e-3).step()",
    )
    assert loop.has_backward
    assert loop.optimizer is not None
    assert loop.loss == "cross_entropy"
    assert (loop.zero_grad, loop.num_warmups, loop.autocast) == ("before", 1, torch.bfloat16)
    loop = loop_of(
        {"grad": True},
        "five warm-up, empty_cache, then recorded: forward, cross_entropy (decomposed), backward"
        " into existing gradients; no zero_grad; alive until reassigned in the recorded region",
    )
    assert (loop.loss, loop.zero_grad, loop.holds) == ("decomposed", "", True)
    assert loop.empties_cache
    with pytest.raises(UsageError, match="loss is not told"):
        loop_of({}, "recorded: forward and backward")
    with pytest.raises(UsageError, match="optimizer is not told"):
        loop_of({}, "recorded: forward, cross_entropy, backward, optimizer.step()")


@pytest.mark.parametrize("config", [{}, {"model": "cs336-staff-26", "d_model": "many"}])
def test_a_model_that_a_row_does_not_specify_is_refused(config):
    with pytest.raises(UsageError, match=r"no rules|does not say"):
        language_model(config, sequence=8)


def small_model(batch):
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 50}

    def build():
        ids = torch.empty(batch, 16, dtype=torch.int64)
        config = {"model": "cs336-staff-26", **sizes}
        return language_model(config, sequence=16), ids, torch.empty_like(ids)

    return build


def test_a_loop_without_gradients_needs_less_than_a_step():
    forward = peaks(record(small_model(7), Loop(with_grad=False)))
    step = peaks(record(small_model(7), Loop(loss="cross_entropy", has_backward=True)))
    assert forward.requested_bytes < step.requested_bytes <= step.allocated_bytes
    assert step.allocated_bytes <= step.reserved_bytes


def test_products_of_a_hopper_take_a_larger_workspace():
    usual, hopper = (
        peaks(record(small_model(7), Loop(with_grad=False), architecture=architecture))
        for architecture in ("sm_80", "sm_90")
    )
    assert hopper.requested_bytes - usual.requested_bytes == (32 << 20) - 8_519_680


def test_a_gpu_that_nobody_names_is_known_by_its_workspace():
    def trace(*sizes, **fields_of_it):
        events = [[ALLOC, number << 30, size, 0, 0, -1, size] for number, size in enumerate(sizes)]
        segments = [
            (number << 30, size, [[number << 30, size, 0]]) for number, size in enumerate(sizes)
        ]
        return replace(recording(events, segments=segments), **fields_of_it)

    told = trace_steps._architecture
    assert told(trace(32 << 20, device="not stated")) == "sm_90"
    assert told(trace(32 << 20, device="NVIDIA A10 24 GB")) == "sm_86"
    assert told(trace(32 << 20, 8_519_680, device="not stated")) == "sm_80"


def test_a_graph_that_is_dropped_goes_from_its_end():
    forward = record(small_model(7), Loop(num_warmups=0))
    step = record(small_model(7), Loop(loss="cross_entropy", has_backward=True, num_warmups=0))
    assert forward.drops == {len(forward.graph.nodes) - 1}
    assert not step.drops
    freed, allocator = [], CachingAllocator()
    free = allocator.free

    def heard(block):
        freed.append(block.requested_bytes)
        free(block)

    allocator.free = heard
    _replay(forward, allocator, lambda index: None)
    last = [storage for storage in forward.graph.storages if storage.released in forward.drops]
    assert len(last) > 20
    assert freed[-1] == next(storage.size_bytes for storage in last if storage.size_bytes)


@pytest.mark.skipif(
    not (SHARED / "traces").is_dir(), reason="no measurements of GPUs beside the repository"
)
def test_the_step_behind_a_trace_is_predicted(tmp_path):
    (tmp_path / "traces").mkdir()
    name = "niu_lm23m_fwd3_fp32_s200.json.gz"
    (tmp_path / "traces" / name).write_bytes((SHARED / "traces" / name).read_bytes())
    told = trace_steps.found(tmp_path, is_quick=False)
    assert told.claims["allocated_within_target"] == told.claims["num_traces"] == 1
    assert abs(told.claims["reserved_worst_pct"]) < 8


def test_a_run_without_rows_is_a_result(capsys, tmp_path):
    arguments = options("").parse_args([])
    finish(str(tmp_path / "main.py"), {"rows": []}, columns=("source",), arguments=arguments)
    assert capsys.readouterr().out == "source\n"
    assert json.loads((tmp_path / "results" / "latest.json").read_text())["rows"] == []


def test_tables_that_are_none_are_told(tmp_path):
    path = tmp_path / "table.json"
    for content in (b"", b"\x80\x04K\x01.", b'{"rows": 1}', b"[" * 100_000, b'{"rows": [1]}'):
        path.write_bytes(content)
        with pytest.raises(FileFault, match=r"table\.json"):
            read_table(path)


def test_rows_of_tables_that_cannot_be_rebuilt_are_listed(tmp_path):
    (tmp_path / "tables").mkdir()
    rows = [{}, {"quantity": "fits"}, {"quantity": "peak memory_allocated", "dtype": "int3"}]
    (tmp_path / "tables" / "cs336_lm.json").write_text(json.dumps({"rows": rows}))
    told = lm_tables.found(tmp_path, is_quick=False)
    assert not told.rows
    assert sum(told.claims["not_rebuilt"].values()) == len(rows)


@pytest.mark.parametrize(
    "line", ["resnet50,1,2", "resnet50,1,-2,64,224,25.56,resnet,", "a,b,c,d,e,f,g,h"]
)
def test_a_wrong_line_of_image_models_is_named(tmp_path, line):
    path = tmp_path / "train-amp-nchw-rtx3090.csv"
    path.write_text(
        "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count,"
        f"family,next_larger_batch_that_failed\n{line}\n"
    )
    with pytest.raises(FileFault, match="line 2"):
        list(image_rows(path, kind="train"))


def test_devices_are_known_by_the_words_of_a_row():
    assert device_of("NVIDIA RTX PRO 6000 (96 GB)").name == "rtx-pro-6000"
    assert device_of("train-amp-nchw-pt112-cu113-rtx3090").name == "rtx-3090"
    assert device_of("NVIDIA A10 24 GB").name == "a10"
    for text in ("not stated", "abacus"):
        with pytest.raises(UsageError):
            device_of(text)


def test_one_capture_gives_every_batch():
    loop = Loop(loss="cross_entropy", has_backward=True, num_warmups=0)
    device = device_of("rtx 3090")
    scaled = with_batch(record(small_model(TRACED_BATCH), loop), 96)
    captured = record(small_model(96), loop)
    assert peaks(scaled) == peaks(captured)
    assert [n.flops for n in scaled.graph.nodes] == [n.flops for n in captured.graph.nodes]
    assert seconds_of(scaled, device) == seconds_of(captured, device)
    # The constants that are left open are the device's own in the middle of the candidates.
    middle = step_time(captured, device, is_channels_last=False).at(SPEEDS[len(SPEEDS) // 2])
    assert middle == pytest.approx(seconds_of(captured, device))


def test_a_model_that_is_left_out_is_judged_by_the_others_choice():
    losses = {"a": [0.0, 1.0, 2.0], "b": [1.0, 0.5, 2.0], "c": [1.0, 0.4, 2.0]}
    assert best(losses) == 1
    assert leave_one_out(losses) == {"a": 1, "b": 0, "c": 0}
    assert best({"a": [1.0, 0.0, 0.0, 0.0, 1.0]}) == 2


def test_constants_are_found_again_from_seconds_that_they_gave():
    known = SPEEDS[5 * len(SPEEDS) // 9]
    steps = []
    for matrix, copies in ((8.0, 1.0), (1.0, 8.0), (3.0, 3.0)):
        step = StepTime([matrix / ratio + copies for ratio in RATIOS], 0.01)
        steps.append((step, step.at(known)))
    assert SPEEDS[best({"made up": timing.losses(steps)})] == known


def test_what_a_card_offers_lies_inside_the_brackets_that_it_explains():
    device = device_of("rtx 3090")
    tight = [Bracket(64, 96, 20 << 30, 22 << 30), Bracket(8, None, 19 << 30, None)]
    offered = offers(device)[best({"made up": bracket_losses(tight, device)})]
    assert 20 << 30 <= offered < 22 << 30
    assert [bracket.predicted(offered) for bracket in tight] == [64, 8]
    assert tight[0].predicted(22 << 30) == 96
    assert tight[0].predicted(19 << 30) == 63
    assert tight[0].distance_bytes(23 << 30) == 1 << 30


def test_needs_are_looked_for_only_where_they_decide():
    device = device_of("rtx 3090")
    loop = Loop(loss="cross_entropy", has_backward=True, num_warmups=0)
    small = record(small_model(96), loop)
    assert needed_bytes(small, device) == peaks(small).reserved_bytes


def image_row(model="made_up_b", *, version=112, seconds=1.0, batch=64, failed_batch=96):
    return ImageRow(
        file=f"train-amp-nchw-pt{version}-cu113-rtx3090",
        model=model,
        family="made",
        batch=batch,
        image=224,
        seconds=seconds,
        num_parameters=1.0,
        failed_batch=failed_batch,
    )


def made_step(row, *, seconds=1.0, needed=20 << 30, larger=23 << 30):
    time = StepTime([seconds] * len(RATIOS), 0.0)
    return images.Step(row, time, Bracket(row.batch, row.failed_batch, needed, larger))


def test_rows_that_are_off_are_explained_by_the_sources_own_spread_alone():
    slow = made_step(image_row(version=110, seconds=2.5))
    quick = made_step(image_row(version=112, seconds=0.9))
    other = made_step(image_row("another", seconds=2.5))
    rows, claims = images.predicted([slow, quick, other], device_of("rtx 3090"))
    explained, _, unexplained = [row for row in rows if row.quantity.startswith("step")]
    assert "pt112" in explained.explained
    assert (unexplained.explained, unexplained.seen) == ("", "not explained")
    (claim,) = [claims["step_times_off"]]
    assert claim == {"explained": 1, "unexplained": 1}
    assert claims["constants_from_models"] == 0


def test_constants_come_from_one_half_of_the_models_and_are_told_with_leave_one_out():
    names = [f"made_up_{index}" for index in range(40)]
    half = [name for name in names if is_fitted(name)]
    assert 10 < len(half) < 30
    # Those that are predicted take three times as long: no constant may have seen that.
    steps = [made_step(image_row(name, seconds=0.8 if name in half else 3.0)) for name in names]
    rows, claims = images.predicted(steps, device_of("rtx 3090"))
    times = [row for row in rows if row.quantity.startswith("step")]
    assert {row.model for row in times if row.fitted} == set(half)
    assert all(abs(row.error_pct) < 2 for row in times if row.fitted)
    assert all(row.error_pct < -70 for row in times if not row.fitted)
    assert set(claims["leave_one_out"]["median_error_pct_of_model"]) == set(half)
    assert claims["brackets_inside_pct"]["all"] == 100
    assert 20 << 30 <= claims["constants"]["offered_bytes"] < 23 << 30


def test_an_interrupted_run_of_image_models_goes_on_where_it_stopped(tmp_path, monkeypatch):
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "train-amp-nchw-pt112-cu113-rtx3090.csv").write_text(
        "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count,"
        "family,next_larger_batch_that_failed\n"
        "first,1,1,64,224,1,made,96\nsecond,1,1,64,224,1,made,96\n"
    )
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "timm_fault", str)
    monkeypatch.setattr(images, "timm_names", lambda: frozenset(("first", "second")))
    asked = []

    def training(row, batch, *, architecture):
        asked.append(row.model)
        if len(asked) == 2:
            raise KeyboardInterrupt
        loop = Loop(loss="cross_entropy", has_backward=True, num_warmups=0)
        return record(small_model(batch), loop, architecture=architecture)

    monkeypatch.setattr(images, "training", training)
    stopped = images.found(tmp_path, is_quick=False, on_progress=str)
    assert "interrupted" in stopped.claims["not_rebuilt"]["the rest"]
    done = images.found(tmp_path, is_quick=False, on_progress=str)
    assert {row.model for row in done.rows} == {"first", "second"}
    assert len(asked) == 3
    assert [row for row in done.rows if row.model == asked[0]] == stopped.rows
    assert not list((tmp_path / "cache").glob("gpu_truth-*"))  # complete: nothing to go on with


def test_a_line_that_was_cut_off_is_asked_for_again(tmp_path):
    kept = Kept("made-up", tmp_path)
    kept.put("a", [1])
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text() + '\n["b", [')
    kept = Kept("made-up", tmp_path)
    assert (kept.get("a"), kept.get("b")) == ([1], None)
    kept.put("c", 2)
    assert Kept("made-up", tmp_path).get("c") == 2
