"""Training on cached features, against the same training on images."""

import numpy as np
import pytest
from helpers.refusals import run_command
from helpers.runs import recipe
from helpers.scored_run import stored_scores

from mlmoe_jax.data import features
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.evaluation.evaluate import evaluate_run
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training.loop import train

FLOAT32 = {"data__cache_features": "float32"}


@pytest.fixture
def cache(run, tmp_path, monkeypatch):
    """The folder of features in an empty cache."""
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def scores(folder: RunFolder) -> dict[str, np.ndarray]:
    return {name: split.scores for name, split in stored_scores(folder).items()}


# CNN-RNN learns from the labels and has dropout; Q2L reads the feature map.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["q2l_resnet101", "cnn_rnn_resnet101"])
def test_results_are_those_of_training_on_images(method, tmp_path, cache, monkeypatch):
    reference = f"{method}:dataset=digits"
    plain, cached = RunFolder(tmp_path / "plain"), RunFolder(tmp_path / "cached")
    train(recipe(reference), plain)
    assert not cache.exists()
    monkeypatch.setattr(features, "PART_BYTES", 2**14)  # several parts, in both splits
    train(recipe(reference, **FLOAT32), cached)
    assert len(list(cache.iterdir())) == 3  # train, val and test

    for one, other in zip(plain.rows(), cached.rows(), strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-4)
    assert scores(cached).keys() == scores(plain).keys() != set()
    for name, found in scores(cached).items():
        np.testing.assert_allclose(found, scores(plain)[name], atol=1e-4, err_msg=name)

    in_training = scores(cached)
    evaluate_run(cached, [])  # on images
    for name, found in scores(cached).items():
        np.testing.assert_allclose(found, in_training[name], atol=1e-5, err_msg=name)


def test_features_are_computed_once_and_what_is_lost_again(cache, monkeypatch, capsys):
    monkeypatch.setattr(features, "PART_BYTES", 16 * 4 * 20)  # parts of 20 class tokens
    computed, batches = [], FeatureExtractor.batches

    def counted(self, split):
        computed.append(len(split))
        yield from batches(self, split)

    monkeypatch.setattr(FeatureExtractor, "batches", counted)
    config = recipe("probe", **FLOAT32)
    split = open_split(config.data, "train")
    for config.seed in (0, 1):  # with weights=none, the seed draws the backbone
        extractor = FeatureExtractor.from_config(config, 10)
        extractor.cached(split)
    extractor.cached(split)
    assert computed == [60, 60]
    *_, first, last = capsys.readouterr().err.splitlines()
    assert "features of train, without augmentation: 60 images, 0.0 MB as float32 in " in first
    assert last.endswith(", already there")
    for path in cache.glob("*/00001.read.npy"):  # as if the program had been stopped in between
        path.unlink()
    extractor.cached(split)
    assert computed == [60, 60, 20]


def test_features_are_written_for_the_user(tmp_path, cache, capsys):
    flags = ["--config.model.backbone.weights=none", "--config.data.test_splits=test"]
    assert (
        run_command("--mode=features", "--config=linear_probe:dataset=digits", f"--output={tmp_path / 'out'}", *flags)
        == 0
    )
    assert capsys.readouterr().out == f"features: {tmp_path / 'out'}\n"
    assert not cache.exists()
    config = recipe("probe", **FLOAT32)
    FeatureExtractor.from_config(config, 10).cached(open_split(config.data, "train"))
    (as_in_training,) = map(np.load, cache.glob("*/00000.cls.npy"))
    for name, count in (("train", 60), ("val", 40), ("test", 40)):
        assert np.load(tmp_path / "out" / f"{name}.cls.npy").shape == (count, 16)
        assert np.load(tmp_path / "out" / f"{name}.labels.npy").shape == (count, 10)
        assert len((tmp_path / "out" / f"{name}.ids.txt").read_text().splitlines()) == count
    np.testing.assert_allclose(np.load(tmp_path / "out" / "train.cls.npy"), as_in_training, atol=1e-5)
    assert len((tmp_path / "out" / "classes.txt").read_text().splitlines()) == 10
