"""Training on cached features, against the same training on images."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers import tiny

from mlmoe_jax.config import load_config, validate
from mlmoe_jax.data import features
from mlmoe_jax.evaluation.evaluate import evaluate_run
from mlmoe_jax.evaluation.results import read_scores
from mlmoe_jax.inference import feature_extractor
from mlmoe_jax.main import main
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.resnet import ResNetShape
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import open_run
from mlmoe_jax.training.loop import train

SMALL = {
    "model.backbone.weights": "none",
    "train.epochs": "2",
    "train.batch_size": "20",
    "train.log_every": "1",
    "eval.batch_size": "16",
    "eval.every_epochs": "1",
    "log.tensorboard": "False",
    "data.test_splits": "('test',)",
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, which holds digits and nothing else."""
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    tiny.use_vit(monkeypatch, patch=16)
    tiny.use_scenes(monkeypatch, train=50, val=20, test=20, test_shift=20)
    return tmp_path / "cache" / "features"


def config_of(reference: str = "linear_probe:dataset=digits", **overrides):
    config = load_config(reference, list((SMALL | {k.replace("__", "."): v for k, v in overrides.items()}).items()))
    validate(config)
    return config


def scores(folder: RunFolder) -> dict[str, np.ndarray]:
    return {name: split.scores for name, split in read_scores(folder).items()}


# CNN-RNN learns from the labels and has dropout; Q2L reads the feature map.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["q2l_resnet101", "cnn_rnn_resnet101"])
def test_results_are_those_of_training_on_images(method, tmp_path, cache, monkeypatch):
    reference = f"{method}:dataset=digits"
    plain, cached = RunFolder(tmp_path / "plain"), RunFolder(tmp_path / "cached")
    train(config_of(reference), plain)
    assert not cache.exists()
    monkeypatch.setattr(features, "PART_BYTES", 2**14)  # several parts, in both splits
    train(config_of(reference, data__cache_features="float32"), cached)
    assert len(list(cache.iterdir())) == 3  # train, val and test

    for one, other in zip(plain.rows(), cached.rows(), strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-4)
    ours, theirs = open_run(cached), open_run(plain)
    for path, value in ours.values.items():
        np.testing.assert_allclose(value, theirs.values[path], atol=2e-4, err_msg=path)
    assert scores(cached).keys() == scores(plain).keys() != set()
    for name, found in scores(cached).items():
        np.testing.assert_allclose(found, scores(plain)[name], atol=1e-4, err_msg=name)

    in_training = scores(cached)
    evaluate_run(cached, [])  # on images
    for name, found in scores(cached).items():
        np.testing.assert_allclose(found, in_training[name], atol=1e-5, err_msg=name)


def test_features_are_computed_once_and_what_is_lost_again(tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setattr(features, "PART_BYTES", 16 * 4 * 20)  # parts of 20 class tokens
    computed = []
    batches = feature_extractor.FeatureExtractor.batches

    def counted(self, split):
        computed.append((split.name, len(split)))
        yield from batches(self, split)

    monkeypatch.setattr(feature_extractor.FeatureExtractor, "batches", counted)
    config = config_of(data__cache_features="float32", train__epochs="1")
    train(config, RunFolder(tmp_path / "one"))
    assert computed == [("train", 50), ("val", 20), ("test", 20)]
    said = capsys.readouterr().err
    assert "features of train, without augmentation: 50 images, 0.0 MB as float32 in " in said

    computed.clear()
    train(config_of(data__cache_features="float32", train__epochs="1", seed="1"), RunFolder(tmp_path / "two"))
    assert computed == [("train", 50), ("val", 20), ("test", 20)], "with weights=none, the seed draws the backbone"

    computed.clear()
    config.optim.learning_rate = 1e-3
    train(config, RunFolder(tmp_path / "three"))
    assert computed == []
    assert "already there" in capsys.readouterr().err

    for path in cache.glob("*/00001.read.npy"):  # as if the program had been stopped in between
        path.unlink()
    shutil.rmtree(tmp_path / "three")
    train(config, RunFolder(tmp_path / "three"))
    assert computed == [("train", 20)]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["vit_digits", "resnet101"])
