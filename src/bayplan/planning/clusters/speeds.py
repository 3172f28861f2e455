"""Parts of a batch for devices that are not equally fast."""

from collections.abc import Callable, Sequence

from bayplan.data.chain import Chain

__all__ = ["shares_by_speed", "speed_of"]

_SHARES = 1000  # that the fastest device has


def speed_of(chain: Chain) -> float:
    """Samples in a second, of the whole chain on one device."""
    seconds = sum(chain.seconds(0, len(chain.layers) - 1, chain.num_samples))
    return chain.num_samples / max(1e-12, seconds)


def shares_by_speed(devices: Sequence[int], chain_of: Callable[[int], Chain]) -> tuple[int, ...]:
    """In proportion to how fast each device is with the whole chain; ones if all are alike.

    Example:
        >>> from bayplan.data.chain import Layer
        >>> slow, fast = (Chain(name="c", num_samples=1, source="guess", layers=(
        ...     Layer(name="x", forward_seconds=s, backward_seconds=s),)) for s in (2.0, 1.0))
        >>> shares_by_speed([0, 1], [slow, fast].__getitem__)
        (500, 1000)
    """
    speeds = [speed_of(chain_of(device)) for device in devices]
    fastest = max(speeds)
    if min(speeds) == fastest:
        return (1,) * len(devices)
    return tuple(max(1, round(_SHARES * speed / fastest)) for speed in speeds)
