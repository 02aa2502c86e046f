"""The outcome of a command: it succeeded, or it was refused in one sentence; and the tables that it writes."""

import csv
import json
import subprocess


def succeeded(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """Assert exit code 0 and return the command."""
    assert done.returncode == 0, done.stderr
    return done


def refused(done: subprocess.CompletedProcess, *parts: str) -> str:
    """Assert exit code 2 and one sentence on stderr that says `parts`; return it."""
    assert done.returncode == 2, done.stderr
    sentences = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in sentences[0]
    return assert_sentence(sentences[0])


def assert_sentence(text: str) -> str:
    """Assert that an error is one sentence, without its period; return it."""
    assert text
    assert "\n" not in text
    assert not text.endswith(".")
    assert ". " not in text
    return text


def printed(done: subprocess.CompletedProcess):
    """Assert exit code 0 and return what the command printed with --json."""
    return json.loads(succeeded(done).stdout)


def csv_rows(path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
