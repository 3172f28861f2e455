"""Options about checkpoints, of `bayplan run`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from bayplan.cli import options
from bayplan.data.errors import UsageError

if TYPE_CHECKING:
    from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions

__all__ = ["NO_CHECKPOINTS", "SaveOptions"]


@Parameter(name="*", group="Checkpoints")
@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """What may be said about checkpoints.

    Attributes:
        checkpoint: Save the training into this folder, at the end too, and on Ctrl-C and SIGTERM.
            --steps then counts from the beginning, and the first of a run warms up.
        every: Steps between two checkpoints. Default: 50.
        keep: How many checkpoints to keep. Default: 2.
        resume: Continue from the newest complete checkpoint, if there is one, whichever plan saved
            it.
        replan: If memory runs out, plan again within less and continue from the newest checkpoint.
    """

    checkpoint: Path | None = None
    every: options.WholeOrNone = None
    keep: options.WholeOrNone = None
    resume: options.Flag = False
    replan: options.Flag = False

    def given(self) -> "CheckpointOptions | None":
        """None where no checkpoints are asked for."""
        if self.checkpoint is None:
            if self != NO_CHECKPOINTS:
                raise UsageError("--every, --keep, --resume and --replan need --checkpoint DIR")
            return None
        from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions

        return CheckpointOptions(
            folder=self.checkpoint,
            every=50 if self.every is None else self.every,
            keep=2 if self.keep is None else self.keep,
            resume=self.resume,
        )


NO_CHECKPOINTS = SaveOptions()
