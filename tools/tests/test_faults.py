"""The short form of the benchmark that strikes a training with faults."""

import json
import os
import subprocess
import sys

from helpers.paths import REPOSITORY


def test_nothing_is_lost_by_one_fault_of_each_kind(tmp_path):
    command = [sys.executable, "-m", "tools.faults", "--quick", f"--json={tmp_path / 'faults.json'}"]
    # Not what measures the coverage of processes: it writes files of its own, which the limits of files stop.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "COVERAGE"))}
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "faults.json").read_text())
    assert all(held == count > 0 for held, count in found["held_of"].values())
    moments = {case["case"].split(" at ")[1].split()[0] for case in found["cases"] if case["part"] == "kills"}
    assert {"import", "compile", "step", "checkpoint-half", "row", "final-evaluation", "saving"} <= moments
