"""`chosen_device`: where a step runs on this machine, as `--on` says it."""

import torch

from bayplan.data.errors import UsageError
from bayplan.devices.device import HOST, Device, accelerators_here, default_device, device_of

__all__ = ["chosen_device", "device_for_ranks", "is_chosen"]


def is_chosen(on: str | torch.device | None) -> bool:
    """Whether a device is named; otherwise it is the default one."""
    return on is not None and on != "auto"


def chosen_device(on: str | torch.device | None) -> Device:
    """The device that is named, or the accelerator of this machine if there is one.

    Raises:
        UsageError: torch knows no such device, or it is not here.
    """
    if on is None or on == "auto":
        return default_device()
    try:
        where = torch.device(on)
    except RuntimeError:
        raise UsageError(
            f"--on {on}: torch knows no such device; write auto, cpu, cuda, cuda:1, xpu or another"
        ) from None
    device, here = device_of(where), accelerators_here()
    if not device.is_accelerator:
        return HOST
    if not here or here[0].where.type != where.type:
        kinds = " and ".join(["cpu", *dict.fromkeys(other.where.type for other in here)])
        raise UsageError(
            f"--on {on}: there is no {where.type} device here, only {kinds}: {device.why_missing}."
            " To ask about one that is elsewhere, use --device, like h100"
        )
    if where.index is not None and where.index >= len(here):
        raise UsageError(
            f"--on {on}: this machine has {len(here)} {where.type} devices, 0 to {len(here) - 1}"
        )
    return device if where.index is not None else default_device()


def device_for_ranks(on: str | torch.device | None, num_ranks: int) -> Device:
    """The kind of device that ranks of this machine run on, one each.

    Raises:
        UsageError: one device is named, or there are fewer than ranks.
    """
    device = chosen_device(on)
    if is_chosen(on) and device.is_accelerator and torch.device(str(on)).index is not None:
        raise UsageError(
            f"--on {on} is one device, and each of {num_ranks} ranks takes one; say --on"
            f" {device.where.type}"
        )
    if device.is_accelerator and num_ranks > device.num_devices:
        raise UsageError(
            f"{num_ranks} ranks need as many {device.where.type} devices, and this machine has"
            f" {device.num_devices}; start fewer, or let them share the processor with --on cpu"
        )
    return device_of(device.where.type)
