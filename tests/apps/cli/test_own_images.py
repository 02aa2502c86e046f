"""Images of one's own: the backbone that `configs/own_csv.py` chooses."""

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.config import load_config, to_json, validate
from mlmoe_jax.main import main
from mlmoe_jax.models.backbones.catalog import CATALOG
from mlmoe_jax.pretrained.weights import has_weights
from mlmoe_jax.runs.folder import RunFolder

CONFIG = str(REPOSITORY / "configs" / "own_csv.py")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def fetch_nothing_but(cache, name: str) -> None:
    path = cache / CATALOG[name].file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"as if it had been downloaded")


def test_without_a_download_it_is_the_one_that_is_installed(cache, capsys):
    config = load_config(CONFIG, [])
    validate(config)
    assert config.model.backbone.name == "efficientnet_lite0"
    assert config.model.backbone.normalization == "auto"
    assert (config.model.head.kind, config.data.cache_features) == ("linear", "float32")
    assert (config.train.fit, config.data.val_fraction, config.data.val_split) == ("logistic", 0, "")
    assert config.thresholds.at_end
    assert capsys.readouterr().err.splitlines() == [
        "backbone: efficientnet_lite0, which is installed; a better one, which is downloaded once, is "
        ":backbone=dinov2_vits14"
    ]


@pytest.mark.usefixtures("cache")
def test_training_by_steps_is_asked_for(capsys, refusal):
    config = load_config(f"{CONFIG}:fit=steps,epochs=3", [])
    validate(config)
    assert (config.train.fit, config.data.val_fraction, config.data.val_split) == ("steps", 0.1, "val")
    assert (config.train.epochs, config.eval.select_on) == (3, "val")
    assert load_config(f"{CONFIG}:fit=steps", []).train.epochs == 20
    assert "no effect" not in capsys.readouterr().err
    load_config(f"{CONFIG}:epochs=3", [])
    assert "epochs has no effect on a fit to convergence; fit=steps trains by steps" in capsys.readouterr().err
    assert "'fit' is 'sgd' and must be one of logistic, steps" in refusal(load_config, f"{CONFIG}:fit=sgd", [])


@pytest.mark.parametrize("name", ["dinov2_vits14", "dinov2_vitb14"])
def test_dinov2_is_taken_if_it_is_there(cache, capsys, name):
    fetch_nothing_but(cache, "dinov2_vits14")
    fetch_nothing_but(cache, name)
    config = load_config(CONFIG, [])
    validate(config)
    assert (config.model.backbone.name, config.model.prompts.kind) == (name, "group")
    assert config.data.cache_features == "no"
    assert (config.train.fit, config.data.val_fraction, config.train.epochs) == ("steps", 0.1, 20)
    assert f"backbone: {name}, whose weights are on this machine" in capsys.readouterr().err


@pytest.mark.usefixtures("cache")
def test_one_that_is_named_is_taken_silently(capsys):
    config = load_config(f"{CONFIG}:backbone=resnet50", [])
    validate(config)
    assert (config.model.backbone.name, config.model.prompts.kind) == ("resnet50", "none")
    assert capsys.readouterr().err == ""


def test_a_run_keeps_its_backbone(cache, tmp_path, monkeypatch):
    folder, trained = RunFolder(tmp_path / "run"), []
    folder.write_text("config.json", to_json(load_config(CONFIG, [])))
    folder.write_json("results.json", {})
    fetch_nothing_but(cache, "dinov2_vits14")
    monkeypatch.setattr("mlmoe_jax.training.loop.train", lambda config, *_, **__: trained.append(config) or {"val": {}})
    monkeypatch.setattr("mlmoe_jax.inference.explain.write_requested_samples", lambda folder, config: None)
    assert main([f"--config={CONFIG}", f"--workdir={folder}"]) == 0
    assert main([f"--config={CONFIG}", f"--workdir={tmp_path / 'new'}"]) == 0
    assert [config.model.backbone.name for config in trained] == ["efficientnet_lite0", "dinov2_vits14"]


def test_weights_are_found_in_the_package_in_an_installed_one_and_in_the_cache(cache):
    assert has_weights("vit_digits")
    assert has_weights("efficientnet_lite0")
    assert not has_weights("dinov2_vits14")
    fetch_nothing_but(cache, "dinov2_vits14")
    assert has_weights("dinov2_vits14")
