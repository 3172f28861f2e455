"""Why nothing fits: what binds, by both numbers, and the smallest change that would help."""

from dataclasses import replace

from bayplan.data.errors import DoesNotFit
from bayplan.data.units import format_bytes
from bayplan.planning.clusters.candidates import Search
from bayplan.planning.clusters.memory import StageSizes, needed_parts
from bayplan.planning.clusters.stage_tables import Passing
from bayplan.planning.clusters.training import DeviceMemory

__all__ = ["refusal"]

_CLOSE_ENOUGH = 1.01  # of the smallest memory that is looked for
_MIB = 2**20


def refusal(search: Search) -> DoesNotFit:
    """The error for a search that found nothing."""
    kind, chain = next(iter(search.chains.items()))
    has = search.memory[kind]
    training = search.training
    needs = [
        needed_parts(
            StageSizes.of(chain, at, at, 1),
            training,
            in_flight=1,
            is_recomputed=search.may_recompute,
        )
        for at in range(len(chain.layers))
    ]
    at = max(range(len(needs)), key=lambda one: needs[one].total)
    slack = 1 + training.allocator_slack
    alone_bytes = int(needs[at].total * slack) + 1
    whole_bytes = sum(int(one.weights + one.gradients + one.state) for one in needs)
    room = f"{format_bytes(has.usable_bytes)} are usable of {format_bytes(has.total_bytes)}"
    if alone_bytes > has.usable_bytes:
        parts = needs[at]
        kept = parts.weights + parts.gradients + parts.state
        return DoesNotFit(
            f"nothing fits: layer {chain.layers[at].name} alone needs {format_bytes(alone_bytes)}"
            f" with one sample ({format_bytes(kept)} of it weights, gradients and optimizer state),"
            f" {room}. Fits with devices of {format_bytes(alone_bytes + has.context_bytes)}, or"
            " with the layer cut in two",
            smallest_bytes=alone_bytes + has.context_bytes,
        )
    smallest = smallest_memory(search, alone_bytes)
    number = search.num_devices
    text = (
        f"nothing fits on {number} device{'s' * (number > 1)}: weights, gradients and optimizer"
        f" state take {format_bytes(whole_bytes)} in all, and {room} on each."
    )
    if smallest is None:
        return DoesNotFit(f"{text} Try a smaller batch than {search.num_samples}")
    more = -(-number * (smallest - has.context_bytes) // max(1, has.usable_bytes))
    return DoesNotFit(
        f"{text} Fits with devices of {format_bytes(smallest)}, or with about"
        f" {max(number + 1, int(more))} of these",
        smallest_bytes=smallest,
    )


def smallest_memory(search: Search, least_bytes: int) -> int | None:
    """About the smallest device memory with which something is found; None if none is."""
    kind = next(iter(search.memory))
    context = search.memory[kind].context_bytes

    def is_found(usable: int) -> bool:
        memory = dict.fromkeys(
            search.memory, DeviceMemory(total_bytes=usable + context, context_bytes=context)
        )
        trial = replace(search, memory=memory)
        return any(
            trial.partitioner(unit, count, passing).has_any()
            for unit in trial.units
            for count in trial.counts[:1]
            for passing in (Passing.ONE_F_ONE_B,)
            if trial.num_samples // count >= unit
        )

    low, high = least_bytes, max(2 * least_bytes, _MIB)
    while not is_found(high):
        low, high = high, 2 * high
        if high > 2**50:
            return None
    while high > low * _CLOSE_ENOUGH:
        middle = (low + high) // 2
        low, high = (low, middle) if is_found(middle) else (middle, high)
    return high + context
