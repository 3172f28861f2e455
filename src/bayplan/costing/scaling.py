"""Carrying a profile over to another batch size of the same model.

Each node's seconds follow its work: its arithmetic at the best rate that its operator class reached
in the profile, plus its traffic at the rate of all traffic-bound nodes together. So a convolution
scales with the batch, an optimizer update not at all, and a small matrix product that mostly reads
its weights in between. Workspace follows the bytes a node touches; overhead stays.
"""

from collections import defaultdict

import msgspec

from bayplan.costing.roofline import bytes_moved, op_class
from bayplan.data.device import OpClass
from bayplan.data.errors import CaptureError
from bayplan.data.graph import Node, StepGraph
from bayplan.data.profile import Origin, Profile

__all__ = ["same_operators", "scale_profile"]

_STEADY_SECONDS = 2e-5  # shorter nodes measure their launch, not their rate


def same_operators(measured: StepGraph, wanted: StepGraph) -> bool:
    """Whether two steps run the same operators in the same order, so that one prices the other."""
    return [node.op for node in measured.nodes] == [node.op for node in wanted.nodes]


def scale_profile(profile: Profile, measured: StepGraph, wanted: StepGraph) -> Profile:
    """Return the profile that `wanted`, the same operators at another batch size, would have."""
    profile.check_belongs_to(measured)
    if measured.fingerprint == wanted.fingerprint:
        return profile
    _check_same_operators(measured, wanted)
    rates = _Rates(profile, measured)
    seconds, spreads, workspaces = [], [], []
    for index, (old, new) in enumerate(zip(measured.nodes, wanted.nodes, strict=True)):
        old_bytes, new_bytes = bytes_moved(measured, old), bytes_moved(wanted, new)
        ratio = rates.seconds(new, new_bytes) / max(rates.seconds(old, old_bytes), 1e-12)
        seconds.append(profile.seconds[index] * ratio)
        spreads.append(profile.spread_seconds[index] * ratio)
        workspace_bytes = profile.workspace_bytes[index]
        workspaces.append(round(workspace_bytes * new_bytes / old_bytes) if old_bytes else 0)
    growth = sum(seconds) / max(sum(profile.seconds), 1e-12)
    return msgspec.structs.replace(
        profile,
        model=wanted.model,
        fingerprint=wanted.fingerprint,
        origin=Origin.SCALED,
        seconds=tuple(seconds),
        spread_seconds=tuple(spreads),
        workspace_bytes=tuple(workspaces),
        step_spread_seconds=profile.step_spread_seconds * growth,
    )


class _Rates:
    """The rates a profile shows, as a yardstick of work."""

    def __init__(self, profile: Profile, graph: StepGraph) -> None:
        self._flops_per_s: dict[str, float] = defaultdict(lambda: 1e9)
        moved_bytes, moving_seconds = 0, 0.0
        for index, node in enumerate(graph.nodes):
            seconds = profile.seconds[index]
            kind = op_class(node.op)
            # A view moves none of its bytes; interrupted, it would look infinitely fast.
            if seconds < _STEADY_SECONDS or kind is OpClass.VIEW:
                continue
            if node.flops:
                self._flops_per_s[kind] = max(self._flops_per_s[kind], node.flops / seconds)
            else:
                moved_bytes += bytes_moved(graph, node)
                moving_seconds += seconds
        # Not the best: small tensors that lie in a cache show rates that no large one has.
        self._bytes_per_s = moved_bytes / moving_seconds if moved_bytes else 1e9

    def seconds(self, node: Node, moved_bytes: int) -> float:
        """What a node would take at these rates; only ratios of it mean anything."""
        arithmetic = node.flops / self._flops_per_s[op_class(node.op)] if node.flops else 0.0
        return arithmetic + moved_bytes / self._bytes_per_s + 1e-7


def _check_same_operators(measured: StepGraph, wanted: StepGraph) -> None:
    for index, (old, new) in enumerate(zip(measured.nodes, wanted.nodes, strict=False)):
        if old.op != new.op:
            place = " ".join(filter(None, (f"node {index}", new.module, new.source)))
            raise CaptureError(
                f"the step at another batch size runs {new.op} ({place}) where the profiled one"
                f" runs {old.op}; profile at this batch size"
            )
    if len(measured.nodes) != len(wanted.nodes):
        raise CaptureError(
            f"the step has {len(wanted.nodes)} operators at this batch size and"
            f" {len(measured.nodes)} at the profiled one; profile at this batch size"
        )
