"""Options of `bayplan run` about what it trains on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bayplan.cli import options
from bayplan.data.errors import UsageError

if TYPE_CHECKING:
    from bayplan.running.inputs.feed import FeedOptions
    from bayplan.running.inputs.sources import Data

__all__ = ["NO_DATA", "DataOptions"]


@Parameter(name="*", group="Data")
@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What may be said about the data of a run.

    Attributes:
        epochs: Passes over the data. Default: 1, without --steps.
        synthetic: Read nothing, and run as many steps as --data would.
    """

    data: Annotated[
        str | None,
        Parameter(
            help="A folder of images (train/CLASS/*.jpg, val/CLASS/*.jpg), of tar shards or of"
            " tokens (train.bin, val.bin); or synthetic:1281167, for an epoch of that many "
            "samples, without reading. Default: every step has the target's own batch."
        ),
    ] = None
    epochs: options.WholeOrNone = None
    workers: Annotated[
        options.WholeOrNone,
        Parameter(help="Processes that read samples. Default: for images, by the number of cores."),
    ] = None
    skip_unreadable: Annotated[
        options.Flag,
        Parameter(help="Use the next image in place of one that cannot be read; say how many."),
    ] = False
    synthetic: options.Flag = False

    def opened(self, *, seed: int, steps: int | None) -> "tuple[Data, FeedOptions] | None":
        """The data, which are there and are no others than they seem; None without any."""
        if self.data is None:
            if self != NO_DATA:
                raise UsageError(
                    "--epochs, --workers, --skip-unreadable and --synthetic are about --data; say"
                    " which, like --data /data/imagenet or --data synthetic:1281167"
                )
            return None
        from bayplan.data.record import DataPosition
        from bayplan.running.inputs.feed import FeedOptions
        from bayplan.running.inputs.sources import open_data

        chosen = FeedOptions(
            epochs=self.epochs,
            steps=steps,
            workers=self.workers,
            skip_unreadable=self.skip_unreadable,
            position=DataPosition(seed=seed),
        )
        found = open_data(self.data)
        return found.synthetic() if self.synthetic else found, chosen


NO_DATA = DataOptions()
