"""transformers' Trainer, plain and within a limit: the same losses, in less memory.

    pip install transformers accelerate    # beside bayplan
    python examples/with_transformers.py

The one line of bayplan is `fit(trainer, memory=...)`.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from bayplan.integrations.transformers import fit

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4}


def sentences(number: int) -> list[dict[str, torch.Tensor]]:
    """In the place of a tokenized dataset: bytes that count upwards from a random one."""
    starts = torch.randint(256, (number, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(64)) % 256
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(folder: str, memory: str | None = None) -> list[float]:
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-3,
        eval_strategy="epoch",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **LAYERS))
    data = {"train_dataset": sentences(120), "eval_dataset": sentences(20)}
    trainer = Trainer(model=model, args=arguments, **data)
    if memory is not None:
        fit(trainer, memory=memory)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        plain, planned = train(folder), train(folder, memory="60%")
    print("plain  ", *(f"{loss:.4f}" for loss in plain))
    print("planned", *(f"{loss:.4f}" for loss in planned))
    assert plain == planned, "a plan never changes a loss"
    print("the same losses")
