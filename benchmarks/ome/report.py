"""What report 003 measured: megabytes on the GPU and seconds per step, batch 32.

TensorFlow, ResNet version 2, Adam, a GPU of 8 GB of which 7606 MB could be allocated. Peaks are the
least of nine steps, as the report gives them; None where the step ran out of memory.
"""

__all__ = ["LARGEST_BATCHES", "LIMIT_BYTES", "REPORTED"]

LIMIT_BYTES = 7_606_000_000
# ResNet-50 within that limit.
LARGEST_BATCHES = {"keep": 87, "swap": 111, "checkpoint": 212, "ome": 214}

_NAMES = ("keep", "swap", "checkpoint", "ome")
_TABLE: dict[str, tuple[tuple[float, float] | None, ...]] = {
    "resnet18": ((843.57, 0.233), (829.03, 0.351), (514.40, 0.191), (509.10, 0.197)),
    "resnet34": ((1323.28, 0.371), (1220.52, 0.539), (799.98, 0.371), (762.15, 0.383)),
    "resnet50": ((3015.52, 0.538), (2764.48, 0.940), (1381.65, 0.573), (1230.80, 0.600)),
    "resnet101": ((4671.01, 0.934), (4108.10, 1.576), (1956.81, 1.118), (1726.87, 1.139)),
    "resnet152": ((6577.46, 1.381), (5596.63, 2.290), (2083.61, 1.682), (1924.51, 1.699)),
    "resnet200": (None, (7559.23, 3.087), (2135.42, 2.287), (1952.25, 2.323)),
    "inception_v4": ((4268.21, 1.975), (4170.94, 2.901), (2528.45, 2.598), (2564.43, 2.722)),
}
REPORTED: dict[str, dict[str, tuple[float, float] | None]] = {
    model: dict(zip(_NAMES, row, strict=True)) for model, row in _TABLE.items()
}
