"""What does the line of an integration add to a training step?

The same small Llama trains by each framework in three processes: plainly, fitted by hand with
`bayplan.fit`, and fitted by the framework's line. They take turns, a step each, from the end of one
update to the end of the next. Both fits keep everything, so the difference is the integration: its
hooks, its clock and its meter of peaks. One thread, processor time.
"""

import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import bayplan
from bayplan.integrations import accelerate, lightning, transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, keep_freed_memory, options, say

WAYS = ("plain", "by hand", "integrated")
COLUMNS = ("framework", "plain_ms", "by_hand", "integrated", "overhead", "overhead_low")
COLUMNS += ("overhead_high",)  # by_hand and integrated are over plain, overhead over by_hand
BATCH, SEQUENCE, MEMORY, LOG_EVERY = 8, 64, "100%", 50
_WARM = 5

Batch = dict[str, torch.Tensor]


class _Samples(Dataset[Batch]):
    def __init__(self, number: int) -> None:
        self._tokens = torch.randint(512, (number, SEQUENCE))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Batch:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=100, help="of a step of each process")
    given = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    rounds, layers = (3, 1) if given.quick else (given.rounds, 4)
    rows = [_row(name, rounds, layers) for name in TRAININGS]
    finish(__file__, {"rows": rows}, columns=COLUMNS, arguments=given)


def _row(framework: str, rounds: int, layers: int) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    processes, ends = [], []
    for way in WAYS:
        ours, theirs = spawn.Pipe()
        steps = _WARM + rounds + 1
        process = spawn.Process(target=_train, args=(framework, way, steps, layers, theirs))
        process.start()
        theirs.close()
        ours.recv()  # its first step has ended
        processes.append(process)
        ends.append(ours)
    turns = [[_turn(end) for end in ends] for _ in range(_WARM + rounds)][_WARM:]
    for process, end in zip(processes, ends, strict=True):
        end.send(None)
        process.join()
    plain, by_hand, integrated = (statistics.median(column) for column in zip(*turns, strict=True))
    overheads = sorted(third / second for _, second, third in turns)
    row = {
        "framework": framework,
        "plain_ms": 1e3 * plain,
        "by_hand": by_hand / plain,
        "integrated": integrated / plain,
        "overhead": statistics.median(overheads),
        "overhead_low": overheads[len(overheads) // 4],
        "overhead_high": overheads[-1 - len(overheads) // 4],
    }
    say(row)
    return row


def _turn(end: Connection) -> float:
    end.send(None)
    return end.recv()


def _train(framework: str, way: str, steps: int, layers: int, told: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_attention_heads=4, **sizes))
    samples = _Samples(steps * BATCH)
    started = time.process_time()

    def wait(*_: Any) -> None:
        nonlocal started
        told.send(time.process_time() - started)
        told.recv()
        started = time.process_time()

    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(wait)
    if way == "by hand":
        first = next(iter(DataLoader(samples, BATCH)))
        bayplan.fit(model, first, None, memory=MEMORY, optimizer=optimizer, progress=False)
    TRAININGS[framework](model, samples, optimizer, way == "integrated")


def _by_trainer(
    model: LlamaForCausalLM, samples: _Samples, optimizer: torch.optim.Optimizer, is_fitted: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            max_steps=len(samples) // BATCH,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model, args=arguments, train_dataset=samples, optimizers=(optimizer, None)
        )
        if is_fitted:
            transformers.fit(trainer, memory=MEMORY, progress=False)
        trainer.train()


class _Module(pl.LightningModule):
    def __init__(self, net: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.net, self._optimizer = net, optimizer

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer


def _by_lightning(
    model: LlamaForCausalLM, samples: _Samples, optimizer: torch.optim.Optimizer, is_fitted: bool
) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[lightning.FitCallback(MEMORY, progress=False)] if is_fitted else [],
        enable_model_summary=False,
        log_every_n_steps=LOG_EVERY,
        **quiet,
    )
    trainer.fit(_Module(model, optimizer), DataLoader(samples, BATCH))


def _by_accelerate(
    model: LlamaForCausalLM, samples: _Samples, optimizer: torch.optim.Optimizer, is_fitted: bool
) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, BATCH))
    watch = None
    if is_fitted:
        limits = {"memory": MEMORY, "optimizer": optimizer, "progress": False}
        watch = accelerate.fit(accelerator, model, loader, **limits)
    for number, batch in enumerate(loader, 1):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None and number % LOG_EVERY == 0:
            watch.figures()


TRAININGS: dict[str, Callable[..., None]] = {
    "transformers": _by_trainer,
    "lightning": _by_lightning,
    "accelerate": _by_accelerate,
}


if __name__ == "__main__":
    main()
