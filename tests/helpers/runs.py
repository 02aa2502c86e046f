"""Every run folder that tests share: made where a test first asks for it, once per process, and never changed.

The fixture `run` returns them: `run(kind, stage, **changes)`. `changes` are keys of the config, such as
`loss__kind="role"`. Kinds:

published: the smallest of backbones, with published weights, and random values for the rest.
program: ML-VPT, trained by a command; `done` is what it printed.
The names of RECIPES and configs: trained in this process. The stage "stopped" is that after half of the steps.

Runs without a model are cheap, and written where a test needs them: `scored_run.py`, and for reports `made_run.py`.
"""

import contextlib
import copy
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from helpers import small_program, tiny
from mlmoe_jax.apps.tools.prune import prune
from mlmoe_jax.config import default_config, load_config, use_adapter
from mlmoe_jax.data.labels.space import LabelSpace, synthetic_label_space
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.main import main
from mlmoe_jax.models.params import Params
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import Parts, assemble, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import TIMING
from mlmoe_jax.runs.restore import write_run_metadata
from mlmoe_jax.runtime.preemption import StopRequest
from mlmoe_jax.training.loop import Stopped, train
from mlmoe_jax.training.selection import Selection
from tools.faults.arrays import array_digests

# A training of two epochs of three steps, with a row of the log and a checkpoint per step.
STEPS, MIDDLE = 6, 3
SMALL = {
    "model.backbone.weights": "none",
    "data.test_splits": ("test",),
    "train.epochs": 2,
    "train.batch_size": 20,
    "train.log_every": 1,
    "eval.batch_size": 40,
    "eval.every_epochs": 1,
    "ema.decay": 0.9,
    "checkpoint.every_epochs": 1 / 3,
    "checkpoint.keep": 9,
    "report.samples": 0,
    "log.tensorboard": False,
}
FIXED = {"data.cache_features": "float32", "train.fit": "logistic", "loss.kind": "bce"}
# kind -> config, and the keys beside SMALL; any other kind is a config.
RECIPES = {
    "probe": ("", {}),
    "logistic": ("linear_probe:dataset=digits", FIXED | {"eval.select_on": "none", "thresholds.at_end": True}),
    "pruned": (
        "e2vpt:dataset=digits,prompts=4,key_values=2",
        {"prune.token_levels": (0.25, 0.5), "prune.segment_levels": (0.5,)},
    ),
}
TRAIN = {"pruned": prune}
# The labels of the kind `published`, and a calibration of its scores.
CLASSES = ("a", "b", "c")
SPACE = replace(synthetic_label_space(3, 1), names=CLASSES, positives=np.array([2, 3, 4]), images=10)
CALIBRATION = {
    "split": "val",
    "labels": {
        name: {"scale": scale, "offset": offset}
        for name, scale, offset in zip(CLASSES, (0.5, 2.0, 1.5), (0.25, -1.0, 0.5), strict=True)
    },
}


class Made(NamedTuple):
    """A run: its folder, the config and the results of its training, and what the program printed."""

    folder: RunFolder
    config: ConfigDict | None = None
    results: dict | None = None
    done: subprocess.CompletedProcess | None = None

    def copy(self, path: Path) -> "Made":
        """Return a copy that a test may change."""
        shutil.copytree(self.folder.path, path)
        return self._replace(folder=RunFolder(path))


