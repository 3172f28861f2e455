"""When an exchange cannot have ended yet, whatever travels together."""

from collections.abc import Sequence

from bayplan.planning.exchange.bucket_plan import Gradient, check_order

__all__ = ["least_end_seconds"]


def least_end_seconds(
    gradients: Sequence[Gradient], *, latency_seconds: float, bytes_per_second: float
) -> float:
    """A lower bound on the end of any exchange over one link.

    Whatever backward makes from some moment on has to pass the link after it, in one message at
    least. The latest of these ends bounds all ways to fuse, to cut and to order, on every link
    where no message is faster than `latency_seconds + size / bytes_per_second`.

    Args:
        gradients: in the order in which backward makes them.
        latency_seconds: of a message.
        bytes_per_second: what the link passes.

    Example:
        >>> row = [Gradient(name=name, size_bytes=100, ready_seconds=2.0) for name in "ab"]
        >>> least_end_seconds(row, latency_seconds=0.5, bytes_per_second=100)
        4.5
    """
    check_order(gradients)
    end, left_bytes = 0.0, 0
    for gradient in reversed(gradients):
        left_bytes += gradient.size_bytes
        passing = latency_seconds + left_bytes / bytes_per_second
        end = max(end, gradient.ready_seconds + passing)
    return end
