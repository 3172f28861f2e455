"""The command line: words in, words out; every decision is made elsewhere.

Results go to stdout, progress and errors to stderr. torch is imported only by the commands that
need it, inside them, so that `--help` answers at once.
"""

from bayplan.cli import asking, clusters, looking, plans, simulating, tuning
from bayplan.cli.app import app, main

__all__ = ["app", "asking", "clusters", "looking", "main", "plans", "simulating", "tuning"]
