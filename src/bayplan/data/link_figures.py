"""What links reach, by their kind and by the generation of the devices they join.

A topology names kinds of links and no speed. These figures stand in until someone measures. Where
they are NCCL's, they are those of the table by which it chooses its rings (`src/graph/topo.h`).
"""

from dataclasses import dataclass

from bayplan.data.device import Figure
from bayplan.data.joint import LinkKind

__all__ = ["LinkFigures", "Ports", "network_figures", "nvlink_figures", "pcie_figures", "ports_of"]


@dataclass(frozen=True, kw_only=True)
class Ports:
    """How a device is joined to others.

    Attributes:
        pcie_generation: of its slot, which is taken to have 16 lanes.
        num_nvlinks: it has; nvlink_bytes_per_s: that one of them reaches each way.
    """

    pcie_generation: int
    num_nvlinks: int = 0
    nvlink_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """What a link takes and carries."""

    latency_seconds: Figure
    bandwidth_bytes_per_s: Figure


_VOLTA = Ports(pcie_generation=3, num_nvlinks=6, nvlink_bytes_per_s=20.0e9)
_AMPERE = Ports(pcie_generation=4, num_nvlinks=12, nvlink_bytes_per_s=20.0e9)
_HOPPER = Ports(pcie_generation=5, num_nvlinks=18, nvlink_bytes_per_s=20.6e9)
_AMPERE_BRIDGE = Ports(pcie_generation=4, num_nvlinks=4, nvlink_bytes_per_s=12.0e9)
_PORTS = {
    "a10": Ports(pcie_generation=4),
    "a100": _AMPERE,
    "a100-80gb": _AMPERE,
    "a6000": _AMPERE_BRIDGE,
    "h100": _HOPPER,
    "h100-pcie": Ports(pcie_generation=5, num_nvlinks=12, nvlink_bytes_per_s=20.6e9),
    "h200": _HOPPER,
    "l4": Ports(pcie_generation=4),
    "mi300x": Ports(pcie_generation=5),
    "p100": Ports(pcie_generation=3, num_nvlinks=4, nvlink_bytes_per_s=18.0e9),
    "rtx-2080-ti": Ports(pcie_generation=3, num_nvlinks=2, nvlink_bytes_per_s=20.0e9),
    "rtx-3090": _AMPERE_BRIDGE,
    "rtx-4090": Ports(pcie_generation=4),
    "rtx-5090": Ports(pcie_generation=5),
    "t4": Ports(pcie_generation=3),
    "titan-v": Ports(pcie_generation=3),
    "v100": _VOLTA,
    "v100-32gb": _VOLTA,
}

# Seconds before the first byte of a copy from device to device has arrived.
_LATENCY_SECONDS = {
    LinkKind.NVLINK: 5e-6,
    LinkKind.PIX: 8e-6,
    LinkKind.PXB: 9e-6,
    LinkKind.PHB: 10e-6,
    LinkKind.NODE: 11e-6,
    LinkKind.SYS: 14e-6,
    LinkKind.NET: 20e-6,
}
_SLOT_BYTES_PER_S = 12.0e9  # PCIe 3.0 with 16 lanes; each generation doubles it
# Parts of a slot that are left where a processor passes traffic on.
_PART_OF_SLOT = {
    LinkKind.PIX: (1.0, "a slot's whole bandwidth"),
    LinkKind.PXB: (1.0, "a slot's whole bandwidth"),
    LinkKind.PHB: (5 / 6, "a sixth less through a processor, as NCCL has it for Intel"),
    LinkKind.NODE: (5 / 6, "as PHB; another sixth may be missing"),
}
# Between processors, by the generation of slots they have.
_SYS_BYTES_PER_S = {
    3: (6.0e9, "Xeon up to Broadwell"),
    4: (10.0e9, "Xeon from Skylake on; AMD 16 or more"),
    5: (22.0e9, "Xeon from Sapphire Rapids on; AMD 24 or more"),
}


def ports_of(device: str) -> Ports | None:
    """The ports of a device in the catalogue, by its name; None for others."""
    return _PORTS.get(device.lower())


def pcie_figures(kind: LinkKind, ports: Ports) -> LinkFigures:
    """Of one wire of a joint through PCIe.

    Example:
        >>> pcie_figures(LinkKind.PIX, Ports(pcie_generation=4)).bandwidth_bytes_per_s.value
        24000000000.0
    """
    generation = ports.pcie_generation
    if kind is LinkKind.SYS:
        bandwidth, processor = _SYS_BYTES_PER_S[min(max(generation, 3), 5)]
        bandwidth, why = bandwidth * 5 / 6, f"{processor}, a sixth less for traffic of devices"
    else:
        part, why = _PART_OF_SLOT[kind]
        bandwidth = _SLOT_BYTES_PER_S * 2 ** (generation - 3) * part
    source = f"guess: NCCL's table for PCIe {generation}.0 with 16 lanes; {why}"
    return _figures(kind, bandwidth, source)


def nvlink_figures(num_links: int, ports: Ports) -> LinkFigures:
    """Of so many NVLinks together."""
    each = ports.nvlink_bytes_per_s or _VOLTA.nvlink_bytes_per_s
    source = f"guess: NCCL's table, {each / 1e9:g} GB/s for each of {num_links} NVLinks"
    if not ports.nvlink_bytes_per_s:
        source += "; the generation is not known"
    return _figures(LinkKind.NVLINK, num_links * each, source)


def network_figures(gbits_per_s: float) -> LinkFigures:
    """Of a network card.

    Example:
        >>> network_figures(100).bandwidth_bytes_per_s.value
        12000000000.0
    """
    source = f"guess: NCCL's table, 12 of 12.5 GB/s for 100 Gbit/s; this card has {gbits_per_s:g}"
    return _figures(LinkKind.NET, gbits_per_s * 0.12e9, source)


def _figures(kind: LinkKind, bandwidth: float, source: str) -> LinkFigures:
    latency = _LATENCY_SECONDS[kind]
    return LinkFigures(
        latency_seconds=Figure(latency, f"guess: {latency * 1e6:g} us of a small copy by {kind}"),
        bandwidth_bytes_per_s=Figure(bandwidth, source),
    )
