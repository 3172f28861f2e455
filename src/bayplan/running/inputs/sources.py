"""What is in a folder of data, and whether a model can be trained on it.

Its files tell what the folder holds: `train.bin` or `train.npy` is tokenised text, `*.tar` are
shards, anything else is folders of images. Samples to evaluate with are those of `val`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bayplan.data.errors import FileFault, UsageError
from bayplan.devices.machine import cache_directory
from bayplan.running.inputs.image_folder import ImageFolder, class_names, unread
from bayplan.running.inputs.images import check_pillow
from bayplan.running.inputs.tar_shards import TarShards
from bayplan.running.inputs.tokens import TokenFile
from bayplan.step import Batch, LossFunction, split_batch

__all__ = ["BatchForm", "Data", "Images", "open_data"]

Images = ImageFolder | TarShards
_SYNTHETIC = "synthetic"
_TRAINING, _EVALUATION = ("train", "training"), ("val", "valid", "validation")
_EXPECTED = (
    "expected are folders train/CLASS/*.jpg (and val/CLASS/*.jpg), shards train*.tar (and val*.tar)"
    " with a .cls next to each image, or tokens in train.bin or train.npy (and val.bin)"
)


@dataclass(frozen=True)
class BatchForm:
    """What a step takes: so many samples, images of a shape or windows of tokens.

    Attributes:
        image_shape: channels, height and width; None for text.
        sequence: tokens of a window; None for images.
        num_outputs: classes that the model tells apart, or its vocabulary; None if unknown.
    """

    batch_size: int
    image_shape: tuple[int, int, int] | None = None
    sequence: int | None = None
    num_outputs: int | None = None

    @classmethod
    def of(cls, batch: Batch, loss_fn: LossFunction, output: Any = None) -> "BatchForm":
        """The form of a target's own batch, and of what its model makes of it.

        Raises:
            UsageError: it is neither of images nor of text.
        """
        inputs, targets = split_batch(batch, loss_fn)
        classes = targets[0] if targets else None
        is_pair = isinstance(inputs, torch.Tensor) and isinstance(classes, torch.Tensor)
        outputs = output.shape[-1] if isinstance(output, torch.Tensor) and output.dim() else None
        if is_pair and classes.dtype == torch.int64:
            size = inputs.shape[0]
            if inputs.dim() == 4 and inputs.is_floating_point() and classes.shape == (size,):
                if inputs.shape[1] in (1, 3):
                    shape = (inputs.shape[1], inputs.shape[2], inputs.shape[3])
                    return cls(size, image_shape=shape, num_outputs=outputs)
            elif (
                inputs.dim() == 2 and inputs.dtype == torch.int64 and classes.shape == inputs.shape
            ):
                return cls(size, sequence=inputs.shape[1], num_outputs=outputs)
        raise UsageError(
            "--data gives batches of images (floats of samples x 3 or 1 channels x height x width)"
            " with their classes (int64), or of tokens with the next tokens (int64 of samples x"
            " sequence), as a pair and a loss of two arguments; the target's own batch is neither"
        )


@dataclass(frozen=True)
class Data:
    """Samples to train on, as they lie on the disk.

    Attributes:
        kind: as in `InputRecord`.
        num_synthetic: samples of an epoch that are not read but stand for any; 0 if they are read.
        training, evaluation: images, or files of tokens.
        classes: by name; empty for text, and where shards only number them.
    """

    kind: str
    path: Path
    num_synthetic: int = 0
    training: Images | Path | None = None
    evaluation: Images | Path | None = None
    classes: tuple[str, ...] = ()

    @property
    def is_synthetic(self) -> bool:
        """Whether every step has the target's own batch, and nothing is read."""
        return self.kind == _SYNTHETIC

    def synthetic(self) -> "Data":
        """As many samples, of which none is read."""
        return replace(self, kind=_SYNTHETIC, evaluation=None)

    @cached_property
    def num_classes(self) -> int | None:
        """Of images; None for others."""
        if isinstance(self.training, ImageFolder):
            return len(self.classes)
        if isinstance(self.training, TarShards):
            return int(self.training.labels().max()) + 1
        return None

    def samples(self, form: BatchForm) -> "tuple[Images | TokenFile, Images | TokenFile | None]":
        """Samples to train on and to evaluate with, for a step of this form.

        Raises:
            UsageError: they do not belong together.
        """
        is_text = isinstance(self.training, Path)
        if is_text != (form.sequence is not None):
            has, takes = ("tokens", "images") if is_text else ("images", "tokens")
            raise UsageError(f"{self.path} has {has}, and the model takes {takes}")
        if is_text:
            sequence, vocabulary = form.sequence or 0, form.num_outputs
            training, evaluation = (
                TokenFile(path, sequence=sequence, vocabulary=vocabulary)
                if isinstance(path, Path)
                else None
                for path in (self.training, self.evaluation)
            )
            assert training is not None, "there are no data without samples to train on"
            return training, evaluation
        assert not isinstance(self.training, Path | None), "images"
        assert not isinstance(self.evaluation, Path), "images"
        if form.num_outputs is not None and (self.num_classes or 0) > form.num_outputs:
            raise UsageError(
                f"{self.path} has {self.num_classes} classes, and the model tells"
                f" {form.num_outputs} apart; give it a head of {self.num_classes} outputs"
            )
        return self.training, self.evaluation

    def num_samples(self, form: BatchForm) -> int:
        """Samples of an epoch; a batch of the form must not be larger."""
        count = self.num_synthetic or len(self.samples(form)[0])
        if form.batch_size > count:
            raise UsageError(
                f"a batch of {form.batch_size} is larger than the {count} samples of"
                f" {self.path}; use --batch {count} or a smaller one"
            )
        return count


