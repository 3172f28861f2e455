"""The command line: words in, words out; every decision is made elsewhere.

Results go to stdout, progress and errors to stderr. torch is imported only by the commands that
need it, inside them, so that `--help` answers at once.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, CycloptsError, Parameter

from bayplan.data import files
from bayplan.data.errors import BayplanError, ExitCode

if TYPE_CHECKING:
    from bayplan.questions import Question

__all__ = ["app", "main"]

app = App(
    name="bayplan",
    help="Know whether a training step fits, and how fast it is, before it runs.",
    help_epilogue=(
        "A TARGET is a reference model (resnet50, vgg16, gpt, llama-7b, …: see `bayplan doctor`)"
        " or module:function, where the function returns model, batch and loss and takes the batch"
        " size. Exit codes: 0 done or fits, 1 bug, 2 usage, 3 does not fit, 4 the run broke the"
        " plan, 5 the profile or plan belongs to another model."
    ),
    help_format="plaintext",
    version_flags=["--version"],
)

Batch = Annotated[
    int | None,
    Parameter(name=["--batch", "-b"], help="Samples per step; the target's own default."),
]
Optimizer = Annotated[str, Parameter(help="sgd (with momentum), adam, adamw or none.")]
Autocast = Annotated[str, Parameter(help="Mixed precision of the forward: bf16, fp16 or none.")]
Device = Annotated[
    str | None,
    Parameter(
        help="A device that need not be here: h100, titan-v, …, or a device file (YAML)."
        " Default: the device of this machine, on which the step is measured."
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON for machines.")]
Output = Annotated[Path | None, Parameter(name=["--output", "-o"], help="Write the result here.")]


@app.command
def fit(
    target: str,
    *,
    batch: Batch = None,
    memory: Annotated[
        str | None, Parameter(help="The limit, like 8GiB. Default: what the device has free.")
    ] = None,
    device: Device = None,
    cluster: Annotated[
        Path | None, Parameter(help="A cluster file; its device with the least memory is asked.")
    ] = None,
    profile: Annotated[
        Path | None, Parameter(help="A profile made by `bayplan profile` of this very step.")
    ] = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
    json: Json = False,
) -> int:
    """Say whether a training step fits, why, and how fast it will be.

    Examples:
      bayplan fit resnet50 --batch 32 --memory 8GiB
      bayplan fit my_project.train:build --batch 4 --device h100
    """
    from bayplan.data.profile import Profile
    from bayplan.data.units import parse_bytes
    from bayplan.fitting import fit as answer
    from bayplan.reporting.text import verdict_text

    memory_bytes = None if memory is None else parse_bytes(memory)
    given = None if profile is None else files.read(profile, Profile)
    question = _question(
        target, batch=batch, device=device, cluster=cluster, optimizer=optimizer, autocast=autocast
    )
    with _Bar() as bar:
        verdict = answer(question, memory_bytes=memory_bytes, profile=given, on_progress=bar)
    print(_json(verdict) if json else verdict_text(verdict))
    return ExitCode.DONE if verdict.fits else ExitCode.DOES_NOT_FIT


@app.command
def profile(
    target: str,
    *,
    batch: Batch = None,
    output: Output = None,
    device: Device = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
    repeats: Annotated[int, Parameter(help="Steps to time, plain and watched, each.")] = 5,
    clock: Annotated[str, Parameter(help="wall, or cpu: processor time of one thread.")] = "wall",
    cache: Annotated[
        bool, Parameter(help="Use a profile made before of the same step on this machine.")
    ] = True,
    json: Json = False,
) -> int:
    """Measure seconds and workspace of every operator by running the step.

    Example:
      bayplan profile resnet50 --batch 8 -o resnet50.profile.json
    """
    from bayplan.data.errors import UsageError, did_you_mean
    from bayplan.data.profile import Clock
    from bayplan.fitting import profile_question
    from bayplan.reporting.text import profile_text

    if clock not in list(Clock):
        raise UsageError(f"no clock {clock!r}; {did_you_mean(clock, list(Clock))}")
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; at least 1 step must run to be measured")
    question = _question(target, batch=batch, device=device, optimizer=optimizer, autocast=autocast)
    with _Bar() as bar:
        bar("capturing", 0, 1)
        graph = question.capture()
        measured = profile_question(
            question,
            graph,
            repeats=repeats,
            clock=Clock(clock),
            use_cache=cache,
            on_progress=bar,
        )
    if output is not None:
        files.write(output, measured)
    print(_json(measured) if json else profile_text(graph, measured))
    return ExitCode.DONE


@app.command
def capture(
    target: str,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="Write the graph here.")],
    batch: Batch = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
) -> int:
    """Write the graph of one training step, without allocating the model.

    Example:
      bayplan capture resnet50 --batch 32 -o resnet50.graph.json
    """
    question = _question(target, batch=batch, optimizer=optimizer, autocast=autocast)
    with _Bar() as bar:
        bar("capturing", 0, 1)
        graph = question.capture()
    files.write(output, graph)
    print(f"{graph.model}: {len(graph.nodes)} nodes, fingerprint {graph.fingerprint} -> {output}")
    return ExitCode.DONE


@app.command
def simulate(
    graph: Path,
    *,
    profile: Annotated[Path | None, Parameter(help="Its measured costs.")] = None,
    device: Device = None,
    output: Output = None,
    json: Json = False,
) -> int:
    """Replay a captured graph with a profile, or on a device of the catalogue.

    Example:
      bayplan simulate resnet50.graph.json --device h100 -o resnet50.record.json
    """
    from bayplan.api import simulate as replay
    from bayplan.data.graph import StepGraph
    from bayplan.data.profile import Profile
    from bayplan.reporting.text import record_text

    step = files.read(graph, StepGraph)
    costs = None if profile is None else files.read(profile, Profile)
    record = replay(step, costs, device=device)
    if output is not None:
        files.write(output, record)
    print(_json(record) if json else record_text(record))
    return ExitCode.DONE


@app.command
def report(record: Path, *, against: Annotated[Path | None, Parameter()] = None) -> int:
    """Print a record; with --against another one, predicted next to measured.

    Example:
      bayplan report predicted.record.json --against measured.record.json
    """
    from bayplan.data.record import RunRecord
    from bayplan.reporting.text import comparison_text, record_text

    first = files.read(record, RunRecord)
    print(record_text(first))
    if against is not None:
        second = files.read(against, RunRecord)
        print(record_text(second))
        print(comparison_text(first, second))
    return ExitCode.DONE


@app.command
def doctor() -> int:
    """Check this machine: versions, devices, exact memory counting, cache, what is known."""
    from bayplan.doctor import examine
    from bayplan.reporting.text import findings_text

    findings = examine()
    print(findings_text(findings))
    return ExitCode.DONE if all(finding.is_good for finding in findings) else ExitCode.USAGE


def main(arguments: list[str] | None = None) -> None:
    """Run a command and end the process with the exit code of the design."""
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    try:
        return app(
            arguments or ["--help"],
            exit_on_error=False,
            print_error=False,
            result_action="return_int_as_exit_code_else_zero",
        )
    except CycloptsError as fault:
        _complain(f"{fault}\nSee `bayplan --help`.")
        return ExitCode.USAGE
    except BayplanError as fault:
        _show_users_traceback(fault)
        _complain(str(fault))
        return fault.exit_code
    except KeyboardInterrupt:
        _complain("interrupted; no file was changed")
        return 130
    except BrokenPipeError:  # `bayplan … | head` closes its end early
        sys.stderr.close()
        return ExitCode.DONE


def _complain(message: str) -> None:
    print(f"bayplan: {message}", file=sys.stderr)


def _show_users_traceback(fault: BayplanError) -> None:
    """Where the user's own code failed, their frames come first and ours not at all."""
    if fault.__cause__ is not None and "torch" in sys.modules:
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
        used = {
            described.kinds[device.kind].name: described.kinds[device.kind]
            for device in described.devices
        }
        kind = min(used.values(), key=lambda one: one.memory_bytes.value)

    from bayplan.questions import Question
    from bayplan.targets import resolve_target

    return Question(
        target=resolve_target(target),
        batch=batch,
        optimizer=optimizer,
        autocast=autocast,
        device=kind,
    )


class _Bar:
    """A progress bar on stderr; silent where stderr is no terminal."""

    def __enter__(self) -> "_Bar":
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._progress = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._progress.start()
        self._task = self._progress.add_task("starting", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show how far a piece of work has come."""
        self._progress.update(self._task, description=what, completed=done, total=total)
