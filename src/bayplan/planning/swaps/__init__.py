"""Moving buffers out of device memory between forward and backward, and back in time."""

from bayplan.planning.swaps.arrangement import Arrangement
from bayplan.planning.swaps.choose import SwapPlan, choose_swaps
from bayplan.planning.swaps.insert import Swap, SwapOps, Swapped, insert_swaps
from bayplan.planning.swaps.lane import LaneTime, Tier, lane_seconds
from bayplan.planning.swaps.unroll import Unrolled, unroll

__all__ = [
    "Arrangement",
    "LaneTime",
    "Swap",
    "SwapOps",
    "SwapPlan",
    "Swapped",
    "Tier",
    "Unrolled",
    "choose_swaps",
    "insert_swaps",
    "lane_seconds",
    "unroll",
]
