"""The real program in a process of its own, on few scenes of digits and a tiny backbone."""

import os
import subprocess
import sys
from pathlib import Path

from helpers.paths import REPOSITORY

# A training of two epochs of four steps, each of them logged, with four checkpoints.
SMALL = (
    "--config.train.epochs=2",
    "--config.train.batch_size=50",
    "--config.train.log_every=1",
    "--config.eval.batch_size=50",
    "--config.checkpoint.every_epochs=0.5",
    "--config.eval.every_epochs=1",
)
_RUNNER = """
import sys
import mlmoe_jax.data.sources.digits as digits
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViTShape
import dataclasses
digits.SCENES = {"train": 200, "val": 60, "test": 70, "test_shift": 70}
entry = catalog.CATALOG["vit_digits"]
tiny = ViTShape(width=16, depth=2, heads=2, patch=16, native=64)
catalog.CATALOG["vit_digits"] = dataclasses.replace(entry, shape=tiny, file="tiny.safetensors")
from mlmoe_jax.main import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def program_in(folder: Path, **variables: str):
    """Return a function that starts the program in a folder, with more environment variables.

    It returns what came of the program, or with wait=False the process. `place`: folder and environment, for
    `subprocess.run`; there the module `runner` is the program.
    """
    (folder / "runner.py").write_text(_RUNNER)
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{folder}", "JAX_PLATFORMS": "cpu"} | variables

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
