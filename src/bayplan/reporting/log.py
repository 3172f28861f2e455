"""Saying one line to whoever runs a script: through logging where it is set up, else on stderr."""

import logging
import os
import sys

__all__ = ["say", "speaks_by_default"]

_VARIABLE = "BAYPLAN_LOG"


def speaks_by_default() -> bool:
    """Whether functions say what came of them without being asked: unless `BAYPLAN_LOG=off`."""
    return os.environ.get(_VARIABLE, "").lower() not in ("off", "0", "none")


def say(line: str, *, is_warning: bool = False) -> None:
    """Say a line, if there is one.

    A program that has set up logging decides by the logger `bayplan` where lines go, and which.
    """
    logger = logging.getLogger("bayplan")
    if not line:
        return
    if logger.hasHandlers():
        logger.log(logging.WARNING if is_warning else logging.INFO, line)
    else:
        print(f"bayplan: {line}", file=sys.stderr)