def test_a_run_resumes_on_its_features(backbone, tmp_path, cache, monkeypatch):
    entry = replace(catalog.CATALOG["resnet101"], shape=ResNetShape((1, 1), stem=4))
    monkeypatch.setitem(catalog.CATALOG, "resnet101", entry)
    often = dict(checkpoint__every_epochs="1", checkpoint__keep="2")
    config = config_of(f"linear_probe:dataset=digits,backbone={backbone}", data__cache_features="float32", **often)
    whole, resumed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "resumed")
    for folder in (whole, resumed):
        train(config, folder)
    *_, last = sorted((resumed / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(last)
    shutil.rmtree(cache)  # its features are computed again, before a checkpoint is read
    train(config, resumed)
    ours, theirs = open_run(resumed), open_run(whole)
    for path, value in ours.values.items():
        np.testing.assert_array_equal(value, theirs.values[path], err_msg=path)


@pytest.mark.usefixtures("cache")
def test_what_changes_features_in_training_is_refused(tmp_path, refusal):
    def refused(reference="linear_probe:dataset=digits", **overrides):
        return refusal(config_of, reference, data__cache_features="float32", **overrides)

    text = refused(augment__flip="True", augment__cutout="0.5")
    assert "without augmentation: set augment.flip=False, augment.cutout=0.0" in text
    assert "augment.randaugment=none" in refused(augment__randaugment="uda")
    assert "set augment.hue=0.0" in refused(augment__hue="0.1")
    assert "but deep prompts change them" in refused("vpt:dataset=digits")
    cnn = {"model__backbone__name": "resnet50", "model__backbone__batch_norm": "trainable"}
    assert "do not depend on the batch" in refused(**cnn)
    config_of(data__cache_features="float32", model__backbone__batch_norm="trainable")  # a ViT has none

    tuned = config_of("finetune:dataset=digits", data__cache_features="float32")
    text = refusal(train, tuned, RunFolder(tmp_path / "run"))
    assert "needs a frozen backbone, but" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_images_that_cannot_be_read_are_left_out(tmp_path, cache, unreadable_image):
    folder = RunFolder(tmp_path / "run")
    train(config_of(data__cache_features="float32", data__bad_images="skip"), folder)
    skipped = (folder / "skipped_images.csv").read_text()
    assert [line.split(",")[0] for line in skipped.splitlines()] == ["split", "train", "val", "test"]
    assert np.isnan(next(iter(scores(folder).values()))[3]).all()

    unreadable_image()  # as after a failure of the network
    again = RunFolder(tmp_path / "again")
    train(config_of(data__cache_features="float32", data__bad_images="skip"), again)
    assert np.isfinite(next(iter(scores(again).values()))).all()


def test_features_are_written_for_the_user(tmp_path, cache, capsys):
    flags = [f"--config.{key}={value}" for key, value in SMALL.items()]
    assert (
        main(["--mode=features", "--config=linear_probe:dataset=digits", f"--output={tmp_path / 'out'}", *flags]) == 0
    )
    assert capsys.readouterr().out == f"features: {tmp_path / 'out'}\n"
    assert not cache.exists()
    config = config_of(data__cache_features="float32", train__epochs="1")
    train(config, RunFolder(tmp_path / "run"))
    tables = {len(table): table for table in map(np.load, cache.glob("*/00000.cls.npy"))}
    for name, count in (("train", 50), ("val", 20), ("test", 20)):
        assert np.load(tmp_path / "out" / f"{name}.cls.npy").shape == (count, 16)
        assert np.load(tmp_path / "out" / f"{name}.labels.npy").shape == (count, 10)
        assert len((tmp_path / "out" / f"{name}.ids.txt").read_text().splitlines()) == count
    np.testing.assert_allclose(np.load(tmp_path / "out" / "train.cls.npy"), tables[50], atol=1e-5)
    assert len((tmp_path / "out" / "classes.txt").read_text().splitlines()) == 10


def test_features_need_a_folder_and_no_prompts(tmp_path, capsys):
    assert main(["--mode=features", "--config=linear_probe:dataset=digits"]) == 2
    assert "the following arguments are required: --output" in capsys.readouterr().err
    assert main(["--mode=features", "--config=vpt:dataset=digits", f"--output={tmp_path / 'out'}"]) == 2
    assert "needs a backbone without deep prompts" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
