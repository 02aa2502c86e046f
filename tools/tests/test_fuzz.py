"""A short form of tools/fuzz: every reader of the package gets damaged and hostile input."""

import json
import subprocess
import sys
from random import Random

import pytest
from helpers.paths import REPOSITORY

from tools.fuzz.account import check, compare
from tools.fuzz.given import KINDS, plain, write
from tools.fuzz.hostile import Silent
from tools.fuzz.oddities import unknown_split

# They need no trained model, which takes minutes.
GROUPS = "overrides,stored config,command line,tables,published data,packed data,weights,images,image lists,run folders"
GROUPS += ",own input,requests,names,vectors"


def test_no_input_ends_in_a_traceback_a_hang_or_a_file_elsewhere(tmp_path):
    found = tmp_path / "found.json"
    flags = ["--cases=400", f"--groups={GROUPS}", f"--json={found}"]
    command = [sys.executable, "-m", "tools.fuzz", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(found.read_text())["cases"] in range(400, 412)
    assert len(done.stdout.splitlines()) == 16  # a heading, fourteen groups, and the sum


def test_failures_are_counted(tmp_path):
    """The fuzz itself: a case that raises, waits, takes memory or writes elsewhere is none that ended well."""
    code = (
        "import pathlib, signal, sys, time\n"
        "from tools.fuzz import __main__ as fuzz; fuzz.WAIT, fuzz.BYTES = 2, 10**8\n"
        "signal.signal(signal.SIGALRM, fuzz._raise_hang)\n"
        "from mlmoe_jax.errors import UserError\n"
        "from tools.fuzz.hostile import Silent\n"
        "def refuse(): raise UserError('no')\n"
        "def lose(): raise Silent('no')\n"
        "acts = [lambda: None, refuse, lose, lambda: 1 / 0, lambda: time.sleep(9), lambda: len(bytearray(3 * 10**8)),\n"
        "        lambda: pathlib.Path('x').touch()]\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "print([fuzz._case(lambda folder: ('', act), place)['outcome'] for act in acts])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip() == "[None, None, 'silent', 'uncaught', 'hang', 'memory', 'outside']", done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_plain_input_is_used_completely(tmp_path, kind):
    for seed in range(3):
        draft, folder = plain(Random(seed), kind), tmp_path / str(seed)
        draft.oddities.clear()
        if draft.setting == "splits" or not draft.has_splits:
            check(draft, write(draft, folder), folder)


def _row(draft, place, **changes):
    entry = draft.entries[place]
    row = {"split": entry.split, "number": place, "positive": frozenset(entry.labels), "unknown": frozenset()}
    return tuple((row | changes).values())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda rows, draft: rows[:-1], "is lost"),
        (lambda rows, draft: [*rows, rows[0]], "2 times"),
        (lambda rows, draft: [*rows, _row(draft, 0, number=50)], "was not given"),
        (lambda rows, draft: [_row(draft, 0, positive=frozenset({"moon"})), *rows[1:]], "has the labels"),
        (lambda rows, draft: [_row(draft, 0, split="elsewhere"), *rows[1:]], "is in elsewhere"),
        (lambda rows, draft: [_row(draft, 0, unknown=frozenset({"sea"})), *rows[1:]], "unknown"),
    ],
)
def test_silence_is_found(change, found):
    """The oracle: lost, added and changed images raise an error, unless a sentence counts them."""
    draft = next(draft for seed in range(99) if (draft := plain(Random(seed), "csv")).setting == "splits")
    rows = [_row(draft, number) for number in range(len(draft.entries))]
    compare(draft, rows, (), [], "")
    with pytest.raises(Silent, match=found):
        compare(draft, change(rows, draft), (), [], "")
    with pytest.raises(Silent, match="class"):
        compare(draft, rows, ("moon",), [], "")
    oddity = unknown_split(draft)
    draft.oddities.append(oddity)
    rest = [row for row in rows if row[1] not in oddity.images]
    name, count = oddity.name.split("'")[1], len(oddity.images)
    compare(draft, rest, (), [f"not used: {count} of the split '{name}'"], "")
    for said in ([], [f"not used: {count + 1} of the split '{name}'"], [f"not used: {count} of another split"]):
        with pytest.raises(Silent, match="is lost"):
            compare(draft, rest, (), said, "")
