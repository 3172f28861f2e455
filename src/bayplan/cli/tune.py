"""`bayplan tune`: find the fastest exchange of gradients."""

from pathlib import Path

from cyclopts import App

from bayplan.cli import options
from bayplan.cli.app import TARGET_HELP
from bayplan.cli.report_options import NO_REPORT, ReportOptions, command_line
from bayplan.data.errors import UsageError
from bayplan.data.exchange import EXCHANGE_HELP

__all__ = ["app", "tune"]

# One line per paragraph: the terminal's width decides where to break it.
_ABOUT = (
    "Trains for real, until no setting can be faster by more than the noise, and says so. The "
    "result is kept, so a second call ends soon; --fresh starts anew. In a script of your own"
    " that torchrun starts, `bayplan.tune(model)` does the same while it trains."
)
_SETTINGS_HELP = "\n".join(
    f"- {name.removesuffix('_bytes').removesuffix('_ms')}: {text}"
    for name, text in EXCHANGE_HELP.items()
)

app = App(
    name="tune",
    help_epilogue=options.unbroken(f"""\
Examples:
  bayplan tune resnet50 --batch 64 --ranks 4 --log tune.csv -o tuned.json
  bayplan tune resnet50 --batch 64 --ranks 4 --report tune.html
  bayplan run resnet50 --batch 64 --placement '' --ranks 4 --buckets tuned.json

{_ABOUT}

Settings, with Horovod's names where it has one:
{_SETTINGS_HELP}

{TARGET_HELP}"""),
)


@app.default
def tune(
    target: str,
    /,
    *,
    batch: options.Batch = None,
    ranks: options.Whole = 2,
    optimizer: str = "sgd",
    most_steps: options.WholeOrNone = None,
    log: Path | None = None,
    output: options.Output = None,
    logs: Path | None = None,
    fresh: options.Flag = False,
    on: options.On = None,
    pictures: ReportOptions = NO_REPORT,
    json: options.Json = False,
) -> int:
    """Start a process for each rank, which train and tune, and show what they found.

    Args:
        target: What to train.
        ranks: Processes of this machine that share the batch.
        optimizer: sgd, adam or adamw.
        most_steps: Stop after this many steps at the latest. Default: stop by itself.
        log: A CSV file with a line for each trial, written at once.
        output: Write the buckets that were found to this file.
        logs: Keep the logs of all ranks in this folder. Default: keep only those of a failed run.
        fresh: Ignore the results of earlier calls.
    """
    import tempfile

    from bayplan.data import files
    from bayplan.data.exchange import BucketFile, TuningRecord
    from bayplan.reporting.progress import ProgressBar
    from bayplan.running.ranks.failures import INTERRUPTED
    from bayplan.running.ranks.launching import launch

    if ranks < 2:
        raise UsageError(f"--ranks is {ranks}; gradients are exchanged between 2 or more")
    if batch is not None and batch < ranks:
        raise UsageError(f"--batch is {batch}, fewer samples than the {ranks} ranks; give each one")
    options.check_output(output)
    pictures.check()
    from bayplan.devices.choosing import device_for_ranks

    device = device_for_ranks(on, ranks)
    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder, ProgressBar() as bar:
        result = Path(folder) / "buckets.json"
        record = Path(folder) / "tuning.json"
        arguments = ["-m", "bayplan.running.tuning.tune_rank", target, "--result", str(result)]
        arguments += ["--record", str(record)]
        given = {
            "--batch": None if batch is None else batch // ranks,
            "--optimizer": optimizer,
            "--on": device.where,
            "--most-steps": most_steps,
            "--log": None if log is None else log.absolute(),
        }
        for name, value in given.items():
            arguments += [] if value is None else [name, str(value)]
        arguments += ["--fresh"] if fresh else []
        code = launch(arguments, num_ranks=ranks, log_folder=logs, on_line=bar.say)
        if code == INTERRUPTED:
            raise KeyboardInterrupt(f"trials so far are in {log}" if log else "nothing was kept")
        if code:
            return code
        tuned = files.read(result, BucketFile)
        found = files.read(record, TuningRecord)
    if pictures.is_wanted:
        from bayplan.reporting.html import Report

        pictures.write(Report(tuning=found, model=target, command=command_line()))
    text = f"best: {tuned.settings}, {len(tuned.buckets)} buckets\n{tuned.verdict}"
    options.show(tuned, text, json=json, output=output)
    return 0
