"""Pipelines of replicated stages: who computes which samples, in which order, and that it ends."""

from bayplan.planning.pipelines.checking import Proof, check_actions
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.policies import SCHEDULES
from bayplan.planning.pipelines.routing import Message, Piece, Routing, resplit, round_robin
from bayplan.planning.pipelines.scheduling import schedule, timeline_of

__all__ = [
    "SCHEDULES",
    "Message",
    "Piece",
    "Pipeline",
    "Proof",
    "Routing",
    "check_actions",
    "resplit",
    "round_robin",
    "schedule",
    "timeline_of",
]
