"""Rows of published tables are rebuilt from their own fields, or listed with a reason."""

import json

import pytest
import torch
from gpu_truth import lm_tables, mmseg_tables
from gpu_truth.device_fit import Constants, Costs, TimedRow, fitted_to, left_out
from gpu_truth.segmentation import Segmenter, SegmenterKind

MIB = 1 << 20


def found_in(tmp_path, name, rows):
    """What the benchmark makes of a table of these rows."""
    folder = tmp_path / "tables"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"rows": rows}))
    return lm_tables.found(tmp_path, is_quick=False, on_progress=str)


def bert_row(quantity, value, **others):
    config = {"model": "BERT", "hidden": 64, "layers": 2, "heads": 4, "intermediate": 128}
    config |= {"vocab": 100, "num_labels": 2} | others.pop("config", {})
    row = {"source": "made up", "model": "bert", "config": config, "batch_per_gpu": 2}
    row |= {"sequence": 512, "dtype": "float32", "optimizer": "AdamW (transformers)"}
    row |= {"device": "Tesla V100-SXM2 16 GB", "n_gpus": 1, "unit": "MiB"}
    return row | {"quantity": quantity, "value": value} | others


CONTEXT = bert_row("device memory used (NVML): after a 1x1 tensor (CUDA context)", 1002)
AFTER = "device memory used (NVML) after training"


def test_device_memory_is_the_sources_own_context_and_what_is_reserved(tmp_path):
    rows = [CONTEXT, bert_row("device memory used (NVML): after loading the model", 1002)]
    done = found_in(tmp_path, "huggingface_docs.json", [*rows, bert_row(AFTER, 1100)])
    loaded, trained = done.rows
    assert loaded.predicted == 1002 * MIB  # a model of 0.3 MB takes one segment of 2 MiB
    assert 1020 * MIB < trained.predicted < 1200 * MIB
    assert "the context alone" in "".join(done.claims["not_rebuilt"])


def test_each_optimizer_of_a_table_keeps_its_own_state(tmp_path):
    config = {"hidden": 512, "intermediate": 2048, "layers": 4, "gradient_checkpointing": True}
    rows = [
        bert_row(AFTER, 1, optimizer=optimizer, sequence=8, config=config)
        for optimizer in ("AdamW (transformers)", "bitsandbytes Adam8bit", "Adafactor")
    ]
    done = found_in(tmp_path, "huggingface_docs.json", [CONTEXT, *rows])
    adam, eight_bit, factored = (row.predicted / MIB - 1000 for row in done.rows)
    assert adam - eight_bit > 40  # 12.9 million parameters: 6 bytes less each
    assert factored < eight_bit


def test_throughput_is_told_as_the_seconds_of_a_sample(tmp_path):
    row = bert_row("throughput", 50.0, unit="samples/s", config={"gradient_accumulation": 2})
    (told,) = found_in(tmp_path, "huggingface_docs.json", [row]).rows
    assert told.reported == 0.02
    assert told.predicted > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"optimizer": "Lion"}, "no rules to rebuild the optimizer 'Lion'"),
        ({"dtype": "int4"}, "no rules for the precision 'int4'"),
        ({"quantity": "feelings"}, "no rules for the quantity 'feelings'"),
        ({"n_gpus": 8}, "more than one GPU"),
        ({"config": {"model": "RWKV"}}, "no rules to rebuild 'RWKV'"),
        ({"batch_per_gpu": None}, "int()"),
        ({"config": {"model": "bert", "layers": 10**30}}, "layers is 1000000"),
    ],
)
def test_a_row_that_cannot_be_rebuilt_is_listed_with_its_reason(tmp_path, change, reason):
    row = bert_row(change.pop("quantity", AFTER), 1, **change)
    done = found_in(tmp_path, "huggingface_docs.json", [CONTEXT, row])
    assert not done.rows
    assert reason in "".join(done.claims["not_rebuilt"])


def layers_row(layers, value, **others):
    config = {"hidden": 256, "heads": 4, "vocab": 100, "layers": layers, "strategy": "1_1_8"}
    row = {"source": "made up", "path": "a/b.json", "model": "gpt-tiny"}
    row |= {"config": config | others.pop("config", {}), "batch_per_gpu": 2, "sequence": "512"}
    row |= {"device": "not stated", "n_gpus": 8, "unit": "MiB", "value": value}
    row["quantity"] = "memory_allocated: after forward minus before forward (activations kept)"
    return row | others


