"""Records for tests of reports: of many devices and steps, as a cluster of 64 makes them."""

from bayplan.data.record import (
    AllReduce,
    DeviceRecord,
    Event,
    Lane,
    LiveStorage,
    MemoryCurve,
    PlanPoint,
    RunRecord,
    Source,
    message_classes,
)

__all__ = ["many_devices", "one_device"]

_GIB = 2**30


def one_device(*, name: str = "net", source: Source = Source.SIMULATED) -> RunRecord:
    """A planned step on one device; `name` is that of its model and of a module in it."""
    kinds = ("parameter", "kept", "recomputed", "swapped", "packed", "temporary", "workspace")
    column = tuple(_GIB // 8 * (4 - abs(moment - 4)) for moment in range(9))
    curve = MemoryCurve(
        seconds=tuple(0.01 * moment for moment in range(9)),
        total_bytes=tuple(len(kinds) * size for size in column),
        by_kind=dict.fromkeys(kinds, column),
    )
    plain = MemoryCurve(
        seconds=curve.seconds, total_bytes=tuple(2 * size for size in curve.total_bytes)
    )
    words = (("forward", 0.0), ("recompute", 0.03), ("backward", 0.04), ("update", 0.07))
    device = DeviceRecord(
        device="titan-v",
        peak_bytes=max(curve.total_bytes),
        peak_place=f"convolution {name} model.py:7",
        largest=(LiveStorage(size_bytes=99, kind="activation", name=name, source="model.py:7"),),
        curve=curve,
        plain_curve=plain,
        events=tuple(
            Event(lane=Lane.COMPUTE, name=f"{word} {name}", start_seconds=start, seconds=0.01)
            for word, start in words
        ),
    )
    return RunRecord(
        source=source,
        method="liveness",
        model=name,
        step_seconds=(0.08,),
        devices=(device,),
        num_samples=16,
        limit_bytes=4 * _GIB,
        plain_seconds=0.07,
        tradeoff=(
            PlanPoint(name="auto", peak_bytes=_GIB, time_ratio=1.2),
            PlanPoint(name="auto", peak_bytes=2 * _GIB, time_ratio=1.1, is_chosen=True),
            PlanPoint(name="keep", peak_bytes=4 * _GIB, time_ratio=1.0),
            PlanPoint(name="swap", peak_bytes=_GIB, time_ratio=9.0),
        ),
        versions={"torch": "2.13.0"},
        command=f"bayplan check {name}",
    )


def many_devices(
    num_devices: int, num_steps: int, *, num_events: int = 200, source: Source = Source.SIMULATED
) -> RunRecord:
    """Two stages on hosts of eight, each device with so many events, sums and moments of memory."""
    step = 1e-3 * num_events
    return RunRecord(
        source=source,
        method="liveness",
        model="net",
        step_seconds=(step,) * num_steps,
        devices=tuple(
            _device(rank, num_devices, num_events, num_steps) for rank in range(num_devices)
        ),
        num_samples=1024,
        epoch_samples=1_281_167,
        losses=tuple(1 / (1 + number) for number in range(num_steps)),
    )


def _device(rank: int, num_devices: int, num_events: int, num_steps: int) -> DeviceRecord:
    stage = int(rank >= num_devices * 3 // 4)
    half = num_events // 2
    computed = [
        Event(
            lane=Lane.COMPUTE,
            name=f"{stage}{'F' if number < half else 'B'}{number % half}",
            start_seconds=1e-3 * number + 1e-4 * stage,
            seconds=8e-4,
        )
        for number in range(num_events)
    ]
    moved = [
        Event(
            lane=(Lane.SEND, Lane.RECEIVE)[stage],
            name=f"{stage}{('SEND', 'RECV')[stage]}_F{number}",
            start_seconds=1e-3 * number,
            seconds=3e-4,
        )
        for number in range(half)
    ]
    end = 1e-3 * num_events
    wait = Event(lane=Lane.REDUCE, name=f"{stage}U0", start_seconds=0.9 * end, seconds=0.1 * end)
    sums = tuple(
        AllReduce(
            bucket=number,
            size_bytes=(1 + number) << 20,
            start_seconds=end * (0.7 + 0.1 * number),
            seconds=0.1 * end,
            exposed_seconds=0.1 * end if number == 2 else 0.0,
        )
        for number in range(3)
    )
    column = tuple(_GIB // 4 + (number % half) * 2**20 for number in range(10 * num_events))
    return DeviceRecord(
        device=f"a100 {rank}, rank {rank}, stage {stage}",
        stages=(stage,),
        places=(f"host {rank // 8}", f"PIX {rank // 2}"),
        peak_bytes=2 * max(column),
        step_peak_bytes=(2 * max(column),) * num_steps,
        total_bytes=2 * max(column) + _GIB,
        capacity_bytes=2 * _GIB,
        curve=MemoryCurve(
            seconds=tuple(1e-4 * number for number in range(len(column))),
            total_bytes=tuple(2 * size for size in column),
            by_kind={"parameter": column, "activation": column},
        ),
        events=(*computed, *moved, wait),
        all_reduces=sums,
        messages=message_classes((own.size_bytes, own.seconds) for own in sums),
    )
