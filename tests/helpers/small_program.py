"""The real program in a process of its own, on few scenes of digits and a tiny backbone."""

import os
import subprocess
import sys
from pathlib import Path

from helpers import tiny
from helpers.devices import environment_of

# A training of two epochs of four steps, each of them logged, with four checkpoints.
SMALL = (
    "--config.train.epochs=2",
    "--config.train.batch_size=15",
    "--config.train.log_every=1",
    "--config.eval.batch_size=40",
    "--config.checkpoint.every_epochs=0.5",
    "--config.eval.every_epochs=1",
    "--config.report.samples=0",
)
_RUNNER = """
import os
from helpers import tiny
tiny.use()
from mlmoe_jax.main import console
from mlmoe_jax.runs.folder import RunFolder

def signal_itself(number, step, append=RunFolder.append_row):
    def append_row(self, row):
        append(self, row)
        if row["step"] == step:
            os.kill(os.getpid(), number)
    RunFolder.append_row = append_row

if __name__ == "__main__":
    if "SIGNAL_AFTER" in os.environ:
        signal_itself(*map(int, os.environ["SIGNAL_AFTER"].split()))
    console()
"""


def program_in(folder: Path, **variables: str):
    """Return a function that starts the program in a folder, its cache of weights, with more environment variables.

    It returns the completed program, or with wait=False the process. It takes environment variables too: with
    SIGNAL_AFTER="15 3" a training sends itself SIGTERM once the row of step 3 is written. `place`: folder and
    environment, for `subprocess.run`; there the module `runner` is the program.
    """
    (folder / "runner.py").write_text(_RUNNER)
    tiny.write_cache(folder)
    path = os.pathsep.join([str(folder), *sys.path])
    environment = environment_of(PYTHONPATH=path, MLMOE_CACHE=str(folder), **variables)

    def start(*arguments, wait=True, **more):
        command = [sys.executable, "runner.py", *map(str, arguments)]
        process = subprocess.Popen(
            command, cwd=folder, env=environment | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if not wait:
            return process
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    start.place = {"cwd": folder, "env": environment}
    return start
