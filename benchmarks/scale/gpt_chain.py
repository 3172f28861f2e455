"""A GPT as a chain, by arithmetic: operations and bytes of its layers over a device's speeds.

As published for GPT-3 (Brown et al. 2020, table 2.1): 96 layers of 12288 features, 96 heads, 2048
tokens, 50257 words. A layer is four matrix products of attention and two of its feed-forward part,
`24 h^2` operations per token, and the two products with the sequence itself, `4 s h`. It keeps
about `34 s h` bytes (Korthikanti et al. 2022, without the matrix of attention, which is not kept).
"""

from dataclasses import dataclass

from bayplan.data.chain import Chain, Layer
from bayplan.data.device import DeviceKind, OpClass

__all__ = ["GPT3", "STATE_PER_PARAMETER", "Gpt", "gpt_chain"]

_WEIGHT_BYTES = 2  # bfloat16
# Of optimizer state for each byte of weights: a float32 copy of them, and two moments.
STATE_PER_PARAMETER = 12 / _WEIGHT_BYTES
# The classes' efficiencies are of large operators, and kernels between them take time as well.
_SPREAD = 0.15


@dataclass(frozen=True)
class Gpt:
    """The sizes of a GPT."""

    num_layers: int = 96
    features: int = 12288
    tokens: int = 2048
    words: int = 50257


GPT3 = Gpt()


def gpt_chain(kind: DeviceKind, gpt: Gpt = GPT3) -> Chain:
    """One sequence through every layer, forward and backward, on one device."""
    tokens, features = gpt.tokens, gpt.features
    matmul = kind.flops_per_s["bfloat16"].value * kind.efficiency[OpClass.MATMUL].value
    attention = kind.flops_per_s["bfloat16"].value * kind.efficiency[OpClass.ATTENTION].value
    memory = kind.bandwidth_bytes_per_s.value * kind.efficiency[OpClass.ELEMENTWISE].value
    sent = _WEIGHT_BYTES * tokens * features
    held = 34 * tokens * features
    forward = (
        24 * features**2 * tokens / matmul
        + 4 * tokens * features * tokens / attention
        + held / memory
    )
    launches = 20 * kind.launch_seconds.value
    block_parameters = _WEIGHT_BYTES * (12 * features**2 + 13 * features)
    words = _WEIGHT_BYTES * gpt.words * features
    head = 2 * features * gpt.words * tokens / matmul
    embedding = Layer(
        name="embedding",
        forward_seconds=sent / memory,
        backward_seconds=2 * sent / memory,
        parameter_bytes=words + _WEIGHT_BYTES * tokens * features,
        held_bytes=8 * tokens,
        sent_bytes=sent,
    )
    blocks = [
        Layer(
            name=f"block {at}",
            forward_seconds=forward + launches,
            backward_seconds=2 * (forward + launches),
            fixed_forward_seconds=launches,
            fixed_backward_seconds=2 * launches,
            parameter_bytes=block_parameters,
            held_bytes=held,
            passing_bytes=8 * tokens * features,
            sent_bytes=sent,
        )
        for at in range(gpt.num_layers)
    ]
    loss = Layer(
        name="head",
        forward_seconds=head,
        backward_seconds=2 * head,
        parameter_bytes=words,
        held_bytes=sent + 4 * tokens * gpt.words,
        passing_bytes=4 * tokens * gpt.words,
    )
    return Chain(
        name=f"gpt of {gpt.num_layers} layers",
        num_samples=1,
        layers=(embedding, *blocks, loss),
        device=kind.name,
        source="arithmetic over the device's data sheet and efficiencies",
        spread=_SPREAD,
    )
