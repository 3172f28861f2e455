"""Options that several commands share, and what they make of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

if TYPE_CHECKING:
    from bayplan.data.device import DeviceKind

__all__ = [
    "Autocast",
    "Batch",
    "Cache",
    "ClusterName",
    "Device",
    "Json",
    "Memory",
    "Optimizer",
    "Output",
    "Pack",
    "SwapDir",
    "SwapSize",
    "Target",
    "TimeLimit",
    "UpdateInBackward",
    "as_json",
    "check_output",
    "device_kind",
]

Target = Annotated[str, Parameter(help="A reference model, or module:function of your own.")]
Batch = Annotated[
    int | None,
    Parameter(name=["--batch", "-b"], help="Samples per step. Default: the target's own."),
]
Optimizer = Annotated[str, Parameter(help="sgd (with momentum), adam, adamw or none.")]
Autocast = Annotated[str, Parameter(help="Mixed precision of the forward: bf16, fp16 or none.")]
Device = Annotated[
    str | None,
    Parameter(
        help="A device that need not be here: h100, titan-v, …, or a device file (YAML); times are"
        " then derived from its figures. Default: this machine, on which the step is measured."
    ),
]
Cache = Annotated[
    bool, Parameter(help="Take a kept profile; --no-cache measures anew and replaces it.")
]
Json = Annotated[
    bool,
    Parameter(name="--json", negative="", show_default=False, help="Print JSON for machines."),
]
Output = Annotated[
    Path | None, Parameter(name=["--output", "-o"], help="Also write the result to this file.")
]
ClusterName = Annotated[
    str | None,
    Parameter(
        help="A cluster: titanv-8, 4xdgx-a100, …, or a file (YAML); `bayplan cluster` lists them."
    ),
]
Memory = Annotated[
    str | None,
    Parameter(
        allow_leading_hyphen=True,  # so that -1GiB is told what is wrong with it
        help="The limit, like 8GiB or 40% (of the plain peak). Default: what the device can give.",
    ),
]
Pack = Annotated[bool, Parameter(help="Whether plans may pack activations, without loss.")]
UpdateInBackward = Annotated[
    bool,
    Parameter(
        negative="",
        help="Update each parameter as soon as its gradient is complete, and release the gradient."
        " Not with gradient clipping or accumulation.",
    ),
]
SwapDir = Annotated[
    Path | None,
    Parameter(help="A directory on a disk for activations that pay to be swapped. Default: none."),
]
SwapSize = Annotated[
    str | None, Parameter(help="The largest swap file, like 4GiB. Default: what the plan needs.")
]
TimeLimit = Annotated[
    float, Parameter(name="--time-limit", help="Seconds for the search of one plan.")
]


def check_output(path: Path | None) -> None:
    """Refuse an output that cannot be written before the step is measured, not after."""
    if path is not None:
        from bayplan.running.recorder import check_writable

        check_writable(path)


def as_json(result: object) -> str:
    """A noun, or rows of a table, for machines."""
    return msgspec.json.encode(result).decode()


def device_kind(device: str | None, cluster: str | None = None) -> "DeviceKind | None":
    """The device that a command asks about; of a cluster, the one with the least memory."""
    from bayplan.data.errors import UsageError

    if device is not None and cluster is not None:
        raise UsageError("--device and --cluster both name the device; give one of them")
    from bayplan.costing.catalogue import load_device, read_cluster

    if cluster is None:
        return None if device is None else load_device(device)
    described = read_cluster(cluster)
    kinds = [described.kinds[device.kind] for device in described.devices]
    return min(kinds, key=lambda kind: kind.memory_bytes.value)
