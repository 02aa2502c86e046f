"""A resumed training equals the uninterrupted one, bit for bit: recipe × interruption × place.

Recipes differ in the state that a checkpoint holds, and interruptions in what is in the folder when the same command
runs again. Not all pairs matter: each state is restored after a kill, and each interruption is survived by the simplest
recipe. Several processes are in `tests/multiprocess/test_jobs.py`.
"""

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
from helpers import fake_store, small_program, tiny
from helpers.runs import MIDDLE, STEPS, TRAIN, Made, assert_same_training, recipe, same_rows, train_until

from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.starts import read_starts
from mlmoe_jax.training import hooks
from mlmoe_jax.training.experiment import Experiment
from mlmoe_jax.training.loop import Stopped, train

# name -> kind and changes of a run, see `helpers/runs.py`.
ONE_POSITIVE = {"data__known_positives": "one", "loss__expected_positives": 2.0, "loss__large_loss_rate": 0.05}
CNN = {"model__backbone__name": "resnet101"}
RECIPES = {
    "probe": ("probe", {}),
    "no averages": ("probe", {"ema__decay": 0.0}),
    "prompts and gates": ("mlvpt_digits", {}),
    "mixed images": ("probe", {"augment__mix": "both", "augment__flip": True}),
    "statistics of batches and estimates per image": (
        "probe",
        CNN | {"model__backbone__batch_norm": "trainable", "loss__kind": "role"} | ONE_POSITIVE,
    ),
    "corrections per image": ("probe", ONE_POSITIVE | {"loss__kind": "ll_cp"}),
    "cached features": ("probe", {"data__cache_features": "float32"}),
    "cached features of a CNN": ("probe", CNN | {"data__cache_features": "float32"}),
    "a fit to convergence": ("logistic", {}),
    "pruning": ("pruned", {}),
}


# --------------------------------------------------------------------------------------------------- interruptions
# Each returns a folder in which the training has been interrupted. `recipe` is the kind and the changes of the run.
def sigterm(run, recipe, folder, monkeypatch) -> Made:
    """While the row of a step is written. The source of initial values is gone afterwards."""
    kind, changes = recipe
    stopped = run(kind, "stopped", **changes).copy(folder)
    if kind != "pruned":  # of several trainings, those that have not begun read it
        stopped.config.init_from = "nowhere.safetensors"
    return stopped


def sigterm_while_waiting(run, recipe, folder, monkeypatch) -> Made:
    """For a batch. No checkpoint is due before."""
    made, batches = run(recipe[0], **recipe[1]), Experiment.batches

    def hang(self, first, progress):
        for step, batch in batches(self, first, progress):
            if step > MIDDLE:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            yield step, batch

    made.config.checkpoint.every_epochs = 100
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "batches", hang)
        with pytest.raises(Stopped, match=f"stopped at step {MIDDLE} of {STEPS}"):
            train(made.config, RunFolder(folder))
    return made._replace(folder=RunFolder(folder))


def kill(run, recipe, folder, monkeypatch) -> Made:
    """While a row is written. Rows of steps after the last checkpoint are there, and cached features are not."""
    made = run(recipe[0], **recipe[1]).copy(folder)
    (folder / "results.json").unlink()
    _, *others = sorted((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    for checkpoint in others:
        if int(checkpoint.name) > MIDDLE:
            shutil.rmtree(checkpoint)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    monkeypatch.setenv("MLMOE_CACHE", str(folder / "cache"))
    tiny.write_cache(folder / "cache")
    return made


def kill_before_a_checkpoint(run, recipe, folder, monkeypatch) -> Made:
    made = kill(run, recipe, folder, monkeypatch)
    shutil.rmtree(folder / "checkpoints")
    return made


def damage(run, recipe, folder, monkeypatch) -> Made:
    """To the newest checkpoint."""
    stopped = run(recipe[0], "stopped", **recipe[1]).copy(folder)
    for file in (folder / "checkpoints" / str(MIDDLE) / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-8])
    return stopped


def divergence(run, recipe, folder, monkeypatch) -> Made:
    """With keep=1, a checkpoint of the diverged state would replace the only good one."""
    stopped = run(recipe[0], "stopped", **recipe[1]).copy(folder)
    stopped.config.checkpoint.keep = 1
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "DIVERGENCE_LIMIT", 0.5)  # below 1, each step counts as diverged
        with pytest.raises(UserError, match=f"between steps {MIDDLE} and {MIDDLE + 1}; this state is not saved"):
            train(stopped.config, stopped.folder)
    assert max(int(path.name) for path in (folder / "checkpoints").iterdir()) == MIDDLE
    return stopped


