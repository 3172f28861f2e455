"""Train a small classifier on a folder of JPEGs, within two thirds of the memory it would take.

python examples/train_on_images.py            # draws pictures in a temporary folder
python examples/train_on_images.py FOLDER     # FOLDER/train/CLASS/*.jpg, FOLDER/val/CLASS/*.jpg
"""

import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import nn

import bayplan
from bayplan.reporting.inputs import evaluation_text


def build(batch_size: int = 32) -> tuple[nn.Module, tuple, nn.Module]:
    """What is planned: a model, a batch of the form that it takes, and a loss."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))
    batch = (torch.randn(batch_size, 3, 48, 48), torch.randint(2, (batch_size,)))
    return model, batch, nn.CrossEntropyLoss()


def draw(folder: Path) -> None:
    """Bright discs and dark squares, as JPEG files."""
    for part, count in (("train", 96), ("val", 24)):
        for number in range(count):
            image = Image.new("RGB", (64, 64), (90, 90, 40 + number))
            box = [8 + number % 9, 8, 50, 50 + number % 9]
            if is_disc := number % 2 == 0:
                ImageDraw.Draw(image).ellipse(box, fill=(230, 220, 90))
            else:
                ImageDraw.Draw(image).rectangle(box, fill=(20, 10, 60))
            path = folder / part / ("disc" if is_disc else "square") / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model, batch, loss_fn = build()
    made = {"optimizer": torch.optim.AdamW(model.parameters()), "loss_fn": loss_fn}
    plan = bayplan.plan(model, batch, memory="66%", time_limit_seconds=2, **made)
    record = bayplan.run(plan, model, batch, data=folder, epochs=4, **made)
    print(*map(evaluation_text, record.evaluations), sep="\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        if len(sys.argv) == 1:
            draw(Path(scratch))
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
