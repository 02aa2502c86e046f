import json
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from helpers.scored_run import drawn_split, stored_scores, write_run

from mlmoe_jax.apps.tools.fit_thresholds import calibrate_run, fit_run
from mlmoe_jax.evaluation.decisions.threshold_fit import fit_thresholds
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.decisions import read_thresholds, write_fixed
from mlmoe_jax.runs.folder import RunFolder, read_config


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    splits = drawn_split("val", 100), drawn_split("test", 60, seed=1)
    return write_run(tmp_path / "run", *splits, calibration__method="temperature")


def test_a_run_is_calibrated(folder, capsys):
    before = folder.read_bytes("scores/val.npz")
    outcome = calibrate_run(folder)
    stored, shown = read_thresholds(folder), outcome.text()
    assert json.loads(outcome.json()) == stored.calibration
    found = [stored.calibration[key] for key in ("split", "images", "method")]
    assert found == ["val", 100, "temperature"]
    row = next(line for line in shown.splitlines() if line.startswith("ECE_macro"))
    assert row.split()[1:] == [f"{100 * stored.calibration[when]['ECE_macro']:.2f}" for when in ("before", "after")]
    assert "5-fold cross-validation" in shown
    assert "thresholds.json" in capsys.readouterr().err
    assert folder.read_bytes("scores/val.npz") == before, "the raw scores stay"
    assert stored.limits("abc").tolist() == [0.5] * 3, "a fixed threshold is one of the corrected scores"


def test_thresholds_are_fitted_to_corrected_scores(folder):
    calibrate_run(folder)
    calibration = read_thresholds(folder).calibration
    fit_run(folder)
    stored, scored = read_thresholds(folder), stored_scores(folder)
    assert stored.calibration == calibration
    val = replace(scored["val"], scores=stored.correct(scored["val"].scores, "abc"))
    expected = fit_thresholds(val, "abc", read_config(folder))
    assert (stored.values, stored.source) == (expected.values, expected.source)
    corrected = stored.correct(scored["test"].scores, "abc")
    np.testing.assert_array_equal(np.argsort(corrected, axis=0), np.argsort(scored["test"].scores, axis=0))
    np.testing.assert_array_equal(stored.predict(scored["test"].scores, "abc"), corrected >= stored.limits("abc"))


@pytest.mark.parametrize(
    ("goal", "key", "value"),
    [("f1", "goal", "f1"), ("precision", "precision", "0.75"), ("miss_rate", "miss_rate", "0.2")],
)
def test_a_new_calibration_fits_thresholds_again_in_the_same_way(folder, goal, key, value, capsys):
    """A level without a goal sets the goal."""
    keys = [(f"thresholds.{key}", value)]
    fit_run(folder, keys)
    fitted, raw = read_thresholds(folder), StoredRun(folder).split("test").scores
    predicted = fitted.predict(raw, "abc")
    calibrate_run(folder)
    stored = read_thresholds(folder)
    assert "the thresholds were fitted to other scores, and are fitted again" in capsys.readouterr().err
    assert stored.values != fitted.values
    metrics = {name: stored.source[name] for name in ("before", "after")}
    assert stored.source == fitted.source | metrics
    assert (stored.source["goal"], str(stored.source[key])) == (goal, value)
    assert (stored.predict(raw, "abc") == predicted).mean() > 0.95, "thresholds lie between two scores of val"
    again = stored.values
    fit_run(folder, keys)
    assert read_thresholds(folder).values == again


@pytest.mark.parametrize(("long", "short"), [(calibrate_run, fit_run), (fit_run, calibrate_run)])
def test_two_fits_at_once_keep_both_results(folder, monkeypatch, long, short):
    """The short fit starts while the long one computes, and waits for it."""
    module = sys.modules[long.__module__]
    name = {calibrate_run: "fit_calibration", fit_run: "fit_thresholds"}[long]
    fit, other = getattr(module, name), threading.Thread(target=short, args=(folder,))

    def meanwhile(*values):
        monkeypatch.setattr(module, name, fit)  # the other one may fit the thresholds again
        other.start()
        other.join(0.2)
        assert not (folder / "thresholds.json").exists()
        return fit(*values)

    monkeypatch.setattr(module, name, meanwhile)
    long(folder)
    other.join()
    stored = read_thresholds(folder)
    assert (stored.source["goal"], stored.calibration["method"]) == ("f1", "temperature")


def test_a_training_that_is_run_again_keeps_thresholds_that_somebody_has_edited(folder):
    folder.write_json("thresholds.json", {"thresholds": {"a": 0.3, "b": 0.3, "c": 0.3}})
    write_fixed(folder, "abc", 0.5)
    assert read_thresholds(folder).values == {"a": 0.3, "b": 0.3, "c": 0.3}
    fit_run(folder)
    assert set(folder.read_json("thresholds-2.json")["thresholds"].values()) == {0.3}, "a fit keeps them beside"
    fit_run(folder)
    assert not (folder / "thresholds-3.json").exists()