def test_a_layer_is_the_difference_of_two_rows_of_one_job(tmp_path):
    rows = [layers_row("1", 10.0), layers_row("3", 40.0), layers_row("2", 1.0, sequence="64")]
    rows = [row | {"batch_per_gpu": 1} for row in rows]
    done = found_in(tmp_path, "galvatron.json", rows)
    (told,) = done.rows
    assert told.reported == 30 * MIB
    # 17 activations of a GPT layer with dropout, and flash attention's sums of each row.
    unit = 512 * 256 * 2
    assert told.predicted == pytest.approx(2 * 17 * unit, rel=0.02)
    assert (
        done.claims["not_rebuilt"][
            "galvatron.json: the fewest layers: what others are compared with"
        ]
        == 2
    )


def test_a_checkpointed_layer_keeps_its_input_and_its_mask(tmp_path):
    config = {"activation_checkpointing": True}
    rows = [
        layers_row(layers, 1.0 + int(layers), model="bert-tiny", config=config) for layers in "12"
    ]
    (told,) = found_in(tmp_path, "galvatron.json", rows).rows
    assert told.predicted == 512 * 2 * 256 * 2 + 2 * 512 * 512


def test_states_of_a_layer_are_sharded_over_all_ranks(tmp_path):
    quantity = "memory_allocated after backward (model states of this rank: sharded by ZeRO-3)"
    rows = [
        layers_row(layers, int(layers[-1]), model="t5-tiny", quantity=quantity, config=config)
        for layers in ("1,1", "1,2")
        for config in [{"d_model": 256, "d_ff": 1024, "d_kv": 64}]
    ]
    (told,) = found_in(tmp_path, "galvatron.json", rows).rows
    assert told.predicted == pytest.approx(16 * (8 + 8) * 256 * 256 / 8, rel=0.01)


STATES = "memory_allocated after backward (model states of this rank: sharded by ZeRO-3)"


def test_states_that_the_same_file_has_more_and_less_of_are_explained(tmp_path):
    """The same layer of 12.6 MB as bert-large's, whose states no length changes."""
    rows = []
    for length, added in (("64", 14.0), ("128", 30.0), ("256", 31.0)):
        for layers, value in (("1", 100.0), ("2", 100.0 + added)):
            config = {"hidden": 1024, "heads": 16}
            rows.append(layers_row(layers, value, quantity=STATES, sequence=length, config=config))
    low, high, higher = found_in(tmp_path, "galvatron.json", rows).rows
    assert low.predicted == pytest.approx(24 * MIB, rel=0.01)
    assert low.explained == high.explained == higher.explained
    assert "14.0 to 31.0 MiB" in low.explained
    (alone,) = found_in(tmp_path, "galvatron.json", rows[2:4]).rows
    assert not alone.explained
    assert "6.0 MiB" in alone.seen


def test_layers_are_those_of_the_code_that_was_profiled(tmp_path):
    """Rows of one file are of two programs: Megatron's norm is spelled out in float32."""
    path, unit = "galvatron/models/llama_hf/configs/x.json", 2 * 512 * 256 * 2
    rows = [
        layers_row(layers, float(layers), model="llama-tiny", path=path, config=config)
        for strategy in ("1_1_8", "1_1_8_sp")
        for is_kept in (True, False)
        for config in [{"strategy": strategy, "activation_checkpointing": not is_kept}]
        for layers in "12"
    ]
    fused, given, spelled, masked = found_in(tmp_path, "galvatron.json", rows).rows
    assert spelled.predicted == fused.predicted + 4 * unit
    assert masked.predicted == given.predicted + 2 * 512 * 512


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "swin-huge"}, "no rules to rebuild the layers of 'swin-huge'"),
        ({"quantity": "step_time: forward"}, "the GPU is not told"),
        ({"quantity": "peak memory_allocated minus memory after backward"}, "gathered weights"),
        ({"config": {"layers": "all"}}, "invalid literal"),
        ({"unit": "acres"}, "no unit 'acres'"),
    ],
)
def test_a_layer_that_cannot_be_rebuilt_is_listed_with_its_reason(tmp_path, change, reason):
    rows = [layers_row("1", 1.0, **change), layers_row("2", 2.0, **change)]
    done = found_in(tmp_path, "galvatron.json", rows)
    assert not done.rows
    assert reason in "".join(done.claims["not_rebuilt"])


