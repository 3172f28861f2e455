"""The promise that the documents tell the truth: every block of README.md and docs/ is run.

A `python` block is executed; the blocks of one file share their names and a scratch folder. In a
`console` block every `$ bayplan …` line is run in that folder. HTML comments above a block steer:

- `<!-- not run: reason -->` leaves the block out, and says why.
- `<!-- exit: 3 -->` expects its last command to end with that code instead of 0.
- `<!-- output: exact -->` expects the lines below a command to start with the same words as the
  lines it prints; numbers behind may differ, and a line `...` stands for any lines.
"""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from bayplan.cli import main

ROOT = Path(__file__).resolve().parents[1]
COMMENT = re.compile(r"\s*<!--\s*(not run|exit|output)\s*:\s*(.*?)\s*-->\s*")
TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
FENCE = re.compile(r"\s*(`{3,})\s*(\w*).*")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; `line` is that of its first line of content, counted from 1."""

    file: str
    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)


def find_blocks(text: str, *, file: str) -> list[Block]:
    blocks: list[Block] = []
    notes: dict[str, str] = {}
    fence, language, start = "", "", 0
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        mark = FENCE.fullmatch(line)
        if fence:
            if mark and mark[1].startswith(fence) and not mark[2]:
                content = textwrap.dedent("\n".join(lines[start : number - 1]))
                blocks.append(
                    Block(file=file, line=start + 1, language=language, text=content, notes=notes)
                )
                fence, notes = "", {}
        elif mark:
            fence, language, start = mark[1], mark[2], number
        elif comment := COMMENT.fullmatch(line):
            notes = {**notes, comment[1]: comment[2]}
        elif line.strip():
            notes = {}
    assert not fence, f"{file}:{start}: the block is never closed"
    return blocks


def find_commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines shown below it."""
    commands: list[tuple[str, list[str]]] = []
    goes_on = False
    for line in text.splitlines():
        if goes_on:
            command = commands[-1][0][:-1] + line.removeprefix("> ").strip()
            commands[-1] = (command, [])
        elif line.startswith("$ "):
            commands.append((line[2:].strip(), []))
        elif commands:
            commands[-1][1].append(line)
        goes_on = bool(commands) and not commands[-1][1] and commands[-1][0].endswith("\\")
    return commands


def first_words(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.strip()]


def shows(shown: list[str], printed: list[str]) -> bool:
    """Whether `shown` is `printed`, `...` standing for any number of words."""
    if not shown:
        return not printed
    if shown[0] == "...":
        return any(shows(shown[1:], printed[skip:]) for skip in range(len(printed) + 1))
    return bool(printed) and shown[0] == printed[0] and shows(shown[1:], printed[1:])


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def runnable_blocks() -> list[Block]:
    return [
        block
        for path in documents()
        if path.exists()
        for block in find_blocks(path.read_text("utf-8"), file=str(path.relative_to(ROOT)))
        if block.language in ("python", "console")
    ]


@dataclass
class Reader:
    """Someone who follows one document from top to bottom, in one folder, in one session."""

    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def run(self, block: Block) -> None:
        if block.language == "python":
            # Empty lines in front make a traceback name the document's own line.
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, block.file, "exec"), self.names)
            return
        commands = find_commands(block.text)
        assert commands, f"{block.file}:{block.line}: a console block without a `$ ` line"
        for position, (command, shown) in enumerate(commands):
            if command.split()[0] == "bayplan":
                is_last = position == len(commands) - 1
                expected = int(block.notes.get("exit", "0")) if is_last else 0
                printed = self.run_command(command, expected)
                if block.notes.get("output") == "exact" and shown:
                    assert shows(first_words(shown), first_words(printed)), "\n".join(printed)

    def run_command(self, command: str, expected: int) -> list[str]:
        words = shlex.split(command, comments=True)[1:]
        # A run counts the memory of its process; all else is told the same where torch is loaded.
        code, out, err = self.in_new_process(words) if words[0] == "run" else self.in_this(words)
        assert code == expected, f"exit {code}, not {expected}\n$ {command}\n{out}{err}"
        return out.splitlines()

    def in_this(self, words: list[str]) -> tuple[Any, str, str]:
        known = set(sys.modules)
        with (
            redirect_stdout(StringIO()) as out,
            redirect_stderr(StringIO()) as err,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(sys, "path", list(sys.path))
            for name, value in TERMINAL.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main(words)
        for name in set(sys.modules) - known:  # another document may have another `train.py`
            if str(self.folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        return ended.value.code, out.getvalue(), err.getvalue()

    def in_new_process(self, words: list[str]) -> tuple[int, str, str]:
        script = Path(sys.executable).with_name("bayplan")
        start = [str(script)]
        if not script.exists():  # a checkout that is on the path but not installed
            start = [sys.executable, "-c", "import sys, bayplan.cli as c; sys.exit(c.main())"]
        result = subprocess.run(
            [*start, *words],
            cwd=self.folder,
            env={**os.environ, **TERMINAL},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module")
def readers() -> dict[str, Reader]:
    return {}


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=f"{block.file}:{block.line}") for block in runnable_blocks()]
)
def test_block_runs(block, readers, tmp_path_factory, monkeypatch):
    if reason := block.notes.get("not run"):
        pytest.skip(reason)
    if block.file not in readers:
        readers[block.file] = Reader(tmp_path_factory.mktemp("reader"))
    reader = readers[block.file]
    monkeypatch.chdir(reader.folder)
    reader.run(block)


def test_readme_shows_code_and_a_command():
    languages = {block.language for block in runnable_blocks() if block.file == "README.md"}
    assert languages == {"python", "console"}


def test_source_files_that_documents_name_exist():
    folders = ("src", "tests", "benchmarks", "examples")
    sources = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")]
    missing = [
        f"{document.name}: {name}"
        for document in [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for name in re.findall(r"`([\w/]+\.(?:py|c))`", document.read_text())
        if not any(source.endswith(f"/{name}") for source in sources)
    ]
    assert not missing


SAMPLE = """\
Words.

<!-- not run: needs a GPU -->

```python
import torch
```

<!-- exit: 3 -->
<!-- output: exact -->
```console
$ make install
$ bayplan check vgg16 \\
>     --memory 1GiB
DoesNotFit: needs
...
  Largest: x
```

<!-- exit: 3 -->
Words in between end a comment's reach.

  ```python
  a = 1
  ```
"""


def test_blocks_are_found_with_line_and_notes():
    first, second, third = find_blocks(SAMPLE, file="x.md")
    assert (first.language, first.line, first.text) == ("python", 6, "import torch")
    assert first.notes == {"not run": "needs a GPU"}
    assert second.notes == {"exit": "3", "output": "exact"}
    assert (third.text, third.notes) == ("a = 1", {})


def test_commands_are_found_with_what_they_show():
    (_, command, _) = find_blocks(SAMPLE, file="x.md")
    assert find_commands(command.text) == [
        ("make install", []),
        ("bayplan check vgg16 --memory 1GiB", ["DoesNotFit: needs", "...", "  Largest: x"]),
    ]


def test_an_unclosed_block_is_named():
    with pytest.raises(AssertionError, match=r"x\.md:2: the block is never closed"):
        find_blocks("a\n```python\nb\n", file="x.md")


@pytest.mark.parametrize(
    ("shown", "is_shown"),
    [("a b c", True), ("a ... c", True), ("...", True), ("a b", False), ("a c b", False)],
)
def test_shown_words_are_compared(shown, is_shown):
    assert shows(shown.split(), ["a", "b", "c"]) is is_shown
