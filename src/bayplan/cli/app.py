"""The application: its help, and how errors become words and exit codes."""

import os
import sys
import traceback

from cyclopts import App, CycloptsError

from bayplan.data.errors import BayplanError, CaptureError, ExitCode

__all__ = ["TARGET_HELP", "app", "main"]

# One line per paragraph: the terminal's width decides where to break it.
TARGET_HELP = (
    "A TARGET is the name of a reference model (resnet50, vgg16, gpt, llama-7b, …; `bayplan doctor`"
    " lists them all), or module:function of your own, found from the folder you are in. The"
    " function returns (model, batch, loss), where loss may be None if the model returns its own;"
    " if it has a parameter batch_size, that is what --batch sets."
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
  bayplan doctor

{TARGET_HELP}

{EXIT_HELP}""",
    help_format="plaintext",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # `_run` says what Ctrl-C left behind
)


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
    except KeyboardInterrupt as stop:  # a command that leaves files behind says which
        _complain(f"interrupted; {stop}" if str(stop) else "interrupted; no file was changed")
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


def _show_users_traceback(fault: CaptureError) -> None:
    """Where the user's own code failed, their frames come first and ours not at all."""
    if fault.__cause__ is not None:
        from bayplan.tracing.explain import users_traceback

        print(users_traceback(fault.__cause__), end="", file=sys.stderr)
