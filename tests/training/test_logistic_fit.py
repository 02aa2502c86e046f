"""Runs with train.fit=logistic: the run folder, reruns, interruptions, and what reads the folder."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers import tiny

from mlmoe_jax.apps.report.page import write_report
from mlmoe_jax.apps.tools.fit_thresholds import fit_run
from mlmoe_jax.config import load_config, validate
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.evaluate import evaluate_run
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, read_scores
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import LATEST, open_run
from mlmoe_jax.runs.thresholds import read_thresholds
from mlmoe_jax.training import training_data
from mlmoe_jax.training.logistic import fit as classifier_fit
from mlmoe_jax.training.logistic.penalty_search import fit_logistic
from mlmoe_jax.training.loop import train
from mlmoe_jax.training.profiling import Window

KEYS = {
    "model.backbone.weights": "none",
    "data.cache_features": "float32",
    "data.test_splits": "('test',)",
    "eval.batch_size": "16",
    "eval.select_on": "none",
    "loss.kind": "bce",
    "train.fit": "logistic",
    "thresholds.at_end": "True",
    "log.tensorboard": "False",
}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    tiny.use_vit(monkeypatch, patch=16)
    tiny.use_scenes(monkeypatch, train=50, val=20, test=20, test_shift=20)


def config_of(**overrides):
    keys = KEYS | {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config("linear_probe:dataset=digits", list(keys.items()))


@pytest.fixture
def finished(tmp_path):
    folder = RunFolder(tmp_path / "finished")
    return folder, train(config_of(), folder)


def test_the_run_has_the_values_of_the_fit_and_the_scores_of_images_outside(finished, tmp_path):
    folder, results = finished
    [table] = [path for path in (tmp_path / "cache" / "features").glob("*/00000.cls.npy") if len(np.load(path)) == 50]
    features, split = np.load(table), open_split(config_of().data, "train")
    found = fit_logistic(features, codes := split.labels, units=split.ids)
    for which in ("best", LATEST):
        run = open_run(folder, which=which)
        np.testing.assert_allclose(run.values[classifier_fit.KERNEL], found.kernel, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(run.values[classifier_fit.BIAS], found.bias, rtol=1e-3, atol=1e-4)
    scored = read_scores(folder)
    assert list(scored) == list(results) == ["val", "test", OUT_OF_FOLD]
    outside = scored[OUT_OF_FOLD]
    np.testing.assert_allclose(outside.scores, 1 / (1 + np.exp(-found.held_out_logits)), atol=1e-3)
    np.testing.assert_array_equal(outside.codes, codes)
    assert results[OUT_OF_FOLD]["mAP"] < evaluate_run(folder, [("data.test_splits", "('train',)")])["train"]["mAP"]
    rows = (folder / "per_class.csv").read_text().splitlines()
    assert sum(row.startswith(f"{OUT_OF_FOLD},") for row in rows) == 10
    assert folder.rows() == []


@pytest.mark.slow
def test_the_folds_keep_groups_together(tmp_path, monkeypatch):
    patients, calls = [f"p{row // 5}" for row in range(50)], []
    open_splits = training_data.open_splits

    def with_patients(*args, **options):
        splits = open_splits(*args, **options).items()
        return {name: replace(split, groups=patients[: len(split)]) for name, split in splits}

    monkeypatch.setattr(training_data, "open_splits", with_patients)
    monkeypatch.setattr(training_data, "check_splits", lambda train, others: [])  # made-up groups are in several splits
    monkeypatch.setattr(
        classifier_fit, "fit_logistic", lambda *a, **k: calls.append(k["units"]) or fit_logistic(*a, **k)
    )
    folder = RunFolder(tmp_path / "run")
    train(config_of(), folder)
    assert calls[0] == patients[:50]
    assert read_scores(folder)[OUT_OF_FOLD].groups.tolist() == patients


def test_thresholds_are_fitted_to_the_scores_outside(finished):
    folder, results = finished
    fitted = read_thresholds(folder)
    assert (fitted.source["split"], fitted.source["images"]) == (OUT_OF_FOLD, 50)
    assert {"CF1@fitted" in results[name] for name in ("val", "test")} == {True}
    assert "CF1@fitted" not in results[OUT_OF_FOLD]
    fit_run(folder)
    assert read_thresholds(folder) == fitted


@pytest.mark.slow
def test_a_finished_run_is_only_evaluated_and_an_interrupted_one_fitted_again(finished, tmp_path, monkeypatch):
    folder, results = finished
    with monkeypatch.context() as patched:
        patched.setattr(classifier_fit, "fit_logistic", None)
        np.testing.assert_equal(train(config_of(), folder), results)
    (folder / "results.json").unlink()  # as if it had been stopped after its checkpoint
    np.testing.assert_equal(train(config_of(), folder), results)

    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(classifier_fit, "fit_logistic", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(config_of(), RunFolder(tmp_path / "other"))
    np.testing.assert_equal(train(config_of(), RunFolder(tmp_path / "other")), results)


def test_without_other_splits_there_are_the_images_of_the_training(tmp_path):
    config = config_of(data__test_splits="()", data__val_split="")
    validate(config)
    folder = RunFolder(tmp_path / "run")
    assert list(train(config, folder)) == [OUT_OF_FOLD]
    page = write_report(folder).read_text()
    assert "each scored by a fit without the image" in page
    assert "a fit to convergence has no steps" in page
    assert "to convergence, by logistic regression" in page
    assert "cannot be shown" not in page, "the mistakes are images of the training split"


@pytest.mark.slow
def test_images_that_cannot_be_read_have_no_part_in_the_fit(tmp_path, monkeypatch, unreadable_image):
    folder, fitted = RunFolder(tmp_path / "run"), []
    monkeypatch.setattr(classifier_fit, "fit_logistic", lambda *a, **k: fitted.append(a) or fit_logistic(*a, **k))
    train(config_of(data__bad_images="skip", data__test_splits="()", data__val_split=""), folder)
    assert [len(array) for array in fitted[0]] == [49, 49]
    np.testing.assert_array_equal(fitted[0][1], np.delete(open_split(config_of().data, "train").labels, 3, axis=0))
    assert (~read_scores(folder)[OUT_OF_FOLD].read).nonzero()[0].tolist() == [3]
    assert [line.split(",")[0] for line in (folder / "skipped_images.csv").read_text().splitlines()] == [
        "split",
        "train",
    ]


def test_keys_about_steps_have_no_effect(finished, tmp_path):
    folder = RunFolder(tmp_path / "other")
    batches = {"train__batch_size": "7", "train__accumulate": "2"}
    train(config_of(optim__schedule="cosine", optim__warmup_steps="9", **batches), folder)
    assert folder.read_json("results.json") == finished[0].read_json("results.json")


@pytest.mark.slow
def test_another_start_of_the_classifier_changes_nothing(finished, tmp_path):
    folder, results = finished
    shutil.copytree(folder.path, tmp_path / "first")
    again = config_of(init_from=str(tmp_path / "first"))
    ours = train(again, RunFolder(tmp_path / "again"))
    assert ours["test"]["mAP"] == pytest.approx(results["test"]["mAP"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model__head__pool": "patches"}, "fits one linear classifier: set model.head.kind=linear, pool=cls"),
        ({"model__head__kind": "query"}, "fits one linear classifier"),
        ({"data__cache_features": "no"}, "needs fixed features: set data.cache_features=float32, or train.fit=steps"),
        ({"loss__kind": "asymmetric"}, "minimizes bce and leaves out unknown labels: set loss.kind=bce"),
        ({"loss__positive_weight": "2"}, "minimizes bce"),
    ],
)
def test_a_config_that_is_no_logistic_regression_is_refused(refusal, changes, expected):
    assert expected in refusal(validate, config_of(**changes))


def test_further_trained_parameters_and_traces_are_refused(tmp_path, refusal):
    config = config_of()
    config.trainable = ((r"^backbone/", False), (r"bias", False), (r"", True))
    assert "nothing else, but config.trainable differs in head/classifier/bias" in refusal(
        train, config, RunFolder(tmp_path)
    )
    text = refusal(train, config_of(), RunFolder(tmp_path / "run"), profile=Window(1, 1), error=UserError)
    assert "--profile traces steps" in text
