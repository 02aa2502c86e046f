"""The training loop as a whole: a small run, stopped and resumed, and the four sources of initial values."""

import copy
import dataclasses
import io
import json
import os
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.runs import MIDDLE, STEPS, recipe, train_until
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from mlmoe_jax.apps.tools.fit_thresholds import fit_run
from mlmoe_jax.config.recipes.benchmarks import apply_selection
from mlmoe_jax.data.label_codes import few_positives
from mlmoe_jax.data.sources import digits
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.runs.assemble import assemble
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import TIMING
from mlmoe_jax.runs.restore import open_run, read_run
from mlmoe_jax.runs.starts import read_starts
from mlmoe_jax.runs.thresholds import read_thresholds
from mlmoe_jax.training import hooks, loop
from mlmoe_jax.training.experiment import Experiment
from mlmoe_jax.training.hooks import Hook
from mlmoe_jax.training.loop import Stopped, train


@pytest.fixture(scope="module")
def config(runs):
    with runs.world():
        yield recipe("probe")


def test_a_stop_while_waiting_for_a_batch_is_saved(config, tmp_path, monkeypatch):
    batches = Experiment.batches

    def hang(self, first, progress):
        for step, batch in batches(self, first, progress):
            if step > MIDDLE:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            yield step, batch

    monkeypatch.setattr(Experiment, "batches", hang)
    rarely = copy.deepcopy(config)
    rarely.checkpoint.every_epochs = 100
    with pytest.raises(Stopped, match=f"stopped at step {MIDDLE} of {STEPS}"):
        train(rarely, RunFolder(tmp_path))
    assert open_run(RunFolder(tmp_path), which="latest").step == MIDDLE


class Recorder(Hook):
    """Records the events of a training."""

    def __init__(self, events: list[str]):
        self.events = events

    def after_step(self, step, metrics):
        self.events.append(f"step {step}")

    def after_evaluation(self, row):
        self.events.append(f"evaluated {len(row) > 0}")

    def before_save(self, step, state):
        self.events.append(f"save {step} of {int(state.step)}")


@pytest.fixture(scope="module")
def events():
    """The events of the run `whole`."""
    return []


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory, events):
    """The folder of an uninterrupted run, and its results."""
    folder, append, make = RunFolder(tmp_path_factory.mktemp("whole")), RunFolder.append_row, loop.training_hooks

    def recorded(self, row):
        append(self, row)
        events.append(f"row {row['step']}")

    def with_recorder(*arguments, **options):
        made = make(*arguments, **options)
        made.hooks.append(Recorder(events))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "append_row", recorded)
        patch.setattr(loop, "training_hooks", with_recorder)
        return folder, train(config, folder)


@pytest.fixture(scope="module")
def stopped(config, tmp_path_factory):
    """The folder of a run that was stopped in the middle."""
    folder = RunFolder(tmp_path_factory.mktemp("stopped"))
    train_until(MIDDLE, config, folder)
    return folder


@pytest.fixture
def copied(stopped, tmp_path):
    """A copy of the stopped run."""
    shutil.copytree(stopped.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


def digests(folder: RunFolder) -> dict:
    """Return the sha256 of every array in the last checkpoint: parameters, optimizer, averages, selected values."""
    return json.loads((folder / "checkpoints" / str(STEPS) / "digests" / "metadata").read_text())


def rows(folder: RunFolder) -> list[dict]:
    """Return the rows of metrics.jsonl without the values that depend on the machine."""
    return [{name: value for name, value in row.items() if name not in TIMING} for row in folder.rows()]


def values_of(folder: RunFolder) -> dict[str, np.ndarray]:
    run = open_run(folder)
    return jax.device_get({**run.values, **run.frozen})


def same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path], err_msg=path)


# ------------------------------------------------------------------------------------------------------------ resuming
def test_training_writes_a_row_per_step_and_ends_with_results(whole):
    folder, results = whole
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    assert ["val/raw/mAP" in row for row in rows(folder)] == [False, False, True] * 2
    assert set(results) == {"val", "test"}
    assert folder.read_json("results.json")["test"]["metrics"]["mAP"] == results["test"]["mAP"]
    assert len(set(digests(folder)["state"].values())) > 5


def test_the_order_within_a_step_is_the_one_that_an_exact_resume_needs(whole, events):
    """The row of a step is written before the checkpoint of the same step, and its evaluation is part of both."""
    of_step = {step: [f"step {step}", f"row {step}", f"save {step} of {step}"] for step in range(1, STEPS + 1)}
    for step in (MIDDLE, STEPS):
        of_step[step].insert(1, "evaluated True")
    assert events == [event for step in of_step.values() for event in step]


