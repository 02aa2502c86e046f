import json
from dataclasses import replace

import numpy as np
import pytest
from helpers.scored_run import drawn_split, write_run
from sklearn.metrics import f1_score, precision_score

from mlmoe_jax.apps.tools.fit_thresholds import fit_run, fitted_lines
from mlmoe_jax.config import default_config
from mlmoe_jax.evaluation.decisions import threshold_fit
from mlmoe_jax.evaluation.decisions.threshold_fit import fit_thresholds
from mlmoe_jax.evaluation.metrics.threshold_search import best_thresholds
from mlmoe_jax.runs.decisions import Thresholds, read_thresholds
from mlmoe_jax.runs.image_record import ImageRecord
from mlmoe_jax.runs.shared_model import write_adapter


def config_with(difficult: str = "negative", **settings: str):
    config = default_config()
    config.thresholds.update(settings)
    config.data.difficult_eval = difficult
    return config


@pytest.fixture(autouse=True)
def least(request, monkeypatch):
    """Labels with a positive have thresholds of their own, unless a test says otherwise."""
    least = getattr(request, "param", 1)
    monkeypatch.setattr(threshold_fit, "LEAST_OWN_POSITIVES", least)
    return least


def test_thresholds_of_a_validation_split(tmp_path, capsys, caplog):
    val = drawn_split("val", 60)
    val.scores[7] = np.nan
    folder = write_run(tmp_path / "run", val, drawn_split("test", 10, seed=1))
    ImageRecord.of(val.ids[:1], val.ids).write(folder)
    outcome = fit_run(folder)
    assert "1 of the 60 images of split val are, by their names, training images of" in caplog.text
    stored, kept = read_thresholds(folder), val.take(val.read)
    np.testing.assert_array_equal(list(stored.values.values()), best_thresholds(kept.scores, kept.codes == 1))
    source = stored.source
    assert source.items() >= {"split": "val", "images": 59, "per": "class", "goal": "f1", "fixed": 0.5}.items()
    for when, cuts in (("before", 0.5), ("after", [*stored.values.values()])):
        f1 = f1_score(kept.codes == 1, kept.scores >= cuts, average="macro")
        assert source[when]["CF1_mean"] == pytest.approx(f1)
    (row,) = (line.split() for line in outcome.text().splitlines() if line.startswith("CF1_mean"))
    assert row[1:] == [f"{100 * source[when]['CF1_mean']:.2f}" for when in ("before", "after")]
    assert "thresholds.json" in capsys.readouterr().err


def test_one_threshold_for_a_precision_of_all_labels(tmp_path):
    folder = write_run(tmp_path / "run", drawn_split("holdout", 60), data__difficult_eval="ignore")
    keys = {"split": "holdout", "per": "global", "goal": "precision", "precision": "0.75"}
    printed = json.loads(fit_run(folder, [(f"thresholds.{key}", value) for key, value in keys.items()]).json())
    assert printed == folder.read_json("thresholds.json")
    (cut,) = set(printed["thresholds"].values())
    table = drawn_split("holdout", 60)
    truth = table.codes == 1
    assert precision_score(truth.ravel(), (table.scores >= cut).ravel()) >= 0.75
    lower = table.scores[table.scores < cut].max()
    assert precision_score(truth.ravel(), (table.scores >= lower).ravel()) < 0.75
    assert printed["precision"] == 0.75


def test_labels_without_a_fit_of_their_own():
    scores = np.array([[0.9, 0.8, 0.2], [0.6, 0.7, 0.3], [0.1, 0.1, 0.1]])
    codes = np.array([[1, 0, 0], [0, 1, 2], [0, 0, -1]], np.int8)
    table = replace(drawn_split("val", 3), scores=scores, codes=codes)
    found = fit_thresholds(table, "abc", config_with(goal="precision"))
    assert found.values == pytest.approx({"a": 0.75, "b": np.inf, "c": 0.85})
    assert found.source["shared"] == ["c"]
    _, shared, never = fitted_lines(found)
    assert shared == "labels with fewer than 1 positive images share one threshold: c"
    assert never == "labels never that precise, so never predicted: b"
    assert fit_thresholds(table, "abc", config_with("positive")).values["c"] == pytest.approx(0.25)


def test_labels_that_are_always_predicted_are_named():
    source = {"goal": "miss_rate", "miss_rate": 0.1, "per": "class", "images": 9, "shared": []}
    line = fitted_lines(Thresholds({"a": 0.0, "b": 0.5}, source))[-1]
    assert line == "labels always predicted, since no higher threshold has the bound: a"


@pytest.mark.parametrize("least", [1, 4, 5, 100], indirect=True)
def test_labels_with_few_positives_share_a_threshold(least):
    table = drawn_split("val", 60)
    table.codes[:, 0] = np.arange(60) < 4  # whatever the scores say
    truth = table.codes == 1
    found = fit_thresholds(table, "abc", config_with())
    few = truth.sum(axis=0) < least
    expected = np.where(few, best_thresholds(table.scores, truth, per="global"), best_thresholds(table.scores, truth))
    np.testing.assert_array_equal(list(found.values.values()), expected)
    assert found.source["shared"] == [name for name, is_few in zip("abc", few, strict=True) if is_few]
    together = fit_thresholds(table, "abc", config_with(per="global"))
    assert together.source["shared"] == []


def test_labels_with_few_positives_share_a_bound_of_their_own():
    table = replace(drawn_split("val", 60), scores=drawn_split("val", 60).scores.clip(0.05))
    table.codes[:, 0], table.codes[:, 1] = np.arange(60) < 5, (np.arange(60) > 1) & (np.arange(60) < 8)
    few = {"goal": "miss_rate", "miss_rate": 0.15, "per": "global"}
    found = fit_thresholds(table, "abc", config_with(goal="miss_rate", miss_rate=0.15))
    assert (found.source["least_positives"], found.source["shared"]) == (6, ["a"])
    assert found.values["a"] == 0
    found = fit_thresholds(table, "abc", config_with(goal="miss_rate", miss_rate=0.1))
    assert found.source["shared"] == ["a", "b"]
    assert found.values["a"] == found.values["b"] == 0
    assert (
        found.values["c"] == best_thresholds(table.scores, table.codes, **few | {"per": "class", "miss_rate": 0.1})[2]
    )
    table.codes[10:14, 0] = 1
    table.codes[20:24, 1] = 1
    found = fit_thresholds(table, "abc", config_with(goal="miss_rate", miss_rate=0.09))
    shared = best_thresholds(table.scores[:, :2], table.codes[:, :2], **few | {"miss_rate": 0.09})
    assert found.source["shared"] == ["a", "b"]
    assert [found.values[name] for name in "ab"] == shared.tolist()
    assert shared[0] > 0


@pytest.mark.parametrize(("kind", "warnings"), [("raw", 1), ("imported", 0)])
def test_fitting_on_images_of_the_training_logs_a_warning(tmp_path, caplog, kind, warnings):
    folder = write_run(tmp_path / "run", drawn_split("train"), model__head__kind="cosine")
    write_adapter(folder, {"head/classifier/bias": np.zeros(3)}, {"step": 0, "kind": kind, "split": ""})
    fit_run(folder, [("thresholds.split", "train")])
    assert caplog.text.count("the model was trained on train") == warnings
