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
    "--config.train.batch_size=50",
    "--config.train.log_every=1",
    "--config.eval.batch_size=50",
    "--config.checkpoint.every_epochs=0.5",
    "--config.eval.every_epochs=1",
)
_BACKBONE = {"patch": 16, "file": "tiny.safetensors"}
_RUNNER = f"""
import sys
from helpers import tiny
tiny.use_scenes()
tiny.use_vit(**{_BACKBONE})
from mlmoe_jax.main import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def program_in(folder: Path, **variables: str):
    """Return a function that starts the program in a folder, its cache of weights, with more environment variables.

    It returns what came of the program, or with wait=False the process. `place`: folder and environment, for
    `subprocess.run`; there the module `runner` is the program.
    """
    (folder / "runner.py").write_text(_RUNNER)
    tiny.write_weights(folder / _BACKBONE["file"], tiny.entry(**_BACKBONE))
    path = os.pathsep.join([str(folder), *sys.path])
    environment = environment_of(PYTHONPATH=path, MLMOE_CACHE=str(folder), **variables)

    def start(*arguments, wait=True):
        command = [sys.executable, "runner.py", *map(str, arguments)]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if not wait:
            return process
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    start.place = {"cwd": folder, "env": environment}
    return start