def test_the_config_of_the_caller_is_not_changed(whole, config):
    assert config.model.dtype == "auto", "`train` resolves it in a copy"
    assert whole[0].read_json("config.json")["model"]["dtype"] == "float32"


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(whole, copied, config, monkeypatch, capsys):
    """The checkpoint has precedence over `init_from`, which need not exist any more."""
    trimmed = []
    monkeypatch.setattr("mlmoe_jax.runtime.machine.return_freed_memory", lambda: trimmed.append(True))
    assert [row["step"] for row in rows(copied)] == list(range(1, MIDDLE + 1))
    config = copy.deepcopy(config)
    config.init_from = "nowhere.safetensors"
    results = train(config, copied)
    assert f"resuming from step {MIDDLE} of {STEPS}" in capsys.readouterr().err
    assert digests(copied) == digests(whole[0])
    assert rows(copied) == rows(whole[0])
    assert results == whole[1]
    assert [start["step"] for start in read_starts(copied)] == [0, MIDDLE]
    assert trimmed, "a save leaves freed memory behind"


def test_a_diverged_state_is_not_saved_and_the_run_can_resume(whole, copied, config, refusal, monkeypatch):
    """With keep=1, a checkpoint of the diverged state would replace the only good one."""
    config = copy.deepcopy(config)
    config.checkpoint.keep = 1
    monkeypatch.setattr(hooks, "DIVERGENCE_LIMIT", 0.5)  # below 1, each step counts as diverged
    sentence = refusal(train, config, copied)
    assert f"between steps {MIDDLE} and {MIDDLE + 1}; this state is not saved" in sentence
    assert max(int(path.name) for path in (copied / "checkpoints").iterdir()) == MIDDLE
    monkeypatch.undo()
    assert train(config, copied) == whole[1]
    assert digests(copied) == digests(whole[0])


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"5\n", b"[" * 100_000, b'{"step": 3, "lo'])
def test_a_damaged_row_of_metrics_does_not_stop_a_run_that_can_resume(copied, capsys, line):
    with open(copied / "metrics.jsonl", "ab") as file:
        file.write(line)
    assert [row["step"] for row in rows(copied)] == list(range(1, MIDDLE + 1))
    assert f"{copied / 'metrics.jsonl'}: 1 damaged line left out" in capsys.readouterr().err


def test_a_damaged_checkpoint_falls_back_to_the_one_before(whole, copied, config, capsys):
    for file in Path(copied.path / "checkpoints" / str(MIDDLE) / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-8])
    results = train(config, copied)
    messages = capsys.readouterr().err
    assert f"checkpoint {MIDDLE} is damaged and was skipped" in messages
    assert f"resuming from step {MIDDLE - 1} of {STEPS}" in messages
    assert digests(copied) == digests(whole[0])
    assert rows(copied) == rows(whole[0])
    assert results == whole[1]


def rewrite_label_space(folder: RunFolder, **changes) -> None:
    buffer = io.BytesIO()
    dataclasses.replace(read_run(folder)[1], **changes).save(buffer)
    folder.write_bytes("label_space.npz", buffer.getvalue())


def test_a_resumed_run_keeps_the_label_space_that_it_was_trained_with(copied, config, refusal):
    _, space = read_run(copied)
    counted_otherwise = space.positives + 1  # as another version of a library might
    rewrite_label_space(copied, positives=counted_otherwise)
    train(config, copied)
    np.testing.assert_array_equal(read_run(copied)[1].positives, counted_otherwise)
    rewrite_label_space(copied, names=space.names[::-1])
    assert "other labels than the data has now" in refusal(train, config, copied)


# ---------------------------------------------------------------------------------------------- selection, thresholds
def test_a_finished_run_fits_thresholds_if_its_command_asks_for_them(whole, config, tmp_path):
    """Keys of thresholds may change when a run resumes; the fit is that of --mode=thresholds."""
    shutil.copytree(whole[0].path, tmp_path / "run")
    folder, fitting = RunFolder(tmp_path / "run"), copy.deepcopy(config)
    assert not read_thresholds(folder).source
    fitting.thresholds.at_end = True
    results = train(fitting, folder)
    stored = read_thresholds(folder)
    assert stored.source["split"] == "val"
    assert set(stored.values) == set(digits.DIGITS)
    assert "CF1@fitted" not in results["val"]
    assert {name: value for name, value in results["test"].items() if not name.endswith("@fitted")} == whole[1]["test"]
    assert folder.read_json("results.json")["test"]["metrics"]["CF1@fitted"] == results["test"]["CF1@fitted"]
    fit_run(folder)
    assert read_thresholds(folder) == stored


