"""The commands and programs that the README, the pages of docs/, the notes and the configs show."""

import functools
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from helpers.paths import REPOSITORY

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
NOTES = (REPOSITORY / "benchmarks" / "NOTES.md", REPOSITORY / "tools" / "parity" / "README.md")
CONFIGS = tuple(sorted((REPOSITORY / "configs").glob("*.py")))
# The shell finds no program and prints the one it was asked to start: one line per program, its words apart. Each line
# is one write, because the programs of a pipe start at the same time.
_RECORDER = """
command_not_found_handle() { local words; printf -v words '%s\\x1f' "$@"; echo "$words" >&9; }
PATH=/none
"""


@dataclass(frozen=True)
class Block:
    """A piece of a page, and where it begins."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, language: str, section: str = "") -> list[Block]:
    """Return the fenced blocks of a language in a page, or in its section with this title."""
    text = page.read_text()
    start = text.index(f"\n## {section}\n") + 1 if section else 0
    after = text.find("\n## ", start) if section else -1
    end = len(text) if after < 0 else after
    fenced = re.compile(rf"^( *)```{language}\n(.*?)^\1```", re.S | re.M).finditer(text, start, end)
    return [Block(page, text.count("\n", 0, one.start()) + 2, one[2].replace(f"\n{one[1]}", "\n")) for one in fenced]


def program_with(word: str, page: str) -> str:
    """Return the first Python program of a page of docs/ that has a word."""
    return next(block.text for block in blocks(REPOSITORY / "docs" / page, "python") if word in block.text)


def commands_in_text(page: Path) -> list[Block]:
    """Return the commands of this project in backticks, and those on separate lines, outside fenced blocks."""
    text = re.sub(r"```.*?```", lambda one: "\n" * one[0].count("\n"), page.read_text(), flags=re.S)
    quoted, alone = r"`((?:python -m|mlmoe|bash launch/)\s[^`]*)`", r"^ *((?:python -m|mlmoe) (?:.*\\\n)*.*)$"
    found = re.finditer(f"{quoted}|{alone}", text, re.M)
    lines = [(text.count("\n", 0, one.start()) + 1, one[1] or one[2]) for one in found]
    return [Block(page, line, " ".join(command.replace("\\\n", " ").split())) for line, command in lines]


@functools.cache
def programs(block: Block) -> list[list[str]]:
    """Return the commands that a shell would start for a block, each split into words, without starting any.

    A `--command=` that a program is to start somewhere else follows as a separate program.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        script = f"exec 9>'{record}'\n{_RECORDER}{block.text}"
        done = subprocess.run(["/bin/bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
        assert done.stderr == "", f"{block}: {done.stderr}"
        lines = record.read_text().splitlines()
    started = [line.removesuffix("\x1f").split("\x1f") for line in lines]
    passed_on = [
        word.removeprefix("--command=") for words in started for word in words if word.startswith("--command=")
    ]
    return started + [shlex.split(command) for command in passed_on]