def course_row(quantity, value, **others):
    config = {"model": "plain attention (einsum), no mask stated", "heads": 1, "d_k": 64}
    row = {"source": "made up", "repo": "a/b", "path": "c", "model": "attention d64"}
    row |= {"config": config, "batch_per_gpu": 8, "sequence": 1024, "dtype": "float32"}
    row |= {"device": "NVIDIA A10 24 GB", "n_gpus": 1, "unit": "MiB"}
    return row | {"quantity": quantity, "value": value} | others


def language_row(quantity, value, **others):
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 100}
    row = course_row(quantity, value, unit="ms", sequence=64, **others)
    return row | {"model": "tiny", "config": {"model": "cs336-staff-26", **sizes}}


def test_attention_keeps_its_exponentials_and_its_weights(tmp_path):
    rows = [
        course_row("memory_allocated after forward with grad recording", 1.0),
        course_row("saved for backward (difference to no_grad)", 1.0),
    ]
    after, saved = found_in(tmp_path, "cs336_lm.json", rows).rows
    scores, vectors, workspaces = 8 * 1024 * 1024 * 4, 8 * 1024 * 64 * 4, 2 * 8_519_680
    assert saved.predicted == pytest.approx(2 * scores, rel=0.01)
    assert after.predicted == pytest.approx(
        2 * scores + 7 * vectors + 1024 * 1024 + workspaces, rel=0.01
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sequence": -4}, "negative dimension"),
        ({"sequence": 10**12}, "overflowed"),
        ({"value": "NaN"}, "no finite number"),
        ({"value": None}, "NoneType"),
        ({"config": []}, "list"),
    ],
)
def test_a_row_that_makes_no_sense_is_listed_and_the_others_count(tmp_path, change, reason):
    sound = course_row("memory_allocated after forward with grad recording", 1.0)
    done = found_in(tmp_path, "cs336_lm.json", [sound | change, sound])
    assert len(done.rows) == 1
    assert reason in "".join(done.claims["not_rebuilt"])


def test_rows_of_one_iteration_share_its_capture(tmp_path):
    rows = [
        language_row(quantity, 1.0, optimizer="torch.optim.AdamW")
        for quantity in (
            "step_time: forward with grad recording",
            "step_time: backward",
            "step_time: optimizer step",
            "step_time: forward + F.cross_entropy + backward + AdamW step",
        )
    ]
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "cs336_lm.json").write_text(json.dumps({"rows": rows}))
    told = []
    done = lm_tables.found(tmp_path, is_quick=False, on_progress=told.append)
    assert len([line for line in told if "times" in line]) == 1
    forward, backward, update, whole = (row.costs.seconds for row in done.rows)
    assert 0 < update < backward
    assert forward + backward + update < whole < 1.2 * (forward + backward + update)


@pytest.mark.parametrize(
    ("device", "notes", "fits"),
    [
        ("NVIDIA A10 24 GB", "", 1.0),
        ("NVIDIA A10 24 GB (0.45 GiB usable)", "", 0.0),
        ("NVIDIA A10 24 GB", "Process 12 has 22.0 GiB memory in use.", 0.0),
    ],
)
def test_a_step_fits_beside_what_else_is_on_the_card(tmp_path, device, notes, fits):
    row = language_row("fits: train_step", False, device=device, notes=notes, optimizer="own AdamW")
    done = found_in(tmp_path, "cs336_lm.json", [row])
    assert [told.predicted for told in done.rows] == [fits]
    assert done.claims["fits_right"] == (fits == 0.0)