def test_held_out_selection_scores_the_test_split_once(config, tmp_path, monkeypatch, capsys):
    scored, score = [], loop.score_split

    def counted(*args, **options):
        scored.append((args[3].name, *args[1]))
        return score(*args, **options)

    monkeypatch.setattr(loop, "score_split", counted)
    selected = copy.deepcopy(config)
    selected.data.val_split, selected.eval.select_on, selected.eval.select_metric = "", "test", "mAP_envelope"
    apply_selection(selected, ConfigDict({"preset": "", "selection": "held_out"}), default_preset="")
    folder = RunFolder(tmp_path)
    results = train(selected, folder)
    assert scored[:2] == [("held_out", "raw", "ema")] * 2, "one pass over the images after each of the two epochs"
    assert [(name, len(kinds)) for name, *kinds in scored[2:]] == [("held_out", 1), ("test", 1)]
    assert set(results) == {"held_out", "test"}
    assert 0 <= results["test"]["CF1@fitted"] <= 1
    held_out = open_split(selected.data, "held_out", seed=selected.seed)
    assert read_run(folder)[1].images == 60 - len(held_out)
    printed = capsys.readouterr().err
    few = few_positives(held_out.labels)
    assert f"% (rough, so it selects nothing: {few})" in printed
    assert "evaluating the ema weights of step 4 (the last)" in printed
    assert f"the metrics on held_out are rough: {few}" in printed
    assert results["held_out"]["mAP_envelope"] == rows(folder)[-1]["held_out/ema/mAP_envelope"]


@pytest.mark.slow
def test_a_split_with_enough_positives_selects(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "few_positives", lambda labels: "")
    folder = RunFolder(tmp_path)
    results = train(config, folder)
    measured = [row[f"val/{kind}/mAP"] for row in rows(folder)[2::3] for kind in ("raw", "ema")]
    printed = capsys.readouterr().err
    assert f"best mAP on val, {100 * max(measured):.2f} %" in printed
    assert "selects nothing" not in printed
    assert results["val"]["mAP"] == max(measured)


@pytest.mark.slow
def test_a_training_stops_early_by_the_chosen_metric(config, tmp_path, monkeypatch, capsys):
    """The raw weights are best after the first of four epochs; their mAP, which nothing looks at, rises."""
    falling, measured = iter([9, 5, 8, 4, 7, 3, 6, 2]), loop.measure

    def made(*scored):
        result = next(falling, None)
        return measured(*scored) | ({} if result is None else {"mAP": 1 - result / 10, "AUC_macro": result / 10})

    monkeypatch.setattr(loop, "measure", made)
    monkeypatch.setattr(loop, "few_positives", lambda labels: "")
    patient = copy.deepcopy(config)
    patient.train.epochs, patient.train.patience, patient.eval.select_metric = 4, 1, "AUC_macro"
    folder = RunFolder(tmp_path)
    train(patient, folder)
    printed = capsys.readouterr().err
    assert "val AUC_macro raw 90.00, ema 50.00 %" in printed
    assert "stopping early: the best AUC_macro is more than train.patience=1 epochs old" in printed
    assert "raw weights of step 3 (best AUC_macro on val, 90.00 %)" in printed
    assert rows(folder)[-1]["step"] == 9, "after the third epoch"


# ------------------------------------------------------------------------------------------------------ initial values
@pytest.fixture
def start_of(config, tmp_path):
    """A function that returns the initial values of a new run, from a training whose steps change nothing."""

    def values(**changes):
        still = copy.deepcopy(config)
        still.train.epochs, still.optim.learning_rate, still.ema.decay = 1, 1e-30, 0.0
        still.model.backbone.weights, still.init_from = changes.get("weights", "none"), changes.get("init_from", "")
        folder = RunFolder(tmp_path / "-".join(["start", *changes]))
        train(still, folder)
        return values_of(folder)

    return values


@pytest.fixture
def backbone(config, tmp_path):
    """A file with the weights of a pretrained backbone, and these weights."""
    shapes = nnx.state(nnx.eval_shape(lambda: ViT(catalog.entry("vit_digits").shape, rngs=nnx.Rngs(0))))
    draw = np.random.default_rng(5)
    weights = {
        "/".join(map(str, path)): draw.normal(size=value.shape).astype(np.float32)
        for path, value in nnx.to_flat_state(shapes)
    }
    save_file(weights, tmp_path / "backbone.safetensors")
    return str(tmp_path / "backbone.safetensors"), {f"backbone/{path}": value for path, value in weights.items()}


@pytest.mark.slow
def test_init_from_has_precedence_over_the_backbone_and_the_backbone_over_random_values(
    start_of, config, whole, backbone
):
    folder, (file, pretrained) = whole[0], backbone
    drawn = assemble(config, read_run(folder)[1])
    scratch = jax.device_get({**drawn.trainable, **drawn.frozen})
    trained = values_of(folder)
    assert not np.array_equal(trained["head/classifier/kernel"], scratch["head/classifier/kernel"])

    same(start_of(), scratch)
    same(start_of(weights=file), {**scratch, **pretrained})
    same(start_of(weights=file, init_from=str(folder)), trained)
