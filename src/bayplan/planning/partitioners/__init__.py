"""The partitioners that ours is compared with: PipeDream's, OneFlow's, and even splits."""

from bayplan.planning.partitioners.machines import MachineLevel, Machines, machines_of
from bayplan.planning.partitioners.pipedream import Optimum, PipeDreamOptions, StageRange, optimize
from bayplan.planning.partitioners.pipedream_split import pipedream, pipedream_split
from bayplan.planning.partitioners.profiled_chain import (
    cut_layers,
    infer_num_samples,
    profiled_chain,
)
from bayplan.planning.partitioners.registry import PARTITIONERS, Partitioner, find_partitioner
from bayplan.planning.partitioners.states import States, chain_states, graph_states

__all__ = [
    "PARTITIONERS",
    "MachineLevel",
    "Machines",
    "Optimum",
    "Partitioner",
    "PipeDreamOptions",
    "StageRange",
    "States",
    "chain_states",
    "cut_layers",
    "find_partitioner",
    "graph_states",
    "infer_num_samples",
    "machines_of",
    "optimize",
    "pipedream",
    "pipedream_split",
    "profiled_chain",
]
