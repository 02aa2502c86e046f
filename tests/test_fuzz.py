"""A short form of benchmarks/fuzz.py: every reader of the package gets damaged and hostile input."""

import json
import subprocess
import sys

import pytest
from helpers.paths import REPOSITORY

# Those that need no trained model; the others take minutes.
GROUPS = "overrides,stored config,command line,tables,published data,packed data,weights,images,image lists,run folders"


@pytest.mark.slow
def test_no_input_ends_in_a_traceback_a_hang_or_a_file_elsewhere(tmp_path):
    found = tmp_path / "found.json"
    flags = ["--cases=400", f"--groups={GROUPS}", f"--json={found}"]
    command = [sys.executable, REPOSITORY / "benchmarks/fuzz.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(found.read_text())["cases"] in range(400, 411)
    assert len(done.stdout.splitlines()) == 12  # a heading, ten groups, and the sum


@pytest.mark.slow
def test_failures_are_counted(tmp_path):
    """The fuzz itself: a case that raises, waits, takes memory or writes elsewhere is none that ended well."""
    code = (
        "import sys, time; sys.path[:0] = [sys.argv[1] + '/benchmarks', sys.argv[1]]\n"
        "import fuzz, pathlib; fuzz.WAIT, fuzz.BYTES = 2, 10**8\n"
        "import signal; signal.signal(signal.SIGALRM, fuzz._raise_hang)\n"
        "from mlmoe_jax.errors import UserError\n"
        "def refuse(): raise UserError('no')\n"
        "acts = [lambda: None, refuse, lambda: 1 / 0, lambda: time.sleep(9), lambda: len(bytearray(3 * 10**8)),\n"
        "        lambda: pathlib.Path('x').touch()]\n"
        "place = pathlib.Path(sys.argv[2])\n"
        "print([fuzz._case(lambda folder: ('', act), place)['outcome'] for act in acts])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, REPOSITORY, tmp_path], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip() == "[None, None, 'uncaught', 'hang', 'memory', 'outside']", done.stderr