def test_layers_that_are_alike_are_captured_twice_and_counted(tmp_path):
    quantity = "step_time: forward + F.cross_entropy + backward"
    rows = [language_row(quantity, 1.0) for _ in range(3)]
    for row, number in zip(rows, (3, 5, 7), strict=True):
        row["config"] |= {"num_layers": number}
    three, five, seven = (row.costs for row in found_in(tmp_path, "cs336_lm.json", rows).rows)
    assert five.seconds - three.seconds == pytest.approx(seven.seconds - five.seconds)
    assert five.num_operators - three.num_operators == seven.num_operators - five.num_operators > 0


def timed_rows(constants, *, model, explained=""):
    costs = [Costs(0.010, 0.001, 50), Costs(0.001, 0.009, 70), Costs(0.0001, 0.0002, 900)]
    return [
        TimedRow(
            source="made up",
            model=model,
            device="NVIDIA A10",
            quantity="step: seconds",
            reported=constants.seconds(cost),
            predicted=cost.seconds,
            explained=explained,
            costs=cost,
        )
        for cost in costs
    ]


def test_constants_of_a_device_are_found_from_its_times():
    truth = Constants(product_scale=1.3, other_scale=0.8, host_seconds=3e-5)
    found = fitted_to(timed_rows(truth, model="a"))
    assert found.host_seconds == pytest.approx(truth.host_seconds, rel=0.05)
    assert found.product_scale == pytest.approx(truth.product_scale, rel=0.05)
    assert found.other_scale == pytest.approx(truth.other_scale, rel=0.05)


def test_a_group_is_predicted_by_constants_that_never_saw_it():
    usual, strange = Constants(), Constants(product_scale=5.0, other_scale=5.0)
    rows = timed_rows(usual, model="a") + timed_rows(strange, model="b")
    told = left_out(rows)
    assert told[0].predicted == pytest.approx(5 * rows[0].predicted, rel=0.1)
    assert told[3].predicted == pytest.approx(rows[3].predicted, rel=0.1)
    alone = left_out(rows, by="source")  # nothing to learn from: as derived
    assert [row.predicted for row in alone] == [row.predicted for row in rows]


def test_a_row_that_something_else_slowed_teaches_nothing():
    slowed = timed_rows(Constants(product_scale=9.0), model="a", explained="another process")
    rows = slowed + timed_rows(Constants(), model="b") + timed_rows(Constants(), model="c")
    told = left_out(rows)
    assert told[3].predicted == pytest.approx(rows[3].predicted, rel=0.1)


def test_a_time_that_is_far_off_tells_what_it_was_predicted_of():
    rows = timed_rows(Constants(), model="a") + timed_rows(Constants(product_scale=5.0), model="b")
    told = left_out(rows)
    far = [abs(row.error_pct) > 35 for row in told]
    assert any(far)
    assert [bool(row.seen) for row in told] == far
    assert "operators" in told[far.index(True)].seen


def segmentation_row(model, **others):
    row = {"source": "made up", "model": model, "config": {"architecture": ["R-18", "PSPNet"]}}
    row |= {"batch_per_gpu": 2, "image": [64, 64], "dtype": "float32", "device": "NVIDIA V100"}
    row |= {"quantity": "peak memory_allocated: full run", "value": 1.0, "unit": "GB"}
    return row | others


def test_a_segmentation_network_is_built_by_the_words_of_its_name():
    kind = mmseg_tables.kind_of(
        segmentation_row("deeplabv3plus_r101b-d16-mg124_4xb2-80k_cityscapes-512x1024")
    )
    assert kind == SegmenterKind(
        head="deeplabv3plus",
        depth=101,
        num_classes=19,
        stride=16,
        has_deep_stem=False,
        multi_grid=True,
    )
    six = mmseg_tables.kind_of(segmentation_row("fcn-d6_r50-d16_4xb2-40k_cityscapes-769x769"))
    assert (six.head, six.head_dilation, six.depth) == ("fcn", 6, 50)


@pytest.mark.parametrize("head", ["fcn", "pspnet", "deeplabv3", "deeplabv3plus", "upernet"])
def test_stages_stride_or_dilate_and_every_head_ends_at_the_classes(head):
    with torch.device("meta"):
        for stride, multi_grid in ((8, False), (16, True), (32, False)):
            kind = SegmenterKind(
                head=head, depth=50, num_classes=7, stride=stride, multi_grid=multi_grid
            )
            model = Segmenter(kind)
            stages = model.backbone(torch.empty(2, 3, 128, 128))
            assert [stage.shape[1] for stage in stages] == [256, 512, 1024, 2048]
            assert stages[-1].shape[2] == 128 // stride
            assert model.classifier(model.head(stages)).shape[1] == 7


