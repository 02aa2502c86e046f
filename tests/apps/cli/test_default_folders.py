"""The folders that a command finds by itself: that of the run and that of the data."""

import pytest

from mlmoe_jax.apps.papers import sweep as sweeps
from mlmoe_jax.config import default_config
from mlmoe_jax.config.loading import to_json
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.training import loop


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory, without $MLMOE_DATA."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLMOE_DATA", raising=False)
    return tmp_path


def test_the_run_folder_of_a_command_without_one(place, command, monkeypatch):
    folders = []

    def stop(config, folder, *_, **__):
        folders.append(str(folder))
        raise loop.Stopped("stopped")

    monkeypatch.setattr(loop, "train", stop)
    monkeypatch.setattr(sweeps, "sweep", lambda config, folder, *_, **__: folders.append(str(folder)) or Outcome())
    digits = "--config=mlvpt_digits"
    assert command(digits, "--config.log.wandb=x").returncode == 130
    assert command(digits, "--json", "--config.seed=1").stderr.splitlines()[0] == "run folder: runs/mlvpt_digits,seed=1"
    assert "run folder: " not in command(digits, "--workdir=mine").stderr
    assert command(digits, "--sweep=config.seed=0,1").returncode == 0
    assert folders == ["runs/mlvpt_digits", "runs/mlvpt_digits,seed=1", "mine", "runs/mlvpt_digits,sweep=seed"]


def test_a_sweep_does_not_take_the_choices_of_a_run_beside_it(place, command, monkeypatch):
    """A config file may choose by the run that is resumed; the runs of a sweep are in folders of their own."""
    (place / "choose.py").write_text(
        "from mlmoe_jax.config import default_config\n"
        "def get_config(arg='', run=None):\n"
        "    config = default_config()\n"
        "    config.train.epochs = run.train.epochs if run else 5\n"
        "    return config\n"
    )
    stored = default_config()
    stored.train.epochs = 7
    (place / "runs" / "choose").mkdir(parents=True)
    (place / "runs" / "choose" / "config.json").write_text(to_json(stored))
    (place / "runs" / "choose" / "results.json").write_text("{}")
    epochs = []
    monkeypatch.setattr(loop, "train", lambda config, *_, **__: epochs.append(config.train.epochs) or {})
    monkeypatch.setattr(
        sweeps, "sweep", lambda points, *_: epochs.extend(p.config.train.epochs for p in points) or Outcome()
    )
    command("--config=choose.py")
    command("--config=choose.py", "--sweep=config.seed=0,1")
    assert epochs == [7, 5, 5]
