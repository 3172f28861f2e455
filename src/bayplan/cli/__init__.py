"""The command line: one file a command.

Results go to stdout, progress and errors to stderr. A command's file is imported when the command
is called, and torch only once its arguments are understood, so that `--help` answers at once.
"""

from bayplan.cli.app import app, main

__all__ = ["app", "main"]
