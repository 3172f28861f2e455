"""A device description of the processor here, from two short measurements.

Used where a step is too large to run even once; a measured profile is far better where it can.
"""

import time
from collections.abc import Callable

import torch

from bayplan.data.device import DeviceKind, Figure, OpClass
from bayplan.devices.machine import available_memory_bytes

__all__ = ["probe_cpu"]

_MATRIX_SIZE = 1024
_COPY_BYTES = 256 * 2**20
_REPEATS = 5
# Shares of the probed peaks that whole models reached on the reference models here.
_EFFICIENCY = {
    OpClass.MATMUL: 0.8,
    OpClass.CONVOLUTION: 0.6,
    OpClass.ATTENTION: 0.5,
    OpClass.ELEMENTWISE: 0.8,
    OpClass.REDUCTION: 0.6,
    OpClass.GATHER: 0.5,
    OpClass.VIEW: 1.0,
}


def probe_cpu() -> DeviceKind:
    """Measure matrix and copy speed and describe this processor by them."""
    matrix = torch.full((_MATRIX_SIZE, _MATRIX_SIZE), 0.5)  # the user's generator stays as it is
    product = torch.empty_like(matrix)
    flops_per_s = 2 * _MATRIX_SIZE**3 / _fastest(lambda: torch.mm(matrix, matrix, out=product))
    source, target = torch.zeros(2, _COPY_BYTES // 4)
    bytes_per_s = 2 * _COPY_BYTES / _fastest(lambda: target.copy_(source))
    scalar_seconds = _fastest(lambda: torch.ones(1).add_(1))
    probed = "measured by a probe of this processor"
    return DeviceKind(
        name="cpu",
        title="this processor, probed",
        memory_bytes=Figure(available_memory_bytes(torch.device("cpu")), probed),
        context_bytes=Figure(0, "none on a CPU"),
        bandwidth_bytes_per_s=Figure(bytes_per_s, probed),
        flops_per_s={"float32": Figure(flops_per_s, probed)},
        vector_flops_per_s=Figure(flops_per_s / 4, "guess from the matrix rate"),
        efficiency={kind: Figure(share, "guess") for kind, share in _EFFICIENCY.items()},
        launch_seconds=Figure(scalar_seconds, probed),
        allocation_granularity_bytes=64,
    )


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
