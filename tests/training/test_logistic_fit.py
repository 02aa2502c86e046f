"""Runs with train.fit=logistic: the run folder, reruns, and what reads the folder."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers import tiny
from helpers.name_vectors import drawn_vectors
from helpers.runs import Made, recipe
from helpers.scored_run import stored_scores

from mlmoe_jax.apps.report import page
from mlmoe_jax.apps.tools.fit_thresholds import fit_run
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.evaluation.evaluate import evaluate_run
from mlmoe_jax.evaluation.results import OUT_OF_FOLD
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.decisions import read_thresholds
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import LATEST, open_run
from mlmoe_jax.runtime.files import cache_folder
from mlmoe_jax.training import training_data
from mlmoe_jax.training.logistic import fit as classifier_fit
from mlmoe_jax.training.logistic.penalty_search import Origin, fit_logistic
from mlmoe_jax.training.loop import train

ONLY_TRAIN = {"data__test_splits": (), "data__val_split": ""}


def use_informative(patch, cache):
    """Use images whose features tell something about their labels, so that the best fit is not a constant."""
    patch.setenv("MLMOE_CACHE", str(cache))
    tiny.use_vit(patch, patch=16)
    tiny.use_scenes(patch, train=50, val=20, test=20, test_shift=20)


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory):
    """A finished run, and the cache of its features."""
    place, config = tmp_path_factory.mktemp("logistic"), recipe("logistic")
    with runs.world(), pytest.MonkeyPatch.context() as patch:
        use_informative(patch, place / "cache")
        folder = RunFolder(place / "run")
        return Made(folder, config, train(config, folder)), place / "cache"


@pytest.fixture(autouse=True)
def informative(run, made, tmp_path, monkeypatch):
    use_informative(monkeypatch, shutil.copytree(made[1], tmp_path / "cache"))


@pytest.fixture
def finished(made, tmp_path):
    """A copy of the finished run, and its results."""
    copied = made[0].copy(tmp_path / "finished")
    return copied.folder, copied.results


def test_the_run_has_the_values_of_the_fit_and_the_scores_of_images_outside(finished):
    folder, results = finished
    tables = map(np.load, (cache_folder() / "features").glob("*/00000.cls.npy"))
    [features] = [table for table in tables if len(table) == 50]
    split = open_split(recipe("logistic").data, "train")
    found = fit_logistic(features, codes := split.labels, units=split.ids)
    for which in ("best", LATEST):
        run = open_run(folder, which=which)
        np.testing.assert_allclose(run.values[classifier_fit.KERNEL], found.kernel, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(run.values[classifier_fit.BIAS], found.bias, rtol=1e-3, atol=1e-4)
    scored = stored_scores(folder)
    assert list(scored) == list(results) == ["val", "test", OUT_OF_FOLD]
    outside = scored[OUT_OF_FOLD]
    np.testing.assert_allclose(outside.scores, 1 / (1 + np.exp(-found.held_out_logits)), atol=1e-3)
    np.testing.assert_array_equal(outside.codes, codes)
    rows = (folder / "per_class.csv").read_text().splitlines()
    assert sum(row.startswith(f"{OUT_OF_FOLD},") for row in rows) == 10
    assert folder.rows() == []
    assert results[OUT_OF_FOLD]["mAP"] < evaluate_run(folder, [("data.test_splits", "('train',)")])["train"]["mAP"]


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
    train(recipe("logistic"), folder)
    assert calls[0] == patients
    assert StoredRun(folder).split(OUT_OF_FOLD).groups.tolist() == patients


@pytest.mark.slow
def test_images_with_similar_features_are_one_unit_and_a_fit_that_is_too_good_is_a_warning(
    tmp_path, monkeypatch, caplog
):
    units, compared = [], []

    def joined(split, data_config, features):
        compared.append(features)
        return replace(split, groups=[f"g{row // 2}" for row in range(len(split))])

    def fitted(*args, **options):
        units.append(options["units"])
        fit = fit_logistic(*args, **options)
        return replace(fit, losses={fit.penalty: 0.001})

    monkeypatch.setattr(classifier_fit, "join_twins", joined)
    monkeypatch.setattr(classifier_fit, "fit_logistic", fitted)
    folder = RunFolder(tmp_path / "run")
    train(recipe("logistic", **ONLY_TRAIN), folder)
    assert compared[0].shape == (50, 16)
    assert units[0] == [f"g{row // 2}" for row in range(50)]
    assert StoredRun(folder).split(OUT_OF_FOLD).groups.tolist() == units[0], "for the folds of a calibration"
    assert "with a loss of 0.0010 out of fold is too good to be true" in caplog.text


def test_thresholds_are_fitted_to_the_scores_outside(finished):
    folder, results = finished
    fitted = read_thresholds(folder)
    assert (fitted.source["split"], fitted.source["images"]) == (OUT_OF_FOLD, 50)
    assert {"CF1@fitted" in results[name] for name in ("val", "test")} == {True}
    assert "CF1@fitted" not in results[OUT_OF_FOLD]
    fit_run(folder)
    assert read_thresholds(folder) == fitted


def test_a_finished_run_is_only_evaluated(finished, monkeypatch):
    folder, results = finished
    monkeypatch.setattr(classifier_fit, "fit_logistic", None)
    np.testing.assert_equal(train(recipe("logistic"), folder), results)


def test_without_other_splits_there_are_the_images_of_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "vega_bundle", lambda: "")  # it takes seconds
    folder = RunFolder(tmp_path / "run")
    assert list(train(recipe("logistic", **ONLY_TRAIN), folder)) == [OUT_OF_FOLD]
    text = page.write_report(folder).read_text()
    assert "each scored by a fit without the image" in text
    assert "a fit to convergence has no steps" in text
    assert "to convergence, by logistic regression" in text
    assert "cannot be shown" not in text, "the mistakes are images of the training split"


@pytest.mark.slow
def test_images_that_cannot_be_read_have_no_part_in_the_fit(tmp_path, monkeypatch, unreadable_image):
    folder, fitted = RunFolder(tmp_path / "run"), []
    monkeypatch.setattr(classifier_fit, "fit_logistic", lambda *a, **k: fitted.append(a) or fit_logistic(*a, **k))
    config = recipe("logistic", data__bad_images="skip", **ONLY_TRAIN)
    train(config, folder)
    assert [len(array) for array in fitted[0]] == [49, 49]
    np.testing.assert_array_equal(fitted[0][1], np.delete(open_split(config.data, "train").labels, 3, axis=0))
    assert (~StoredRun(folder).split(OUT_OF_FOLD).read).nonzero()[0].tolist() == [3]
    rows = (folder / "skipped_images.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in rows] == ["split", "train"]


@pytest.mark.variants("projects")
@pytest.mark.parametrize("projects", [True, False], ids=["projected", "not projected"])
def test_with_vectors_of_names_the_fit_is_of_normalized_features_and_starts_from_the_vectors(
    tmp_path, capsys, projects
):
    """CLIP has a projection of image features, and SigLIP 2 has none."""
    plain = recipe("logistic", **ONLY_TRAIN)
    split, folder = open_split(plain.data, "train"), RunFolder(tmp_path / "run")
    tables = map(np.load, (cache_folder() / "features").glob("*/00000.cls.npy"))
    [features] = [table for table in tables if len(table) == 50]
    width = 9 if projects else features.shape[1]
    options = {"projects_from": projects * features.shape[1], "backbone": plain.model.backbone.name}
    vectors = drawn_vectors(split.classes, width, **options)
    vectors.write(file := tmp_path / "labels.safetensors")
    train(recipe("logistic", model__head__kind="cosine", model__head__names=str(file), **ONLY_TRAIN), folder)
    if projects:
        features = features @ vectors.projection
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    origin = Origin(vectors.kernel(), vectors.offsets())
    found = fit_logistic(features, split.labels, units=split.ids, origin=origin)
    values = open_run(folder).values
    np.testing.assert_allclose(values[classifier_fit.KERNEL], found.kernel, rtol=1e-3, atol=2e-3)
    np.testing.assert_allclose(values[classifier_fit.BIAS], found.bias, rtol=1e-3, atol=2e-3)
    chosen = "the vectors of the names" if found.origin is origin else "0, which has less log loss than the names"
    assert f"the fit is drawn towards {chosen}; labels without images keep" in capsys.readouterr().err
