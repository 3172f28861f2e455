"""Allocator traces are read with every fault named, and replayed to the GPU's own segments."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from gpu_truth import lm_tables, trace_steps
from gpu_truth.devices import device_of
from gpu_truth.image_models import image_rows
from gpu_truth.language_models import language_model
from gpu_truth.lm_tables import read_table
from gpu_truth.loops import Loop, at_batch, peaks, record
from gpu_truth.main import BESIDE_REPOSITORY, EXAMPLE
from gpu_truth.replaying import found, replay
from gpu_truth.trace_steps import loop_of
from gpu_truth.traces import read_trace, trace_from

from bayplan.data.errors import FileFault, UsageError

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


def test_a_recording_is_scaled_to_another_batch():
    loop = Loop(loss="cross_entropy", has_backward=True, num_warmups=0)
    scaled = peaks(at_batch(record(small_model(64), loop), 64, 96)).requested_bytes
    assert scaled == pytest.approx(peaks(record(small_model(96), loop)).requested_bytes, rel=0.02)


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