SLOW = pytest.mark.slow
CASES = [
    ("probe", sigterm, MIDDLE),
    ("probe", sigterm_while_waiting, MIDDLE),
    ("probe", divergence, MIDDLE),
    ("statistics of batches and estimates per image", kill, MIDDLE),
    ("a fit to convergence", kill, 1),
    # The same code restores these as the ones above. Damage of every kind: tests/runs/test_checkpoint.py.
    pytest.param("probe", damage, MIDDLE - 1, marks=SLOW),
    pytest.param("prompts and gates", kill, MIDDLE, marks=SLOW),
    pytest.param("mixed images", kill, MIDDLE, marks=SLOW),
    pytest.param("no averages", kill, MIDDLE, marks=SLOW),
    pytest.param("corrections per image", kill, MIDDLE, marks=SLOW),
    pytest.param("cached features", kill, MIDDLE, marks=SLOW),
    pytest.param("cached features of a CNN", kill, MIDDLE, marks=SLOW),
    pytest.param("a fit to convergence", kill_before_a_checkpoint, 0, marks=SLOW),
    pytest.param("pruning", sigterm, MIDDLE, marks=SLOW),  # several trainings
]


@pytest.fixture
def whole(run, recipe) -> Made:
    """The uninterrupted training."""
    kind, changes = RECIPES[recipe]
    return run(kind, **changes)


@pytest.mark.parametrize(("recipe", "interruption", "at"), CASES)
def test_a_resumed_training_equals_the_uninterrupted_one(
    whole, recipe, interruption, at, run, tmp_path, monkeypatch, capsys
):
    folder, config, *_ = interruption(run, RECIPES[recipe], tmp_path / "run", monkeypatch)
    capsys.readouterr()
    np.testing.assert_equal(TRAIN.get(RECIPES[recipe][0], train)(config, folder), whole.results)
    said = capsys.readouterr().err
    assert (f"resuming from step {at} of " in said) == (at > 0)
    assert (f"checkpoint {MIDDLE} is damaged and was skipped" in said) == (interruption is damage)
    assert_same_training(folder, whole.folder)


def test_a_save_returns_freed_memory_and_a_start_is_recorded(run, tmp_path, monkeypatch):
    trimmed, stopped = [], run("probe", "stopped").copy(tmp_path / "run")
    monkeypatch.setattr("mlmoe_jax.runtime.machine.return_freed_memory", lambda: trimmed.append(True))
    train_until(MIDDLE + 1, stopped.config, stopped.folder)
    assert trimmed
    assert [start["step"] for start in read_starts(stopped.folder)] == [0, MIDDLE]


@pytest.mark.usefixtures("run")
def test_images_that_were_left_out_before_stay_listed(tmp_path, unreadable_image):
    config, folder = recipe("probe", data__bad_images="skip"), RunFolder(tmp_path)
    train_until(MIDDLE, config, folder)
    unreadable_image()  # as after a failure of the network
    train(config, folder)
    assert [line.split(",")[0] for line in folder.read_text("skipped_images.csv").splitlines()] == ["split", "train"]


# ---------------------------------------------------------------------------------------------------------- places
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_program_resumes(run, tmp_path, number):
    whole, start = run("program"), small_program.program_in(tmp_path)
    command = ("--config=mlvpt_digits", "--workdir=run", "--json", *small_program.SMALL)
    stopped = start(*command, SIGNAL_AFTER=f"{number.value} 3")
    assert stopped.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL), stopped.stderr
    folder = RunFolder(tmp_path / "run")
    assert 3 <= len(folder.rows()) < 8
    again = start(*command)
    assert json.loads(again.stdout) == whole.results, again.stderr
    assert_same_training(folder, whole.folder)
    assert len(read_starts(folder)) == 2


@pytest.mark.slow
def test_the_program_resumes_in_an_object_store(run, tmp_path):
    """It can neither append nor rename."""
    with fake_store.running() as store:
        start = small_program.program_in(tmp_path, **fake_store.environment(store))
        command = ("--config=mlvpt_digits", "--workdir=gs://bucket/run", "--json", *small_program.SMALL)
        assert start(*command, SIGNAL_AFTER="9 3").returncode == -signal.SIGKILL
        again = start(*command)
        rows, _ = store.objects["bucket", "run/metrics.jsonl"]
        assert not store.refused
    assert json.loads(again.stdout) == run("program").results, again.stderr
    assert same_rows(map(json.loads, rows.splitlines())) == same_rows(run("program").folder.rows())
