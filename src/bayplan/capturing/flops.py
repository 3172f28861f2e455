"""Floating-point operations of one operator call, by torch's own formulas and a few of ours."""

from typing import Any

from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["count_flops"]

# torch counts attention only for CUDA's kernels; the CPU's take the same arguments first.
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


def count_flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Count multiplications and additions separately; 0 for operators that only move bytes."""
    packet = function.overloadpacket
    if str(packet) == _ATTENTION:
        query, key, value = (tensor.shape for tensor in args[:3])
        return sdpa_flop_count(query, key, value)
    if str(packet) == f"{_ATTENTION}_backward":
        gradient, query, key, value = (tensor.shape for tensor in args[:4])
        return sdpa_backward_flop_count(gradient, query, key, value)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))
