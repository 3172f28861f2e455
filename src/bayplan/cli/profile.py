"""`bayplan profile`: measure what every operator of a step costs."""

from cyclopts import App

from bayplan.cli import options
from bayplan.cli.app import TARGET_HELP

__all__ = ["app", "profile"]

app = App(
    name="profile",
    help_epilogue=f"""\
Examples:
  bayplan profile resnet50 --batch 8 -o resnet50.profile.json
  bayplan check resnet50 --batch 8 --memory 8GiB --profile resnet50.profile.json

{TARGET_HELP}""",
)


@app.default
def profile(
    target: options.Target,
    /,
    *,
    batch: options.Batch = None,
    output: options.Output = None,
    device: options.Device = None,
    on: options.On = None,
    optimizer: options.Optimizer = "adamw",
    autocast: options.Autocast = "none",
    repeats: options.Whole = 5,
    clock: str = "wall",
    again: options.Again = False,
    json: options.Json = False,
) -> None:
    """Run the step here, or derive its costs for another device.

    Args:
        output: Also write the result to this file.
        repeats: Steps timed as a whole, and as many timed operator by operator.
        clock: wall, or cpu: processor time of one thread, which other processes do not disturb.
    """
    from bayplan.data.errors import UsageError
    from bayplan.data.profile import Clock, Origin

    chosen_clock = Clock.parse(clock)
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; at least 1 step must run to be measured")
    kind = options.device_kind(device, on=on)
    options.check_output(output)
    from bayplan.preparing.sources import prepare
    from bayplan.reporting.plans import busy_text
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.text import profile_text

    with ProgressBar() as bar:
        step = prepare(
            target,
            batch,
            device=kind,
            on=on,
            optimizer=optimizer,
            autocast=autocast,
            again=again,
            on_progress=bar,
        )
        measured = step.measured_profile(repeats=repeats, clock=chosen_clock)
    if measured.origin is not Origin.DERIVED:
        options.complain(busy_text(measured.spread_share))
    options.show(measured, profile_text(step.graph, measured), json=json, output=output)
