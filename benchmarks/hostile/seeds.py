"""Real files of every kind that bayplan reads, made by bayplan itself for a small model."""

from pathlib import Path

import torch
from torch import nn

import bayplan
from bayplan.costing.catalogue import load_device, read_cluster, read_cluster_file
from bayplan.data import files
from bayplan.data.exchange import BucketFile

__all__ = ["write_seeds"]

_TOPOLOGIES = Path(__file__).parents[2] / "tests" / "data" / "topologies"


def write_seeds(folder: Path) -> None:
    """A folder for each reader, with one file or a few."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
    batch = torch.randn(1024, 64)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    graph = bayplan.capture(model, batch, loss, optimizer="adamw", name="tiny")
    device = load_device("titan-v")
    plan = bayplan.plan(model, batch, loss, memory="90%", time_limit_seconds=1)
    ranks = bayplan.plan(model, batch, loss, placement="0:0-1.0:2", num_micro_batches=2)
    nouns = {
        "plan": plan,
        "rank_plan": ranks,
        "record": bayplan.simulate(graph, device=device),
        "graph": graph,
        "profile": bayplan.profile(model, batch, loss, optimizer="adamw", repeats=1),
        "device": device,
        "cluster": read_cluster("titanv-8"),
        "buckets": BucketFile(model="tiny", buckets=(("0.0.weight",), ("1.0.weight", "1.0.bias"))),
    }
    for name, noun in nouns.items():
        (folder / name).mkdir()
        files.write(folder / name / "seed.json", noun)
    (folder / "graph.json").write_bytes(files.encode(graph))
    texts = {
        "cluster_yaml": [
            files.encode_yaml(read_cluster_file(name)).decode()
            for name in ("titanv-2x8", "dgx-h100", "rtx-4090-4")
        ],
        "topology": [path.read_text() for path in sorted(_TOPOLOGIES.glob("*.txt"))],
        "placement": ["0:0-6.0:7", "0:0-7,1:0-7.0:0-7,1:0-7", "0:0,0:2.1:3"],
        "sizes": ["8GiB", "40%", "1.5 MiB", "7606 MB", "123456", "12.5%"],
    }
    for name, seeds in texts.items():
        (folder / name).mkdir()
        for index, text in enumerate(seeds):
            (folder / name / f"{index}.txt").write_text(text)
