"""A tiny data set and config, and jobs of several real processes on this machine."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny
from helpers.devices import environment_of
from helpers.jobs import Job
from helpers.ports import free_port
from PIL import Image

SPLITS = {"train": 24, "val": 11, "test": 13}  # neither 11 nor 13 divides by 2 or 3 processes
BROKEN = {"train": (3, 21), "test": (6,)}
HERE = Path(__file__).resolve().parent
CONFIG = """
from mlmoe_jax.config import default_config

def get_config(arg=""):
    config = default_config()
    config.data.name, config.data.root, config.data.image_size = "csv", {root!r}, 16
    config.data.threads, config.data.bad_images, config.log.tensorboard = 1, "skip", False
    config.augment.flip, config.augment.contrast = True, 0.2
    config.model.backbone.weights, config.ema.decay = "none", 0.5
    config.loss.kind, config.loss.scale = "bce", 1.0
    config.optim.learning_rate, config.optim.clip_norm = 0.02, 1.0
    config.train.epochs, config.train.batch_size, config.train.log_every = 2, 12, 1
    config.eval.batch_size, config.eval.every_epochs = 4, 2
    return config
"""


@pytest.fixture(scope="session")
def config_file(tmp_path_factory) -> Path:
    """A config for 48 random images with three labels; some images are broken, some of them in one process only."""
    folder = tmp_path_factory.mktemp("job")
    draw = np.random.default_rng(0)
    for split, count in SPLITS.items():
        (folder / split).mkdir()
        rows = ["image,labels"]
        for number in range(count):
            path = folder / split / f"{number}.png"
            if number in BROKEN.get(split, ()):
                path.write_bytes(b"not an image")
            else:
                Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
            present = np.array(["cat", "dog", "fox"])[draw.random(3) < 0.5]
            rows.append(f"{split}/{number}.png,{';'.join(present)}")
        (folder / f"{split}.csv").write_text("\n".join(rows))
    (folder / "tiny.py").write_text(CONFIG.format(root=str(folder)))
    return folder / "tiny.py"


@pytest.fixture
def backbone(monkeypatch):
    """Use the backbone of the workers in this process."""
    tiny.use_vit(monkeypatch)


@pytest.fixture
def start_job(tmp_path):
    """A function that starts `count` processes with flags; those still running at the end of the test are killed.

    own: environment variables of individual processes, {index: variables}.
    """
    started = []

    def start(count, *flags, program="worker.py", devices=1, own=None, **variables) -> Job:
        output = tmp_path / f"job-{len(started)}"
        output.mkdir()
        port, processes = free_port(), []
        common = environment_of(devices, **variables)
        for number in range(count):
            place = {
                "MLMOE_COORDINATOR": f"127.0.0.1:{port}",
                "MLMOE_PROCESSES": str(count),
                "MLMOE_PROCESS": str(number),
            }
            environment = common | (place if count > 1 else {}) | (own or {}).get(number, {})
            with open(output / f"{number}.out", "wb") as out, open(output / f"{number}.err", "wb") as err:
                command = [sys.executable, HERE / program, *map(str, flags)]
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
        started.extend(processes)
        return Job(processes, output)

    yield start
    for process in started:
        process.kill()
        process.wait()