def open_data(text: str) -> Data:
    """Find out what `--data` names: a folder, a file of tokens, or `synthetic:1281167`."""
    word, colon, number = text.partition(":")
    if word == _SYNTHETIC and colon:
        if not (number.isascii() and number.isdecimal() and int(number)):
            raise UsageError(
                f"--data {text}: say how many samples an epoch has, like synthetic:1281167"
            )
        return Data(_SYNTHETIC, Path(text), num_synthetic=int(number))
    path = Path(text)
    try:
        if path.is_file():
            return _tokens(path, path)
        entries = sorted(path.iterdir())
    except OSError as fault:
        raise unread(path, fault) from None
    for ending in (".bin", ".npy"):
        for word in _TRAINING:
            if (tokens := path / f"{word}{ending}") in entries:
                return _tokens(path, tokens)
    return _shards(path, entries) or _folders(path, entries)


def _tokens(path: Path, training: Path) -> Data:
    if training.suffix not in (".bin", ".npy"):
        raise FileFault(f"{training} is not a data set; {_EXPECTED}")
    evaluation = [training.with_name(f"{word}{training.suffix}") for word in _EVALUATION]
    found = [each for each in evaluation if each.is_file() and each != training]
    return Data("tokens", path, training=training, evaluation=found[0] if found else None)


def _shards(path: Path, entries: list[Path]) -> Data | None:
    def below(words: tuple[str, ...]) -> list[Path]:
        named = [each for each in tars if each.name.startswith(words)]
        folders = [each for each in entries if each.name in words and each.is_dir()]
        return named or sorted(shard for folder in folders for shard in folder.glob("*.tar"))

    tars = [each for each in entries if each.suffix == ".tar"]
    evaluation = below(_EVALUATION)
    training = below(_TRAINING) or [each for each in tars if each not in evaluation]
    if not training:
        return None
    check_pillow()
    images = TarShards(training, cache=cache_directory())
    evaluated = TarShards(evaluation, cache=cache_directory()) if evaluation else None
    data = Data("tar shards", path, training=images, evaluation=evaluated)
    if not len(images):
        raise UsageError(f"{training[0]} has no images; {_EXPECTED}")
    _check_classes(data)
    if evaluated is not None and len(evaluated):
        largest = int(evaluated.labels().max())
        if largest >= (data.num_classes or 0):
            raise UsageError(
                f"{evaluation[0].parent} has class {largest} to evaluate with, and those to train"
                f" on are 0 to {(data.num_classes or 0) - 1}"
            )
    return data


def _folders(path: Path, entries: list[Path]) -> Data:
    folders = {each.name: each for each in entries if each.is_dir()}
    training = next((folders[word] for word in _TRAINING if word in folders), path)
    evaluation = next((folders[word] for word in _EVALUATION if word in folders), None)
    if training == path:
        evaluation = None  # a class of that name
    classes = class_names(training)
    check_pillow()
    images = ImageFolder(training, classes)
    if not len(images):
        raise UsageError(f"{training} has no images; {_EXPECTED}")
    evaluated = None
    if evaluation is not None:
        unknown = sorted({*class_names(evaluation)} - {*classes})
        if unknown:
            raise UsageError(
                f"{evaluation} has the class {unknown[0]}, which {training} has not; both need the"
                " same folders"
            )
        evaluated = ImageFolder(evaluation, classes)
        if not len(evaluated):
            raise UsageError(
                f"{evaluation} has no images in folders of classes; sort them into {classes[0]}, …,"
                " or leave it out"
            )
    data = Data("images", path, training=images, evaluation=evaluated, classes=tuple(classes))
    empty = {*range(len(classes))} - {*images.labels().tolist()}
    if empty:
        raise UsageError(f"{training / classes[min(empty)]} has no images; remove the folder")
    _check_classes(data)
    return data


def _check_classes(data: Data) -> None:
    if (data.num_classes or 0) < 2:
        named = f" ({data.classes[0]})" if data.classes else ""
        raise UsageError(
            f"{data.path} has one class{named}, and there is nothing to learn from one; {_EXPECTED}"
        )
