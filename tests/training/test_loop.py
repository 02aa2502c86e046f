"""The training loop as a whole: what a training writes and what it selects."""

import jax
import numpy as np
import pytest
from helpers.runs import MIDDLE, STEPS, recipe
from ml_collections import ConfigDict

from mlmoe_jax.apps.tools.fit_thresholds import fit_run
from mlmoe_jax.config.recipes.benchmarks import apply_selection
from mlmoe_jax.data.label_matrix import few_positives
from mlmoe_jax.data.sources import digits
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.runs.decisions import read_thresholds
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import read_run
from mlmoe_jax.training import loop
from mlmoe_jax.training.hooks import Hook
from mlmoe_jax.training.loop import train
from tools.faults.arrays import array_digests


# ------------------------------------------------------------------------------------------------------------ the steps
def test_training_writes_a_row_per_step_and_ends_with_results(run):
    folder, config, results, _ = run("probe")
    rows = folder.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert ["val/raw/mAP" in row for row in rows] == [False, False, True] * 2
    assert set(results) == {"val", "test"}
    assert folder.read_json("results.json")["test"]["metrics"]["mAP"] == results["test"]["mAP"]
    assert len(set(array_digests(folder.path)["state"].values())) > 5
    assert config.model.dtype == "auto", "`train` resolves it in a copy"
    assert folder.read_json("config.json")["model"]["dtype"] == "float32"


def test_the_order_within_a_step_is_the_one_that_an_exact_resume_needs(run, tmp_path, monkeypatch):
    """The row of a step is written before the checkpoint of the same step, and its evaluation is part of both."""
    folder, config, *_ = run("probe", "stopped").copy(tmp_path / "run")
    events, append, make = [], RunFolder.append_row, loop.training_hooks

    class Recorder(Hook):
        def after_step(self, step, metrics):
            events.append(f"step {step}")

        def after_evaluation(self, row):
            events.append(f"evaluated {len(row) > 0}")

        def before_save(self, step, state):
            events.append(f"save {step} of {int(state.step)}")

    def recorded(self, row):
        append(self, row)
        events.append(f"row {row['step']}")

    def with_recorder(*arguments, **options):
        made = make(*arguments, **options)
        made.hooks.append(Recorder())
        return made

    monkeypatch.setattr(RunFolder, "append_row", recorded)
    monkeypatch.setattr(loop, "training_hooks", with_recorder)
    train(config, folder)
    of_step = {step: [f"step {step}", f"row {step}", f"save {step} of {step}"] for step in range(MIDDLE + 1, STEPS + 1)}
    of_step[STEPS].insert(1, "evaluated True")
    assert events == [event for step in of_step.values() for event in step]


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_a_module_sees_values_without_jit(tmp_path, monkeypatch):
    """As docs/troubleshooting.md shows it."""

    class Seen(Exception):
        pass

    def look(self, features, *args, **options):
        raise Seen(np.asarray(features.cls).shape)

    monkeypatch.setattr(LinearHead, "__call__", look)
    with jax.disable_jit(), pytest.raises(Seen, match="20, 16"):
        train(recipe("probe"), RunFolder(tmp_path / "run"))


# ---------------------------------------------------------------------------------------------- selection, thresholds
def test_a_finished_run_fits_thresholds_if_its_command_asks_for_them(run, tmp_path):
    """Keys of thresholds may change when a run resumes; the fit is that of mlmoe thresholds."""
    folder, config, before, _ = run("probe").copy(tmp_path / "run")
    assert not read_thresholds(folder).source
    config.thresholds.at_end = True
    results = train(config, folder)
    stored = read_thresholds(folder)
    assert stored.source["split"] == "val"
    assert set(stored.values) == set(digits.DIGITS)
    assert "CF1@fitted" not in results["val"]
    assert {name: value for name, value in results["test"].items() if not name.endswith("@fitted")} == before["test"]
    assert folder.read_json("results.json")["test"]["metrics"]["CF1@fitted"] == results["test"]["CF1@fitted"]
    fit_run(folder)
    assert read_thresholds(folder) == stored


@pytest.mark.usefixtures("run")
def test_held_out_selection_scores_the_test_split_once(tmp_path, monkeypatch, capsys):
    scored, score = [], loop.score_split

    def counted(*args, **options):
        scored.append((args[3].name, *args[1]))
        return score(*args, **options)

    monkeypatch.setattr(loop, "score_split", counted)
    on_test = {"eval__select_on": "test", "eval__select_metric": "mAP_envelope"}
    selected = recipe("probe", data__val_split="", **on_test)
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
    assert results["held_out"]["mAP_envelope"] == folder.rows()[-1]["held_out/ema/mAP_envelope"]


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_a_training_stops_early_by_the_chosen_metric(tmp_path, monkeypatch, capsys):
    """The raw weights are best after the first of four epochs; their mAP, which nothing looks at, rises."""
    falling, measured = iter([9, 5, 8, 4, 7, 3, 6, 2]), loop.measure

    def made(*scored):
        result = next(falling, None)
        return measured(*scored) | ({} if result is None else {"mAP": 1 - result / 10, "AUC_macro": result / 10})

    monkeypatch.setattr(loop, "measure", made)
    monkeypatch.setattr(loop, "few_positives", lambda labels: "")
    folder = RunFolder(tmp_path)
    train(recipe("probe", train__epochs=4, train__patience=1, eval__select_metric="AUC_macro"), folder)
    printed = capsys.readouterr().err
    assert "val AUC_macro raw 90.00, ema 50.00 %" in printed
    assert "stopping early: the best AUC_macro is more than train.patience=1 epochs old" in printed
    assert "raw weights of step 3 (best AUC_macro on val, 90.00 %)" in printed
    assert folder.rows()[-1]["step"] == 9, "after the third epoch"
