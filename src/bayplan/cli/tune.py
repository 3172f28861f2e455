"""The command that tunes the exchange of gradients."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bayplan.cli.app import TARGET_HELP, app
from bayplan.cli.options import Batch, Json, as_json, check_output
from bayplan.data import files
from bayplan.data.errors import ExitCode, UsageError
from bayplan.data.exchange import EXCHANGE_HELP

__all__ = ["tune"]

# One line per paragraph: the terminal's width decides where to break it.
_ABOUT = (
    "Trains for real, until no setting can be faster by more than the noise, and says so. What was"
    " found is kept, so that a second call ends soon; --fresh begins anew. In a script of your own"
    " that torchrun starts, `bayplan.tune(model)` does the same while it trains."
)
_SETTINGS_HELP = "\n".join(
    f"- {name.removesuffix('_bytes').removesuffix('_ms')}: {text}"
    for name, text in EXCHANGE_HELP.items()
)


@app.command(
    sort_key=6.5,
    help_epilogue=f"""\
Examples:
  bayplan tune resnet50 --batch 64 --ranks 4 --log tune.csv -o tuned.json
  bayplan run resnet50 --batch 64 --placement '' --ranks 4 --buckets tuned.json

{_ABOUT}

Settings, with Horovod's names where it has one:
{_SETTINGS_HELP}

{TARGET_HELP}""",
)
def tune(
    target: Annotated[str, Parameter(help="What to train.")],
    /,
    *,
    batch: Batch = None,
    ranks: Annotated[int, Parameter(help="Processes of this machine that share the batch.")] = 2,
    optimizer: Annotated[str, Parameter(help="sgd, adam or adamw.")] = "sgd",
    most_steps: Annotated[
        int | None, Parameter(help="Stop after so many steps at the latest. Default: by itself.")
    ] = None,
    log: Annotated[
        Path | None, Parameter(help="A CSV file with a line for each trial, written at once.")
    ] = None,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="Write the buckets that were found to this file."),
    ] = None,
    logs: Annotated[Path, Parameter(help="The folder for the log of each rank.")] = Path("logs"),
    fresh: Annotated[
        bool, Parameter(negative="", help="Forget what earlier calls have found.")
    ] = False,
    json: Json = False,
) -> int:
    """Find the fastest way to sum a model's gradients over ranks."""
    import tempfile

    from bayplan.data.exchange import BucketFile
    from bayplan.reporting.progress import ProgressBar
    from bayplan.running.ranks.failures import INTERRUPTED
    from bayplan.running.ranks.launching import launch

    if ranks < 2:
        raise UsageError(f"--ranks is {ranks}; gradients are exchanged between 2 or more")
    if batch is not None and batch < ranks:
        raise UsageError(f"--batch is {batch}, fewer samples than the {ranks} ranks; give each one")
    check_output(output)
    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder, ProgressBar() as bar:
        result = Path(folder) / "buckets.json"
        arguments = ["-m", "bayplan.running.tuning.tune_rank", target, "--result", str(result)]
        given = {
            "--batch": None if batch is None else batch // ranks,
            "--optimizer": optimizer,
            "--most-steps": most_steps,
            "--log": None if log is None else log.absolute(),
        }
        for name, value in given.items():
            arguments += [] if value is None else [name, str(value)]
        code = launch(
            [*arguments, *(["--fresh"] if fresh else [])],
            num_ranks=ranks,
            log_folder=logs,
            on_line=bar.say,
        )
        if code == INTERRUPTED:
            raise KeyboardInterrupt(f"trials so far are in {log}" if log else "nothing was kept")
        if code:
            return code
        found = files.read(result, BucketFile)
    if output is not None:
        files.write(output, found)
    if json:
        print(as_json(found))
    else:
        print(f"best: {found.settings}, {len(found.buckets)} buckets")
        print(found.verdict)
    return ExitCode.DONE
