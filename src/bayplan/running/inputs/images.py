"""Encoded images to pixels: decoded, cropped and flipped as is usual for ImageNet.

In training a random part of the image is taken, of 8 to 100 % of its area and a width of 3/4 to 4/3
of its height, and flipped in half of all cases. In evaluation it is the middle of the image, whose
shorter side is resized to 256/224 of what the model takes. What is random is drawn from a generator
of seed, epoch and sample, so it is the same with any number of workers.

Pixels stay bytes until they are on the model's device (`normalise`), so a quarter of the bytes
travels.
"""

import io
import math
import random
import warnings
from typing import Any

import numpy
import torch

from bayplan.data.errors import FileFault, UsageError

__all__ = ["ImageReader", "check_pillow", "normalise"]

# Pillow knows formats that are programs, too, such as EPS.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_AREA, _LOG_RATIO = (0.08, 1.0), math.log(4 / 3)
_TRIES = 10  # to draw a part that lies within the image
_EVALUATION_RESIZE = 256 / 224
# Of ImageNet's images, by channel, as published models have them; of their mean where one is grey.
_MEAN = {3: (0.485, 0.456, 0.406), 1: (0.449,)}
_DEVIATION = {3: (0.229, 0.224, 0.225), 1: (0.226,)}


def check_pillow() -> None:
    """Refuse to read images where what decodes them is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UsageError(
            "reading images needs Pillow, which is not installed: pip install 'bayplan[data]'"
        ) from None


class ImageReader:
    """Turns files into pixels of one size; `channels` is 3, or 1 for grey."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        self.shape = (channels, height, width)

    def read(self, content: bytes, *, draw: tuple[int, int, int] | None) -> Any:
        """Decode one image.

        Args:
            content: of its file, which is not trusted.
            draw: seed, epoch and sample, for a random part; None takes the middle.

        Returns:
            Bytes of shape (channels, height, width).

        Raises:
            FileFault: it is no image that can be read.
        """
        from PIL import Image

        channels, height, width = self.shape
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(io.BytesIO(content), formats=_FORMATS) as opened:
                    image = opened.convert("RGB" if channels == 3 else "L")
        except MemoryError:
            raise
        except Exception as fault:  # decoders of untrusted bytes raise whatever they come upon
            raise FileFault(f"no image that can be read: {fault}") from None
        if draw is None:
            box, is_flipped = _middle(image.size, (width, height)), False
        else:
            generator = random.Random("{}/{}/{}".format(*draw))
            box = _random_part(image.size, generator, width / height)
            is_flipped = generator.random() < 0.5
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
        if is_flipped:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return numpy.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


def _random_part(
    size: tuple[int, int], generator: random.Random, shape: float
) -> tuple[float, float, float, float]:
    """A random box of an image; `shape` is the width that is wanted for a height of 1."""
    width, height = size
    for _ in range(_TRIES):
        area = generator.uniform(*_AREA) * width * height
        ratio = shape * math.exp(generator.uniform(-_LOG_RATIO, _LOG_RATIO))
        part_width, part_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < part_width <= width and 0 < part_height <= height:
            left = generator.randint(0, width - part_width)
            top = generator.randint(0, height - part_height)
            return left, top, left + part_width, top + part_height
    return _largest_middle(size, shape, 1.0)


def _middle(size: tuple[int, int], wanted: tuple[int, int]) -> tuple[float, float, float, float]:
    """The box that a resize of the shorter side, and a crop of the middle, would leave."""
    return _largest_middle(size, wanted[0] / wanted[1], 1 / _EVALUATION_RESIZE)


def _largest_middle(
    size: tuple[int, int], shape: float, share: float
) -> tuple[float, float, float, float]:
    width, height = size
    part_height = share * min(height, width / shape)
    part_width = part_height * shape
    left, top = (width - part_width) / 2, (height - part_height) / 2
    return left, top, left + part_width, top + part_height


def normalise(pixels: torch.Tensor, images: torch.Tensor) -> None:
    """Write pixels into a model's batch, each channel with mean 0 and deviation 1 on ImageNet.

    Args:
        pixels: bytes, on any device.
        images: floats of the same shape, on the device of the model.
    """
    channels = pixels.shape[1]
    mean, deviation = (
        torch.tensor(values[channels], device=images.device).reshape(1, channels, 1, 1)
        for values in (_MEAN, _DEVIATION)
    )
    whole = images if images.dtype == torch.float32 else torch.empty_like(images, dtype=torch.float)
    whole.copy_(pixels, non_blocking=True).div_(255).sub_(mean).div_(deviation)
    if whole is not images:
        images.copy_(whole)
