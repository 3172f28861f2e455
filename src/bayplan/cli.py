"""The command line: words in, words out; every decision is made elsewhere.

Results go to stdout, progress and errors to stderr. torch is imported only by the commands that
need it, inside them, so that `--help` answers at once.
"""

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, CycloptsError, Parameter

from bayplan.data import files
from bayplan.data.errors import BayplanError, CaptureError, ExitCode

if TYPE_CHECKING:
    from bayplan.questions import Question

__all__ = ["app", "main"]

# One line per paragraph: the terminal's width decides where to break it.
_TARGET_HELP = (
    "A TARGET is the name of a reference model (resnet50, vgg16, gpt, llama-7b, …; `bayplan doctor`"
    " lists them all), or module:function of your own, found from the folder you are in. The"
    " function returns (model, batch, loss), where loss may be None if the model returns its own;"
    " if it has a parameter batch_size, that is what --batch sets."
)
_EXIT_HELP = (
    "Results go to stdout, progress and errors to stderr. Exit codes: 0 done or fits, 1 bug,"
    " 2 usage, 3 does not fit, 4 the run broke the plan, 5 the profile or plan belongs to another"
    " model. BAYPLAN_CACHE is the folder that keeps profiles; without it, the user's cache."
)

app = App(
    name="bayplan",
    help="Know whether a training step fits, and how fast it is, before it runs.",
    help_epilogue=f"""\
Start with:
  bayplan fit resnet50 --batch 32 --memory 8GiB
  bayplan doctor

{_TARGET_HELP}

{_EXIT_HELP}""",
    help_format="plaintext",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # `_run` says what Ctrl-C left behind
)

Target = Annotated[str, Parameter(help="A reference model, or module:function of your own.")]
Batch = Annotated[
    int | None,
    Parameter(name=["--batch", "-b"], help="Samples per step. Default: the target's own."),
]
Optimizer = Annotated[str, Parameter(help="sgd (with momentum), adam, adamw or none.")]
Autocast = Annotated[str, Parameter(help="Mixed precision of the forward: bf16, fp16 or none.")]
Device = Annotated[
    str | None,
    Parameter(
        help="A device that need not be here: h100, titan-v, …, or a device file (YAML); times are"
        " then derived from its figures. Default: this machine, on which the step is measured."
    ),
]
Cache = Annotated[
    bool, Parameter(help="Take a kept profile; --no-cache measures anew and replaces it.")
]
Json = Annotated[
    bool,
    Parameter(name="--json", negative="", show_default=False, help="Print JSON for machines."),
]
Output = Annotated[
    Path | None, Parameter(name=["--output", "-o"], help="Also write the result to this file.")
]


@app.command(
    sort_key=1,
    help_epilogue=f"""\
Examples:
  bayplan fit resnet50 --batch 32 --memory 8GiB
  bayplan fit my_project.train:build --batch 4 --device h100
  bayplan fit resnet50 --batch 32 --device h100 --autocast bf16 --json

{_TARGET_HELP}

Exit code 0 if it fits, 3 if it does not.""",
)
def fit(
    target: Target,
    /,
    *,
    batch: Batch = None,
    memory: Annotated[
        str | None,
        Parameter(
            allow_leading_hyphen=True,  # so that -1GiB is told what is wrong with it
            help="The limit, like 8GiB. Default: what the device has to give.",
        ),
    ] = None,
    device: Device = None,
    cluster: Annotated[
        Path | None, Parameter(help="A cluster file; its device with the least memory is asked.")
    ] = None,
    profile: Annotated[
        Path | None,
        Parameter(help="A profile of this very step by `bayplan profile`. Default: make one."),
    ] = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
    cache: Cache = True,
    json: Json = False,
) -> int:
    """Say whether a training step fits, why, and how fast it will be."""
    from bayplan.data.profile import Profile
    from bayplan.data.units import parse_bytes
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.text import verdict_text

    memory_bytes = None if memory is None else parse_bytes(memory)
    given = None if profile is None else files.read(profile, Profile)
    question = _question(
        target, batch=batch, device=device, cluster=cluster, optimizer=optimizer, autocast=autocast
    )
    from bayplan.fitting import fit as answer  # here: a mistake is told before torch is imported

    with ProgressBar() as bar:
        options = {"memory_bytes": memory_bytes, "profile": given, "use_cache": cache}
        verdict = answer(question, **options, on_progress=bar)
    print(_json(verdict) if json else verdict_text(verdict))
    return ExitCode.DONE if verdict.fits else ExitCode.DOES_NOT_FIT


