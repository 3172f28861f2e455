"""transformers' Trainer: the numbers of plain training, its log, and refusals."""

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import bayplan
from bayplan.data.errors import UsageError
from bayplan.integrations.transformers import fit

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
ACCUMULATION = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES))


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def samples(build, number=44):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(number):
        words = torch.randint(SIZES["vocab_size"], (16,), generator=generator)
        labels = words if build is llama else torch.randint(2, (), generator=generator)
        found.append({"input_ids": words, "labels": labels})
    return found


def trainer_of(build, folder, kind=Trainer, **settings):
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 8,  # of 44, so that the last batch of an epoch is smaller
        "num_train_epochs": 1,
        "logging_steps": 1,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **settings,
    }
    data = {"train_dataset": samples(build), "eval_dataset": samples(build, 10)}
    return kind(model=build(), args=TrainingArguments(**arguments), **data)


def told(trainer):
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model.state_dict()


class Weighted(Trainer):
    """Trains with another loss than the model's own."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        output = model(**inputs)
        loss = F.cross_entropy(output.logits, inputs["labels"], weight=torch.tensor([1.0, 3.0]))
        return (loss, output) if return_outputs else loss


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(bert, {}, id="bert"),
        pytest.param(llama, ACCUMULATION, id="llama, accumulation and evaluation"),
        pytest.param(llama, {"bf16": True}, id="llama, bf16"),
        pytest.param(bert, {"label_smoothing_factor": 0.1}, id="bert, label smoothing"),
        pytest.param(bert, {"kind": Weighted}, id="bert, a loss of one's own"),
    ],
)
def test_same_bits(build, settings, tmp_path, assert_bits):
    plain = trainer_of(build, tmp_path, **settings)
    plain.train()
    planned = trainer_of(build, tmp_path, **settings)
    fit(planned, memory="80%", time_limit_seconds=1)
    planned.train()
    assert_bits(told(plain), told(planned))
    assert bayplan.plan_of(planned.model).decisions


def test_predicted_and_measured_are_logged_where_reporters_see_them(tmp_path):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            seen.append(dict(logs))

    trainer = trainer_of(bert, tmp_path, max_steps=4)
    trainer.add_callback(Reporter())
    callback = fit(trainer, memory="100%")
    trainer.train()
    logged = [each for each in seen if "loss" in each]
    assert callback.watch.figures().items() <= logged[-1].items()
    names = {"predicted_peak_bytes", "predicted_seconds", "measured_peak_bytes", "measured_seconds"}
    assert {f"bayplan/{name}" for name in names} <= trainer.state.log_history[3].keys()
    assert not any("bayplan/predicted_seconds" in each for each in seen if "loss" not in each)


def test_checkpoints_are_saved_and_resumed_as_ever(tmp_path, assert_bits):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 3

    found = []
    for memory in (None, "80%"):
        folder = tmp_path / str(memory)
        for resumed in (None, str(folder / "checkpoint-2")):
            trainer = trainer_of(bert, folder, save_strategy="steps", save_steps=2)
            if resumed is None:
                trainer.add_callback(Stop())
            if memory is not None:
                fit(trainer, memory=memory, time_limit_seconds=1)
            trainer.train(resume_from_checkpoint=resumed)
        found.append(told(trainer))
    assert_bits(*found)


def test_a_model_made_anew_is_fitted_anew(tmp_path):
    trainer = trainer_of(bert, tmp_path, max_steps=1)
    trainer.model_init = bert
    fit(trainer, memory="100%", measure=False)
    for _ in range(2):
        trainer.train()
        assert bayplan.plan_of(trainer.model)


def test_second_fit_is_refused(tmp_path):
    trainer = trainer_of(bert, tmp_path)
    fit(trainer, memory="70%")
    with pytest.raises(UsageError, match="is fitted already"):
        fit(trainer, memory="60%")


def test_data_parallel_is_refused(tmp_path):
    trainer = trainer_of(bert, tmp_path)
    trainer.args._n_gpu = 2  # as where two devices are seen
    with pytest.raises(UsageError, match="copy the model to 2 devices"):
        fit(trainer, memory="70%")


def test_torch_compile_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # put back after TrainingArguments' own
    trainer = trainer_of(bert, tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    with pytest.raises(UsageError, match="leave torch_compile"):
        fit(trainer, memory="70%")


def test_accelerate_takes_no_backend_of_ours(tmp_path, monkeypatch):
    # So `torch_compile_backend="bayplan"` cannot work: docs/frameworks.md says so.
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    with pytest.raises(ValueError, match="BAYPLAN"):
        trainer_of(bert, tmp_path, torch_compile_backend="bayplan")


def test_two_calls_in_one_loss_are_refused(tmp_path):
    class Twice(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            return model(**inputs).loss + model(**inputs).loss

    trainer = trainer_of(bert, tmp_path, kind=Twice)
    fit(trainer, memory="70%")
    with pytest.raises(UsageError, match="calls BertForSequenceClassification 2 times"):
        trainer.train()
