"""`--sweep` as a user runs it: interrupted, resumed, and read again."""

import contextlib
import csv
import functools
import json

import pytest
from helpers import tiny
from helpers.commands import succeeded
from helpers.scored_run import stored_metrics
from PIL import Image

from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.preemption import StopRequest

CONFIG = """
from mlmoe_jax.config import default_config

def get_config(arg=""):
    config = default_config()
    config.model.backbone.weights = "none"
    config.train.epochs, config.train.batch_size, config.train.log_every = 2, 20, 1
    config.eval.batch_size, config.eval.every_epochs = 40, 2
    return config
"""


@pytest.fixture
def run(command, monkeypatch, tmp_path):
    """Return a function that runs the program with more flags, on few scenes and a backbone of one block."""
    tiny.use_scenes(monkeypatch, train=60, val=40, test=40, test_shift=40)
    tiny.use_vit(monkeypatch, depth=1, patch=16)
    (tmp_path / "small.py").write_text(CONFIG)

    return functools.partial(command, f"--config={tmp_path / 'small.py'}", f"--workdir={tmp_path / 'sweep'}")


@contextlib.contextmanager
def stopping_in(monkeypatch, folder, step: int):
    """Request a stop, as SIGTERM does, once the run in `folder` has written the row of `step`."""
    asked, append = StopRequest(), RunFolder.append_row

    def noticing(self, row):
        append(self, row)
        if str(self) == str(folder) and row["step"] == step:
            asked.set()

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_row", noticing)
        patch.setattr("mlmoe_jax.training.loop.stop_requests", lambda: contextlib.nullcontext(asked))
        yield


@pytest.mark.slow
def test_an_interrupted_sweep_resumes(run, monkeypatch, tmp_path):
    folder, key = tmp_path / "sweep", "optim.learning_rate"
    with stopping_in(monkeypatch, folder / "learning_rate=0.01", step=3):
        done = run(f"--sweep=config.{key}=1e-3,1e-2")
    assert done.returncode == 130, done.stderr
    assert "stopped at step 3 of 6" in done.stderr.partition("run 2 of 2, learning_rate=0.01\n")[2]
    assert [row["run"] for row in table_of(folder)] == ["learning_rate=0.001"]
    finished = (folder / "learning_rate=0.001" / "results.json").stat().st_mtime_ns

    done = succeeded(run(f"--sweep=config.{key}=1e-3,1e-2", "--json"))
    assert "run 1 of 2, learning_rate=0.001: already finished" in done.stderr
    assert "resuming from step 3 of 6" in done.stderr
    assert (folder / "learning_rate=0.001" / "results.json").stat().st_mtime_ns == finished
    printed = json.loads(done.stdout)["runs"]
    assert [one["config"] for one in printed] == [{key: 0.001}, {key: 0.01}]
    for one, row in zip(printed, table_of(folder), strict=True):
        stored = stored_metrics(folder / one["run"])
        assert one["results"] == stored
        assert row[key] == str(one["config"][key])
        assert float(row["test/mAP"]) == stored["test"]["mAP"]
    assert Image.open(folder / "sweep.png").format == "PNG"

    done = succeeded(run(f"--sweep={key}=1e-2,1e-3"))
    shown = [line.split()[:3] for line in done.stdout.splitlines()]
    assert shown[0] == ["mAP,", "%", "val"]
    assert shown[1:] == [
        [one["run"], *(f"{100 * one['results'][split]['mAP']:.2f}" for split in ("val", "test"))]
        for one in reversed(printed)
    ]


def table_of(folder) -> list[dict]:
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--sweep=config.seed"], "--sweep=config.seed is not KEY=VALUE,VALUE,…"),
        (["--sweep=seed=1,2", "--config.seed=3"], "seed is set by --sweep and by --config.seed"),
        (["--sweep=train.epochs=1,0"], "run epochs=0 cannot be trained: the config has mistakes: train.epochs is 0"),
        (["--sweep=seed=1", "--mode=eval"], "unrecognized arguments"),
        (["--sweep=config=vpt,gvpt"], "--sweep=config=NAME,NAME,… needs --workdir=FOLDER, and no --config"),
    ],
)
def test_user_errors_are_one_sentence_and_train_nothing(run, tmp_path, arguments, part):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert part in done.stderr
    assert not (tmp_path / "sweep").exists()


def test_keys_without_an_effect_in_any_run_are_named(run):
    keys = ("--sweep=loss.gamma=1,2", "--sweep=loss.kind=asymmetric,bce", "--config.loss.positive_weight=2")
    done = run(*keys, "--sweep=train.epochs=0")
    assert done.stderr.splitlines()[0] == "warning: loss.gamma has no effect, because loss.kind is asymmetric"
    assert done.stderr.count("warning") == 1