@app.command(
    sort_key=2,
    help_epilogue=f"""\
Examples:
  bayplan profile resnet50 --batch 8 -o resnet50.profile.json
  bayplan fit resnet50 --batch 8 --memory 8GiB --profile resnet50.profile.json

{_TARGET_HELP}""",
)
def profile(
    target: Target,
    /,
    *,
    batch: Batch = None,
    output: Output = None,
    device: Device = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
    repeats: Annotated[
        int, Parameter(help="Steps timed as a whole, and as many timed operator by operator.")
    ] = 5,
    clock: Annotated[
        str,
        Parameter(help="wall, or cpu: processor time of one thread, which ignores neighbours."),
    ] = "wall",
    cache: Cache = True,
    json: Json = False,
) -> int:
    """Measure seconds and workspace of every operator by running the step."""
    from bayplan.data.errors import UsageError
    from bayplan.data.profile import Clock
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.text import profile_text

    chosen_clock = Clock.parse(clock)
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; at least 1 step must run to be measured")
    question = _question(target, batch=batch, device=device, optimizer=optimizer, autocast=autocast)
    _check_output(output)
    from bayplan.fitting import profile_question

    with ProgressBar() as bar:
        bar("capturing", 0, 1)
        graph = question.capture()
        options = {"repeats": repeats, "clock": chosen_clock, "use_cache": cache}
        measured = profile_question(question, graph, **options, on_progress=bar)
    if output is not None:
        files.write(output, measured)
    print(_json(measured) if json else profile_text(graph, measured))
    return ExitCode.DONE


@app.command(
    sort_key=3,
    help_epilogue=f"""\
Examples:
  bayplan capture resnet50 --batch 32 --device h100 -o resnet50.graph.json
  bayplan simulate resnet50.graph.json --device h100

{_TARGET_HELP}""",
)
def capture(
    target: Target,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="Write the graph here.")],
    batch: Batch = None,
    device: Annotated[
        str | None, Parameter(help="As this device would run it, like h100. Default: this machine.")
    ] = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
) -> int:
    """Write the graph of one training step, without allocating the model."""
    from bayplan.reporting.progress import ProgressBar

    question = _question(target, batch=batch, device=device, optimizer=optimizer, autocast=autocast)
    _check_output(output)
    with ProgressBar() as bar:
        bar("capturing", 0, 1)
        graph = question.capture()
    files.write(output, graph)
    print(f"{graph.model}: {len(graph.nodes)} nodes, fingerprint {graph.fingerprint} -> {output}")
    return ExitCode.DONE


@app.command(
    sort_key=4,
    help_epilogue="""\
Examples:
  bayplan simulate resnet50.graph.json --device h100 -o resnet50.record.json
  bayplan simulate resnet50.graph.json --profile resnet50.profile.json""",
)
def simulate(
    graph: Annotated[Path, Parameter(help="A graph written by `bayplan capture`.")],
    /,
    *,
    profile: Annotated[
        Path | None, Parameter(help="What its operators cost, by `bayplan profile`.")
    ] = None,
    device: Annotated[
        str | None,
        Parameter(
            help="A device of the catalogue (h100, titan-v, …) or a device file (YAML); needed"
            " where there is no profile."
        ),
    ] = None,
    output: Output = None,
    json: Json = False,
) -> int:
    """Replay a captured graph with a profile, or on a device of the catalogue."""
    from bayplan.api import simulate as replay
    from bayplan.data.errors import FileFault
    from bayplan.data.graph import StepGraph
    from bayplan.data.profile import Profile
    from bayplan.reporting.text import record_text

    step = files.read(graph, StepGraph)
    if not step.nodes:
        raise FileFault(f"{graph}: nodes is empty; there is no step to simulate")
    costs = None if profile is None else files.read(profile, Profile)
    record = replay(step, costs, device=device)
    if output is not None:
        files.write(output, record)
    print(_json(record) if json else record_text(record))
    return ExitCode.DONE


