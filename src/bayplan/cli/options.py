"""Options that several commands share, and what commands make of them.

An option's help is here where commands share it, else in the docstring of its command. A text that
is longer than a line is an annotation: help keeps the line breaks of a docstring.
"""

import atexit
import gc
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, Token

if TYPE_CHECKING:
    from bayplan.data.device import DeviceKind

__all__ = [
    "Again",
    "Autocast",
    "Batch",
    "Device",
    "Flag",
    "Json",
    "LimitCounts",
    "Memory",
    "On",
    "Optimizer",
    "Output",
    "Pack",
    "SwapDir",
    "SwapSize",
    "Target",
    "TimeLimit",
    "UpdateInBackward",
    "Whole",
    "WholeOrNone",
    "check_output",
    "complain",
    "device_kind",
    "rare_collections",
    "refuse_both",
    "show",
    "unbroken",
]

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Memory = Annotated[
    str | None, Parameter(allow_leading_hyphen=True)
]  # to say what is wrong in -1GiB
LimitCounts = Annotated[
    str | None,
    Parameter(
        help="Which bytes the limit counts: live bytes of tensors, bytes reserved by torch's "
        "caching allocator, or the total with the context, which nvidia-smi shows. Default:"
        " reserved on CUDA devices, else live."
    ),
]
Output = Annotated[Path | None, Parameter(name=["--output", "-o"])]

Target = Annotated[str, Parameter(help="A reference model, or module:function of your own.")]


def _whole(kind: object, tokens: Sequence[Token]) -> int:
    """A whole number; cyclopts would round 1.5 to 2 without a word."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f'"{tokens[0].value}" is not a whole number') from None


Whole = Annotated[int, Parameter(converter=_whole)]
WholeOrNone = Annotated[int | None, Parameter(converter=_whole)]
Batch = Annotated[
    int | None,
    Parameter(
        name=["--batch", "-b"],
        converter=_whole,
        help="Samples per step. Default: the target's own.",
    ),
]
Optimizer = Annotated[str, Parameter(help="sgd (with momentum), adam, adamw or none.")]
Autocast = Annotated[str, Parameter(help="Mixed precision of the forward: bf16, fp16 or none.")]
Device = Annotated[
    str | None,
    Parameter(
        help="A device that you need not have: h100, titan-v, …, or a device file (YAML); times "
        "are then derived from its figures. Default: this machine, where the step is "
        "measured."
    ),
]
On = Annotated[
    str | None,
    Parameter(
        help="A device of this machine to run on: auto, cpu, cuda, cuda:1, xpu, …; model and batch"
        " are built there. Default: auto, the accelerator if there is one."
    ),
]
Again = Annotated[
    Flag,
    Parameter(
        show_default=False,
        help="Measure and plan anew, and replace the cached results of this step.",
    ),
]
Json = Annotated[Flag, Parameter(show_default=False, help="Print JSON.")]
Pack = Annotated[bool, Parameter(help="Whether plans may pack activations, without loss.")]
UpdateInBackward = Annotated[
    Flag,
    Parameter(
        help="Update each parameter as soon as its gradient is complete, and release the gradient."
        " Not with gradient clipping or accumulation."
    ),
]
SwapDir = Annotated[
    Path | None,
    Parameter(help="A directory on a disk for swapped activations. Default: no swaps."),
]
SwapSize = Annotated[
    str | None, Parameter(help="The largest swap file, like 4GiB. Default: what the plan needs.")
]
TimeLimit = Annotated[float, Parameter(help="Seconds for the search of one plan.")]


def unbroken(text: str) -> str:
    """Join the lines of each paragraph, so that the terminal's width alone breaks them.

    Lines that begin with spaces, as examples do, and items of a list stay.
    """
    return re.sub(r"(?<=\S)\n(?!\s|- )", " ", text)


def check_output(path: Path | None) -> None:
    """Refuse an output that cannot be written before the step is measured, not after."""
    if path is not None:
        from bayplan.running.recorder import check_writable

        check_writable(path)


def complain(line: str) -> None:
    """Say on stderr what a user should know of a result, if there is anything."""
    if line:
        print(f"bayplan: {line}", file=sys.stderr)


def show(result: object, text: str, *, json: bool, output: Path | None = None) -> None:
    """Print a result as text, or as JSON for machines; write it to a file where one is named."""
    import msgspec

    from bayplan.data import files

    if output is not None:
        assert isinstance(result, msgspec.Struct), "only nouns are written to files"
        files.write(output, result)
    print(msgspec.json.encode(result).decode() if json else text)


def refuse_both(on: str | None, device: str | None, cluster: str | None) -> None:
    """There is a device to run on, or one to ask about."""
    if on in (None, "auto") or device is cluster is None:
        return
    from bayplan.data.errors import UsageError

    asked = f"--device {device}" if cluster is None else f"--cluster {cluster}"
    raise UsageError(
        f"--on {on} runs the step on a device of this machine, and {asked} asks about devices that"
        " need not be here; give one of them"
    )


def device_kind(
    device: str | None, cluster: str | None = None, on: str | None = None
) -> "DeviceKind | None":
    """The device that a command asks about; of a cluster, the one with the least memory."""
    refuse_both(on, device, cluster)
    from bayplan.costing.catalogue import load_device, read_cluster
    from bayplan.data.errors import UsageError

    if cluster is None:
        return None if device is None else load_device(device)
    if device is not None:
        raise UsageError("--device and --cluster both name the device; give one of them")
    described = read_cluster(cluster)
    kinds = [described.kinds[device.kind] for device in described.devices]
    return min(kinds, key=lambda kind: kind.memory_bytes.value)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely while a question is answered.

    Tracing makes millions of objects that live until the answer is there. Walking them again and
    again, and once more when the process ends, takes a fifth of the time. A command that trains
    keeps Python's own pace.
    """
    atexit.register(gc.freeze)
    thresholds = gc.get_threshold()
    gc.set_threshold(50 * thresholds[0], *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
