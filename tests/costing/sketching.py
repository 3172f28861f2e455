"""Step graphs and devices drawn by hand, for tests of the roofline."""

import math

from bayplan.costing.roofline import derive_profile
from bayplan.data.device import DeviceKind, Figure, OpClass
from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind, Value

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}


class Sketch:
    """A step graph drawn by hand: every value its own storage unless it says whose."""

    def __init__(self):
        self.nodes, self.values, self.storages = [], [], []

    def value(self, *shape, dtype="float32", of=None):
        size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        if of is None:
            storage = len(self.storages)
            self.storages.append(Storage(size_bytes=size_bytes, kind=StorageKind.TEMPORARY))
        else:
            storage = self.values[of].storage
        self.values.append(Value(storage=storage, shape=shape, dtype=dtype, size_bytes=size_bytes))
        return len(self.values) - 1

    def node(self, op, reads, writes, flops=0):
        edges = {"reads": tuple(reads), "writes": tuple(writes)}
        self.nodes.append(Node(op=f"aten.{op}", phase=Phase.FORWARD, flops=flops, **edges))

    def graph(self):
        columns = {"values": tuple(self.values), "storages": tuple(self.storages)}
        return StepGraph(model="sketch", nodes=tuple(self.nodes), **columns)


def figure(value):
    return Figure(value, "test")


def plain_device(
    *, bandwidth=100.0, float32=1000.0, rates=None, vector=500.0, efficiency=0.5, launch=0.0
):
    rates = {"float32": float32, **(rates or {})}
    return DeviceKind(
        name="plain",
        memory_bytes=figure(1e9),
        context_bytes=figure(0),
        bandwidth_bytes_per_s=figure(bandwidth),
        flops_per_s={dtype: figure(rate) for dtype, rate in rates.items()},
        vector_flops_per_s=figure(vector),
        efficiency={kind: figure(efficiency) for kind in OpClass},
        launch_seconds=figure(launch),
    )


def seconds_of(sketch, device):
    return derive_profile(sketch.graph(), device).seconds
