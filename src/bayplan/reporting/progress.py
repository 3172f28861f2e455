"""A progress bar on stderr; silent where stderr is no terminal, so that logs stay clean."""

from typing import Self

from rich.console import Console
from rich.progress import Progress

__all__ = ["ProgressBar"]


class ProgressBar:
    """Called with what is being done, how many are done, and of how many."""

    def __init__(self, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._what, self._share = "", 0.0

    def __enter__(self) -> Self:
        console = Console(stderr=True)
        is_silent = not (self._is_shown and console.is_terminal)
        self._progress = Progress(console=console, transient=True, disable=is_silent)
        self._progress.start()
        self._task = self._progress.add_task("starting", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away, so that results can be printed."""
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line of its own on stderr, above the bar, also where there is no terminal."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def tell(self, line: str, done: int, total: int) -> None:
        """Show a line in the bar, or by itself where there is no terminal."""
        if self._progress.disable:
            self.say(line)
        else:
            self(line, done, total)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show how far a piece of work has come; a percentage never goes back.

        Of work that is done once more (a second search), the first had told how far it is. Where
        other work follows, or work of one part, the bar says so and shows no percentage.
        """
        share = done / total if total > 1 else 0.0
        if what != self._what and share < self._share:
            self._progress.remove_task(self._task)  # a task that has a total keeps one
            self._task = self._progress.add_task(what, total=None)
            self._share = 0.0
        self._what, self._share = what, max(self._share, share)
        total_share = 1.0 if self._share else None  # None leaves it unknown
        self._progress.update(
            self._task, description=what, completed=self._share, total=total_share
        )