class Runs:
    """The runs that have been made, below a folder."""

    def __init__(self, folder: Path):
        self._folder, self._made, self._files = folder, {}, {}
        tiny.write_cache(cache := folder / "cache")
        (cache / "digits-v1").symlink_to(Path(os.environ["MLMOE_CACHE"], "digits-v1").resolve())

    def __call__(self, kind: str, stage: str = "trained", **changes) -> Made:
        """Return a run, whose `config` is the caller's own."""
        key = repr((kind, stage, sorted(changes.items())))
        if key not in self._made:
            with self.world():
                self._made[key] = self._make(kind, stage, RunFolder(self._folder / str(len(self._made))), changes)
            self._files[key] = _files(self._made[key])
        return self._made[key]._replace(config=copy.deepcopy(self._made[key].config))

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """Let this process have few scenes of digits and the tiny backbones, as where the runs were made."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLMOE_CACHE", str(self._folder / "cache"))
            tiny.use(patch)
            yield

    def require_unchanged(self) -> None:
        """Assert that no test has changed a run."""
        for key, made in self._made.items():
            assert _files(made) == self._files.pop(key), f"the run {key} has been changed; take a copy of it"
            self._files[key] = _files(made)

    def _make(self, kind: str, stage: str, folder: RunFolder, changes: dict) -> Made:
        if kind == "published":
            config = published_config(**changes)
            write_published(folder, config)
            return Made(folder, config)
        if kind == "program":
            arguments = ("--config=mlvpt_digits", f"--workdir={folder}", "--json", *small_program.SMALL)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(arguments)
            assert code == 0, err.getvalue()
            done = subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
            overrides = [tuple(flag.removeprefix("--config.").split("=")) for flag in small_program.SMALL]
            return Made(folder, load_config("mlvpt_digits", overrides), json.loads(done.stdout), done)
        config = recipe(kind, **changes)
        if stage == "stopped":
            train_until(MIDDLE, config, folder, TRAIN.get(kind, train))
            return Made(folder, config)
        return Made(folder, config, TRAIN.get(kind, train)(config, folder))


def _files(made: Made) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in Path(made.folder.path).rglob("*.*")}


def changed(config: ConfigDict, changes: dict) -> ConfigDict:
    """Return the config, with other values of some keys: `loss__kind`, or `adapters`, a dict name -> its keys."""
    for name, keys in changes.pop("adapters", {}).items():
        use_adapter(config, name, **keys)
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return config


# --------------------------------------------------------------------------------------------------------- trained
def recipe(kind: str, **changes) -> ConfigDict:
    """Return the config of a kind that this process trains."""
    reference, keys = RECIPES.get(kind, (kind, {}))
    config = load_config(reference, []) if reference else default_config()
    config.update_from_flattened_dict(SMALL | keys)
    return changed(config, changes)


def train_until(step: int, config: ConfigDict, folder: RunFolder, train: Callable = train) -> None:
    """Train as if SIGTERM arrived while the row of step `step` is written."""
    asked, append = StopRequest(), RunFolder.append_row

    def append_and_ask(self, row):
        append(self, row)
        if row["step"] == step:
            asked.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "append_row", append_and_ask)
        patch.setattr("mlmoe_jax.training.loop.stop_requests", lambda: contextlib.nullcontext(asked))
        with pytest.raises(Stopped, match=f"stopped at step {step} of {STEPS}"):
            train(config, folder)


def scores_by(predictor: Predictor, images: Iterable) -> np.ndarray:
    """Return the scores f64[N,K] of images."""
    return np.array([[*labeled.scores.values()] for labeled in predictor(list(images))])


def same_rows(rows: Iterable[dict]) -> list[dict]:
    """Return rows of metrics.jsonl without the values that depend on the machine."""
    return [{name: value for name, value in row.items() if name not in TIMING} for row in rows]


def assert_same_training(one: RunFolder, other: RunFolder) -> None:
    """Assert that two trainings are equal bit for bit: their rows, their last checkpoints and their results."""
    assert same_rows(one.rows()) == same_rows(other.rows())
    assert array_digests(Path(one.path)) == array_digests(Path(other.path))
    for file in ("per_class.csv", "thresholds.json"):
        assert one.read_text(file) == other.read_text(file), file


# ------------------------------------------------------------------------------------------------------- published
def published_config(**changes) -> ConfigDict:
    """Return a config for the backbone `tiny`."""
    config = default_config()
    config.model.backbone.name, config.data.image_size, config.eval.batch_size = "tiny", 8, 4
    config.model.matmul_precision = "highest"
    return changed(config, changes)


def write_published(
    folder: RunFolder, config: ConfigDict, space: LabelSpace = SPACE, parts: Parts | None = None
) -> tuple[Parts, Params]:
    """Write a run folder as training does, with random trained parameters; return the parts and the values.

    parts: the initial values; None = those of the backbone and the seed.
    """
    parts = parts or assemble(config, space)
    with folder.writing():
        write_run_metadata(folder, config, space, preprocess_for(config), parts)
        values = {path: value + 0.5 for path, value in parts.trainable.items()}
        with checkpoint.open_manager(folder) as manager:
            notes = Selection({}, step=20, kind="raw").notes()
            checkpoint.save(manager, 30, {"step": jnp.int32(30)}, values, notes)
    return parts, values
