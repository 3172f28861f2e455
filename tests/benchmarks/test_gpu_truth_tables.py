"""Rows of published tables are rebuilt from their own fields, or listed with a reason."""

import json

import pytest
from gpu_truth import lm_tables

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
    ],
)
def test_a_row_that_cannot_be_rebuilt_is_listed_with_its_reason(tmp_path, change, reason):
    row = bert_row(change.pop("quantity", AFTER), 1, **change)
    done = found_in(tmp_path, "huggingface_docs.json", [CONTEXT, row])
    assert not done.rows
    assert reason in "".join(done.claims["not_rebuilt"])
