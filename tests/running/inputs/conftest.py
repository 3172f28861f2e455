"""Tiny data, but real: JPEGs by Pillow, tar files, tokens; and a model that can learn them."""

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch import nn

from bayplan.models.targets import Target
from bayplan.preparing.step import PreparedStep

COLORS = {"blue": (50, 60, 220), "green": (40, 200, 60), "red": (220, 40, 40)}
NUM_TRAINING, NUM_EVALUATION = 24, 9  # images of all classes
SIDE = 24


def jpeg(color: tuple[int, int, int], seed: int) -> bytes:
    """A noisy picture of one colour, of a size of its own."""
    drawn = random.Random(seed)
    size = (drawn.randint(30, 60), drawn.randint(30, 60))
    noise = numpy.random.default_rng(seed).integers(-40, 40, (*size, 3))
    pixels = (noise + numpy.array(color)).clip(0, 255).astype(numpy.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "jpeg")
    return stream.getvalue()


def pictures(count: int, *, start: int = 0) -> Iterator[tuple[str, int, bytes]]:
    """Class, its number, and the file of so many images."""
    for number in range(count):
        label = number % len(COLORS)
        name = list(COLORS)[label]
        yield name, label, jpeg(COLORS[name], start + number)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of classes to train on and to evaluate with; only to be read."""
    root = tmp_path_factory.mktemp("images")
    for part, count, start in (("train", NUM_TRAINING, 0), ("val", NUM_EVALUATION, 500)):
        for number, (name, _, content) in enumerate(pictures(count, start=start)):
            (root / part / name).mkdir(parents=True, exist_ok=True)
            (root / part / name / f"{number:03}.jpg").write_bytes(content)
    return root


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as shard:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            shard.addfile(header, io.BytesIO(content))


@pytest.fixture
def make_shard() -> Callable[[Path, list[tuple[str, bytes]]], None]:
    """Write a tar file of names and contents."""
    return write_shard


@pytest.fixture(scope="session")
def shard_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images in three shards to train on and one to evaluate with; only to be read."""
    root = tmp_path_factory.mktemp("shards")
    for part, count, start in (("train", NUM_TRAINING, 0), ("val", NUM_EVALUATION, 500)):
        made = list(enumerate(pictures(count, start=start)))
        per_shard = 10
        for shard, first in enumerate(range(0, count, per_shard)):
            members = [
                member
                for number, (_, label, content) in made[first : first + per_shard]
                for member in (
                    (f"{number:04}.jpg", content),
                    (f"{number:04}.json", b"{}"),
                    (f"{number:04}.cls", str(label).encode()),
                )
            ]
            write_shard(root / f"{part}-{shard:03}.tar", members)
    return root


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text whose next token follows from the last: counting, from random places on."""
    root = tmp_path_factory.mktemp("tokens")
    for name, length in (("train", 4000), ("val", 700)):
        tokens = numpy.arange(length) * 3 % 17
        (root / f"{name}.bin").write_bytes(tokens.astype("<u2").tobytes())
    return root


class Classifier(nn.Module):
    """Small, with what a plan could get wrong: running statistics and random numbers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(3 if not n else 16, 16, 3, padding=1) for n in range(4)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(4))
        self.head = nn.Linear(16, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return self.head(torch.dropout(x.mean((2, 3)), 0.1, self.training))


def build_classifier(
    batch_size: int | None, num_classes: int = 3
) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], nn.Module]:
    torch.manual_seed(3)
    size = batch_size or 8
    batch = torch.randn(size, 3, SIDE, SIDE), torch.randint(num_classes, (size,))
    return Classifier(num_classes), batch, nn.CrossEntropyLoss()


class Reader(nn.Module):
    """Guesses the next token from the last one."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.hidden = nn.Linear(32, 64)
        self.head = nn.Linear(64, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(self.embedding(tokens))))


def build_reader(
    batch_size: int | None, vocabulary: int = 17, sequence: int = 20
) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], object]:
    torch.manual_seed(3)
    tokens = torch.randint(vocabulary, (batch_size or 8, sequence + 1))

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Reader(vocabulary), (tokens[:, :-1].clone(), tokens[:, 1:].clone()), loss_fn


def prepared(
    build: Callable[..., tuple[nn.Module, object, object]], **options: object
) -> PreparedStep:
    target = Target(
        name=build.__name__,
        build=lambda size: build(size, **options),
        takes_batch_size=True,
        default_batch=8,
    )
    return PreparedStep(target=target, batch=8, optimizer="adamw")


@pytest.fixture
def classifier() -> PreparedStep:
    return prepared(build_classifier)


@pytest.fixture
def reader() -> PreparedStep:
    return prepared(build_reader)


@pytest.fixture
def prepare_with() -> Callable[..., PreparedStep]:
    """A step of a model with other sizes: `prepare_with("classifier", num_classes=2)`."""
    builders = {"classifier": build_classifier, "reader": build_reader}
    return lambda name, **options: prepared(builders[name], **options)