@app.command(
    sort_key=5,
    help_epilogue="""\
Examples:
  bayplan report run.json
  bayplan report predicted.record.json --against run.json

A record comes from `bayplan simulate -o`, or from `with bayplan.record("run.json"):` in a loop.""",
)
def report(
    record: Annotated[Path, Parameter(help="A record, simulated or measured.")],
    /,
    *,
    against: Annotated[
        Path | None, Parameter(help="Another record, to print both and how far they differ.")
    ] = None,
) -> int:
    """Print a record; with --against another one, predicted next to measured."""
    from bayplan.data.record import RunRecord
    from bayplan.reporting.text import comparison_text, record_text

    first = files.read(record, RunRecord)
    print(record_text(first))
    if against is not None:
        second = files.read(against, RunRecord)
        print(record_text(second))
        print(comparison_text(first, second))
    return ExitCode.DONE


@app.command(sort_key=6, help_epilogue="Exit code 0 if all is well, 2 if something is BAD.")
def doctor() -> int:
    """Check this machine: versions, devices, exact memory counting, cache, what is known."""
    from bayplan.doctor import examine
    from bayplan.reporting.text import findings_text

    findings = examine()
    print(findings_text(findings))
    return ExitCode.DONE if all(finding.is_good for finding in findings) else ExitCode.USAGE


def main(arguments: list[str] | None = None) -> None:
    """Run a command and end the process with the exit code of the design."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without ± shows ?, and no error
            stream.reconfigure(errors="replace")
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    try:
        code = app(
            arguments or ["--help"],
            exit_on_error=False,
            print_error=False,
            result_action="return_int_as_exit_code_else_zero",
        )
        sys.stdout.flush()  # here, where a closed pipe can still be handled
        return code
    except CycloptsError as fault:
        command = " ".join(("bayplan", *(fault.command_chain or ())))
        _complain(f"{fault}\nSee `{command} --help`.")
        return ExitCode.USAGE
    except BayplanError as fault:
        if isinstance(fault, CaptureError):
            _show_users_traceback(fault)
        _complain(str(fault))
        return fault.exit_code
    except KeyboardInterrupt:
        _complain("interrupted; no file was changed")
        return 130
    except BrokenPipeError:  # `bayplan … | head` has read enough; nothing more may be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except Exception:
        traceback.print_exc()
        _complain("this is a bug of bayplan; please report it with the lines above")
        return ExitCode.BUG


def _complain(message: str) -> None:
    print(f"bayplan: {message}", file=sys.stderr)


def _check_output(path: Path | None) -> None:
    """Refuse an output that cannot be written before the step is measured, not after."""
    if path is not None:
        from bayplan.running.recorder import check_writable

        check_writable(path)


def _show_users_traceback(fault: CaptureError) -> None:
    """Where the user's own code failed, their frames come first and ours not at all."""
    if fault.__cause__ is not None:
        from bayplan.capturing.explain import users_traceback

        print(users_traceback(fault.__cause__), end="", file=sys.stderr)


def _json(noun: msgspec.Struct) -> str:
    return msgspec.json.encode(noun).decode()


def _question(
    target: str,
    *,
    batch: int | None,
    device: str | None = None,
    cluster: Path | None = None,
    optimizer: str,
    autocast: str,
) -> "Question":
    from bayplan.data.cluster import Cluster
    from bayplan.data.errors import UsageError
    from bayplan.profiling.catalogue import load_device

    if device is not None and cluster is not None:
        raise UsageError("--device and --cluster both name the device; give one of them")
    kind = None if device is None else load_device(device)
    if cluster is not None:
        described = files.read(cluster, Cluster)
        kinds = [described.kinds[one.kind] for one in described.devices]
        kind = min(kinds, key=lambda one: one.memory_bytes.value)

    from bayplan.questions import Question
    from bayplan.targets import resolve_target

    return Question(
        target=resolve_target(target),
        batch=batch,
        optimizer=optimizer,
        autocast=autocast,
        device=kind,
    )
