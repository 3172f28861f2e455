"""The application: its commands, its help, and how errors become words and exit codes."""

import os
import sys

from cyclopts import App, CycloptsError

__all__ = ["TARGET_HELP", "app", "main"]

# One line per paragraph: the terminal's width decides where to break it.
TARGET_HELP = (
    "A TARGET is the name of a reference model (resnet50, vgg16, gpt, llama-7b, …; `bayplan doctor`"
    " lists them all), or module:function of your own, found from the current folder. The"
    " function returns (model, batch, loss), where loss may be None if the model returns its own;"
    " if it has a parameter batch_size, --batch sets it. Other sizes of a model follow its name: "
    "resnet50,image_size=160 or gpt,sequence=512."
)
EXIT_HELP = (
    "Results go to stdout, progress and errors to stderr. Exit codes: 0 done or fits, 1 bug,"
    " 2 usage, 3 does not fit, 4 the run broke the plan, 5 the profile or plan belongs to another"
    " model. BAYPLAN_CACHE is the folder that keeps profiles; without it, the user's cache."
)

app = App(
    name="bayplan",
    help="Know whether a training step fits, and how fast it is, before it runs.",
    help_epilogue=f"""\
Start with:
  bayplan check resnet50 --batch 32 --memory 8GiB
  bayplan plan resnet50 --batch 32 --memory 2GiB -o resnet50.plan.json
  bayplan run resnet50.plan.json --steps 5
  bayplan run resnet50 --data /data/imagenet --memory 6GiB
  bayplan doctor

{TARGET_HELP}

{EXIT_HELP}""",
    help_format="plaintext",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # `_run` says what Ctrl-C left behind
)

# In the order of work. Each is the `app` of the module of its name, which is imported when the
# command is called; the help of `bayplan` itself needs no more than these lines.
COMMANDS = {
    "check": "Say whether a training step fits, why, how fast it will be, and which plan makes it"
    " fit.",
    "profile": "Measure seconds and workspace of every operator by running the step.",
    "capture": "Write the graph of one training step, without allocating the model.",
    "simulate": "Replay a plan on a cluster, or a captured graph with a profile or on a device.",
    "plan": "Plan a training step within a memory limit, for many ranks or for a cluster.",
    "run": "Train as planned, on your data if you like, and show predicted next to measured.",
    "tune": "Find the fastest way to sum a model's gradients over ranks.",
    "report": "Print a record; with --against another one, predicted next to measured.",
    "compare": "Say where the difference of two records comes from, by part of the step, stage and"
    " device.",
    "explain": "Say what sets a plan's peak, what each of its choices costs, and what would help."
    "\n\nFor a plan for many ranks: where each rank is, what it needs, and all its actions.",
    "cluster": "List known clusters, show one, or make one from this machine or a topology.",
    "doctor": "Check this machine: versions, devices, exact memory counting, cache, known models"
    " and devices.",
}
for place, (name, text) in enumerate(COMMANDS.items()):
    app.command(f"bayplan.cli.{name}:app", name=name, help=text, sort_key=place)
app.register_install_completion_command(
    help="Let bash, zsh or fish complete commands and options; says which file it wrote.",
    help_flags=[],
)


@app.command(show=False)
def fit(*words: str) -> None:
    """Tell whoever types the old name of `check`."""
    from bayplan.data.errors import UsageError

    raise UsageError(
        "`bayplan fit` is called `bayplan check` now, with the same options; in Python, bayplan.fit"
        " changes a module"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run a command and end the process with its exit code."""
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
    except KeyboardInterrupt as stop:  # a command that leaves files behind says which
        _complain(f"interrupted; {stop}" if str(stop) else "interrupted; no file was changed")
        return 130
    except BrokenPipeError:  # `bayplan … | head` has read enough; nothing more may be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as fault:
        return _explain(fault)


def _explain(fault: Exception) -> int:
    """Print what went wrong, and return its exit code."""
    from bayplan.data.errors import BayplanError, CaptureError, ExitCode

    if isinstance(fault, CycloptsError):
        command = " ".join(("bayplan", *(fault.command_chain or ())))
        _complain(f"{fault}\nSee `{command} --help`.")
        return ExitCode.USAGE
    if isinstance(fault, BayplanError):
        if isinstance(fault, CaptureError) and fault.__cause__ is not None:
            from bayplan.tracing.explain import users_traceback

            print(users_traceback(fault.__cause__), end="", file=sys.stderr)
        _complain(str(fault))
        return fault.exit_code
    import traceback

    traceback.print_exception(fault)
    _complain("this is a bug of bayplan; please report it with the lines above")
    return ExitCode.BUG


def _complain(message: str) -> None:
    print(f"bayplan: {message}", file=sys.stderr)
