"""The exchange of gradients: what travels together, when, and what no plan can beat."""

from bayplan.data.link_cost import LinkCost
from bayplan.planning.exchange.bounds import least_end_seconds
from bayplan.planning.exchange.bucket_plan import BucketPlan, Gradient, GradientPart, PlannedBucket
from bayplan.planning.exchange.bucketing import Order, plan_buckets
from bayplan.planning.exchange.timelines import (
    ddp_timeline,
    filled,
    filled_timeline,
    horovod_timeline,
    one_by_one_timeline,
    one_message_timeline,
)

__all__ = [
    "BucketPlan",
    "Gradient",
    "GradientPart",
    "LinkCost",
    "Order",
    "PlannedBucket",
    "ddp_timeline",
    "filled",
    "filled_timeline",
    "horovod_timeline",
    "least_end_seconds",
    "one_by_one_timeline",
    "one_message_timeline",
    "plan_buckets",
]