def test_the_peak_of_a_segmentation_network_grows_with_its_classes(tmp_path):
    names = [f"pspnet_r18-d8_4xb2-80k_{data}-64x64" for data in ("loveda", "ade20k")]
    rows = [segmentation_row(name, image=[256, 256]) for name in names]
    done = found_in(tmp_path, "mmsegmentation.json", rows)
    few, many = (row.predicted for row in done.rows)
    # Logits and their logarithms of two heads at the size of the labels, at the least.
    assert many - few >= 4 * (150 - 7) * 2 * 256 * 256 * 4


def test_a_peak_that_another_row_of_the_network_contradicts_is_explained(tmp_path):
    names = [f"pspnet_r18-d8_4xb2-{length}k_loveda-64x64" for length in (40, 80)]
    rows = [segmentation_row(name, value=value) for name, value in zip(names, (1, 9), strict=True)]
    short, long = found_in(tmp_path, "mmsegmentation.json", rows).rows
    assert short.predicted == long.predicted
    assert "took 1.0 GB" in long.explained
    (alone,) = found_in(tmp_path, "mmsegmentation.json", rows[1:]).rows
    assert not alone.explained


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "setr_vit-l_mla_8xb1-160k_ade20k-512x512"}, "no rules to rebuild"),
        ({"model": "pspnet_r18-d8_4xb2-80k_moon-64x64"}, "how many classes moon has"),
        ({"dtype": "fp16 AMP"}, "older than autocast"),
        ({"image": None}, "NoneType"),
    ],
)
def test_a_segmentation_row_of_other_words_is_listed(tmp_path, change, reason):
    row = segmentation_row("pspnet_r18-d8_4xb2-80k_loveda-64x64") | change
    done = found_in(tmp_path, "mmsegmentation.json", [row])
    assert not done.rows
    assert reason in "".join(done.claims["not_rebuilt"])


def nvidia_row(model, value, **others):
    heading = "Results / Training performance: NVIDIA DGX-1 (8x V100 32GB)"
    columns = {"Batch size / GPU (FP32 and FP16)": "4096 and 4096", "Sequence length": "128"}
    columns |= {"Accumulation steps (FP32 and FP16)": "1024 and 512"}
    row = {"source": "made up", "path": "a/README.md", "model": model, "dtype": "float32"}
    row |= {"config": {"heading": heading, "columns": columns}, "device": "NVIDIA V100 32GB"}
    row |= {"n_gpus": 1, "quantity": "throughput (all GPUs)", "value": value, "unit": "img/s"}
    return row | others


def test_a_micro_batch_of_pre_training_is_what_an_update_accumulates(tmp_path):
    mixed = nvidia_row("BERT", 200.0, dtype="mixed precision (fp16)")
    done = found_in(tmp_path, "nvidia_deeplearningexamples.json", [nvidia_row("BERT", 50.0), mixed])
    full, half = done.rows
    assert full.reported == pytest.approx(4 / 50)
    assert half.reported == pytest.approx(8 / 200)
    assert full.predicted / 4 > 2 * half.predicted / 8  # a sample's


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "nnUNet"}, "no rules to rebuild 'nnUNet'"),
        ({"model": "GNMT"}, "sentences of varying length"),
        ({"n_gpus": 8}, "more than one GPU"),
        ({"config": {"heading": "Fine-tuning", "columns": {}}}, "fine-tuning"),
        ({"config": {"heading": "", "columns": {"Batch": 8, "Sequence length": "512"}}}, "fine"),
        ({"device": "a card"}, "no device of the catalogue"),
    ],
)
def test_an_example_of_nvidias_that_cannot_be_rebuilt_is_listed(tmp_path, change, reason):
    row = nvidia_row("BERT", 1.0) | change
    done = found_in(tmp_path, "nvidia_deeplearningexamples.json", [row])
    assert not done.rows
    assert reason in "".join(done.claims["not_rebuilt"])
