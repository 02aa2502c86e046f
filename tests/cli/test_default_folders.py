"""The folders that a command finds by itself: that of the run and that of the data."""

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.training import loop
from mlmoe_jax.training.sweep import run as sweeps


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory, without $MLMOE_DATA."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLMOE_DATA", raising=False)
    return tmp_path


def test_the_literal_command_says_what_it_lacks_and_leaves_nothing(place, command):
    done = command(f"--config={REPOSITORY}/configs/mlvpt_dinov2.py")
    assert done.returncode == 2
    first, error = done.stderr.splitlines()
    assert first == "run folder: runs/mlvpt_dinov2"
    for part in (
        "no folder data/coco2014",
        "needs annotations, train2014 and val2014",
        "https://cocodataset.org",
        "docs/datasets.md#coco-2014",
    ):
        assert part in error
    assert not list(place.iterdir())


def test_the_run_folder_of_a_command_without_one(place, command, monkeypatch):
    folders = []

    def stop(config, folder, *_, **__):
        folders.append(str(folder))
        raise loop.Stopped("stopped")

    monkeypatch.setattr(loop, "train", stop)
    monkeypatch.setattr(sweeps, "sweep", lambda config, folder, *_, **__: folders.append(str(folder)) or 0)
    digits = "--config=mlvpt_digits"
    assert command(digits, "--config.log.wandb=x").returncode == 130
    assert command(digits, "--config.seed=1").stderr.splitlines()[0] == "run folder: runs/mlvpt_digits,seed=1"
    assert "run folder: " not in command(digits, "--workdir=mine").stderr
    assert command(digits, "--sweep=config.seed=0,1").returncode == 0
    assert folders == ["runs/mlvpt_digits", "runs/mlvpt_digits,seed=1", "mine", "runs/mlvpt_digits,sweep=seed"]


@pytest.mark.parametrize("mode", ["eval", "thresholds", "report", "export", "predict"])
def test_what_reads_a_run_needs_its_folder(place, command, mode):
    assert command(f"--mode={mode}").stderr == f"error: --mode={mode} needs --workdir=FOLDER\n"
