"""The command line: one file a command.

Results go to stdout, progress and errors to stderr. torch is imported only by the commands that
need it, and only once their arguments are understood, so that `--help` answers at once.
"""

from bayplan.cli import (
    capture,
    check,
    cluster,
    compare,
    doctor,
    explain,
    plan,
    profile,
    report,
    run,
    simulate,
    tune,
)
from bayplan.cli.app import app, main

__all__ = [
    "app",
    "capture",
    "check",
    "cluster",
    "compare",
    "doctor",
    "explain",
    "main",
    "plan",
    "profile",
    "report",
    "run",
    "simulate",
    "tune",
]
