"""How long `bayplan.fit` takes when a script runs again, and how much of that is tracing.

    python benchmarks/memory/fit_twice.py [--quick]

Each figure is of a process of its own; the two that fit share a cache that is empty at first. What
tracing takes is measured beside: a capture, and the first call under `aot_eager`, which traces
the same graphs and runs a forward. Seconds are of the processor, with one thread, so that other
processes do not count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import bayplan
from bayplan.models import load
from bayplan.models.gpt import GptConfig
from bayplan.step import call_model

__all__ = ["MODELS", "main"]

_SMALL_GPT = GptConfig(num_layers=6, width=256, num_heads=8, vocabulary=8000, context=128)
_TINY_GPT = GptConfig(num_layers=2, width=64, num_heads=2, vocabulary=500, context=32)
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "resnet18": (partial(load("resnet18"), 16), "85%"),
    "resnet50": (partial(load("resnet50"), 8), "75%"),
    "gpt-6": (partial(load("gpt"), 8, config=_SMALL_GPT), "75%"),
    "gpt-tiny": (partial(load("gpt"), 32, config=_TINY_GPT), "90%"),
}


def _fit(name: str) -> float:
    build, memory = MODELS[name]
    model, batch, loss_fn = build()
    optimizer = torch.optim.AdamW(model.parameters())
    started = time.process_time()
    bayplan.fit(model, batch, loss_fn, memory=memory, optimizer=optimizer, progress=False)
    return time.process_time() - started


def _trace(name: str) -> float:
    model, batch, loss_fn = MODELS[name][0]()
    started = time.process_time()
    bayplan.capture(model, batch, loss_fn, optimizer="adamw")
    model.compile(backend="aot_eager", fullgraph=True)
    call_model(model, batch[0])
    return time.process_time() - started


def _seconds(what: str, name: str, cache: str) -> float:
    """Of a process of its own."""
    command = [sys.executable, __file__, "--inside", what, "--models", name]
    environment = {**os.environ, "BAYPLAN_CACHE": cache}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    """Print a line of JSON for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="a tiny model alone")
    parser.add_argument("--inside", choices=("fit", "trace"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.models or (["gpt-tiny"] if arguments.quick else list(MODELS))
    torch.set_num_threads(1)
    if arguments.inside:
        return print((_fit if arguments.inside == "fit" else _trace)(names[0]))
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            first, second = (_seconds("fit", name, cache) for _ in range(2))
            tracing = _seconds("trace", name, cache)
        row = {"first_seconds": first, "second_seconds": second, "tracing_seconds": tracing}
        print(json.dumps({"model": name, **row}))
    return None


if __name__ == "__main__":
    main()
