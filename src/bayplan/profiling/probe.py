"""A device description of the processor or a GPU here, from a few short measurements.

Used where a step is too large to run even once; a measured profile is far better where it can.
"""

import time
from collections.abc import Callable

import torch

from bayplan.data.device import DeviceKind, Figure, OpClass
from bayplan.devices.machine import available_memory_bytes

__all__ = ["probe_copy", "probe_cpu", "probe_cuda"]

_MATRIX_SIZE = 1024
_COPY_BYTES = 256 * 2**20
_REPEATS = 5
_SMALL_BYTES = 64
_PAIR_BYTES = 64 * 2**20
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


def probe_cuda(index: int) -> DeviceKind:
    """The same of a GPU. These lines have never met one."""
    device = torch.device("cuda", index)

    def fastest(work: Callable[[], object]) -> float:
        def done() -> None:
            work()
            torch.cuda.synchronize(device)

        done()  # kernels are loaded when they are first used
        return _fastest(done)

    size = 4 * _MATRIX_SIZE
    flops: dict[str, Figure] = {}
    probed = "measured by a probe of this GPU"
    for dtype in (torch.float32, torch.float16):
        matrix = torch.full((size, size), 0.5, device=device, dtype=dtype)
        product = torch.empty_like(matrix)
        seconds = fastest(lambda m=matrix, p=product: torch.mm(m, m, out=p))
        flops[str(dtype).removeprefix("torch.")] = Figure(2 * size**3 / seconds, probed)
    source, target = torch.zeros(2, _COPY_BYTES // 4, device=device)
    bytes_per_s = 2 * _COPY_BYTES / fastest(lambda: target.copy_(source))
    scalar = torch.ones(1, device=device)
    total_bytes = torch.cuda.mem_get_info(device)[1]
    guess = "guess: CUDA context with cuBLAS and cuDNN loaded is commonly 300 to 700 MiB"
    return DeviceKind(
        name=torch.cuda.get_device_name(device).lower().replace(" ", "-"),
        title=f"{torch.cuda.get_device_name(device)}, probed",
        memory_bytes=Figure(total_bytes, probed),
        context_bytes=Figure(550 * 2**20, guess),
        bandwidth_bytes_per_s=Figure(bytes_per_s, probed),
        flops_per_s=flops,
        vector_flops_per_s=Figure(flops["float32"].value, "guess: as float32"),
        efficiency={kind: Figure(share, "guess") for kind, share in _EFFICIENCY.items()},
        launch_seconds=Figure(fastest(lambda: scalar.add_(1)), probed),
    )


def probe_copy(sender: torch.device, receiver: torch.device) -> tuple[float, float]:
    """Latency and bytes/s of copies from one device to another."""
    seconds: list[float] = []
    for size_bytes in (_SMALL_BYTES, _PAIR_BYTES):
        source = torch.zeros(size_bytes // 4, device=sender)
        target = torch.zeros(size_bytes // 4, device=receiver)

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target.copy_(source)
            for device in (sender, receiver):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)

        copy()
        seconds.append(_fastest(copy))
    small, large = seconds
    return small, _PAIR_BYTES / max(large - small, 1e-9)


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
