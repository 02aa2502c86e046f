"""Settings that follow others until they are set themselves."""

import copy

import pytest

from mlmoe_jax.config import apply_overrides, default_config, from_json, load_config, to_json
from mlmoe_jax.config.loading import flatten
from mlmoe_jax.config.recipes.benchmarks import follow
from mlmoe_jax.models.rules import first_match


@pytest.fixture
def config():
    """A config whose learning rate is a thousandth of the batch size times the number of epochs."""
    config = default_config()
    config.train.batch_size, config.train.epochs = 4, 2
    follow(config, "optim.learning_rate", lambda size, epochs: size * epochs / 1000, "train.batch_size", "train.epochs")
    return config


def test_a_setting_follows_every_change_of_the_others(config):
    assert config.optim.learning_rate == 0.008
    config.train.batch_size = 5
    apply_overrides(config, [("train.epochs", "3")])
    assert config.optim.learning_rate == flatten(config)["optim.learning_rate"] == 0.015


def test_a_value_that_is_set_stays(config):
    apply_overrides(config, [("optim.learning_rate", "0.5"), ("train.epochs", "7")])
    assert config.optim.learning_rate == 0.5
    config.train.batch_size = 9
    assert config.optim.learning_rate == 0.5


def test_a_copy_follows_its_own_settings(config):
    other = copy.deepcopy(config)
    other.update_from_flattened_dict({"train.batch_size": 10})
    assert (config.optim.learning_rate, other.optim.learning_rate) == (0.008, 0.02)


def test_a_second_rule_replaces_the_first(config):
    follow(config, "optim.learning_rate", lambda size: size / 10, "train.batch_size")
    config.train.epochs, config.train.batch_size = 100, 7
    assert config.optim.learning_rate == 0.7


def test_a_run_stores_the_value(config):
    stored = from_json(to_json(config))
    stored.train.batch_size = 100
    assert stored.optim.learning_rate == 0.008


# ----------------------------------------------------------------------------------------------------- in the configs
def test_the_learning_rate_of_a_preset_follows_backbone_and_resolution():
    def rate(reference, **overrides):
        return load_config(reference, [(key.replace("__", "."), value) for key, value in overrides.items()]).optim

    small = {"model__backbone__name": "dinov2_vits14"}
    assert rate("mlvpt_dinov2", **small).learning_rate == 5e-4
    assert rate("mlvpt_dinov2:backbone=dinov2_vits14", model__backbone__name="dinov2_vitb14").learning_rate == 1e-4
    assert rate("vpt:dataset=voc2007", data__image_size="448").learning_rate == 1e-4
    assert rate("mlvpt_dinov2", **small, optim__learning_rate="0.01").learning_rate == 0.01
    assert rate("mlvpt_dinov2", optim__learning_rate="0.01", **small).learning_rate == 0.01
    assert rate("mlvpt_dinov2:preset=paper", **small).learning_rate == 5e-4


def test_whether_a_backbone_is_tuned_follows_the_backbone():
    vit = [("model.backbone.name", "dinov2_vits14")]
    everything, head = (r"", True), ((r"^backbone/", False), (r"", True))
    assert load_config("mlgcn_resnet101", []).trainable == (everything,)
    assert load_config("mlgcn_resnet101", vit).trainable == head
    assert load_config("mlgcn_resnet101:tune=yes", vit).trainable == (everything,)
    assert load_config("mlgcn_resnet101:tune=no", []).trainable == head
    frozen = (r"^backbone/(stem|stages/0)/", False)
    assert load_config("q2l_resnet101", []).trainable == (frozen, everything)
    assert load_config("hsq_resnet101", vit).trainable == (frozen, *head)


@pytest.mark.parametrize("method", ["mlgcn", "addgcn", "drmoe", "ml_decoder"])
def test_only_a_tuned_backbone_trains_its_batch_normalization(method):
    """Otherwise a frozen one would drift from its weights, and its features could not be cached."""

    def mode(arguments="", *overrides):
        return load_config(f"{method}_resnet101{arguments}", list(overrides)).model.backbone.batch_norm

    assert mode() == "trainable"
    assert mode(":tune=no") == mode("", ("model.backbone.name", "dinov2_vits14")) == "frozen"
    assert mode(":tune=no", ("model.backbone.batch_norm", "running")) == "running"


def test_fine_tuning_trains_batch_normalization_too():
    for name in ("resnet101", "efficientnet_lite0"):
        config = load_config(f"finetune:backbone={name},dataset=coco2014", [])
        assert config.model.backbone.batch_norm == "trainable"
    assert load_config("finetune:dataset=coco2014", []).model.backbone.batch_norm == "frozen"


def test_ml_decoder_decays_matrices_only():
    rules = load_config("ml_decoder_resnet101", []).optim.decay_rules
    names = ("head/decoder/embed/kernel", "backbone/stages/0/0/layer_scale/gamma", "backbone/norm/scale", "a/bias")
    assert [first_match(rules, name, 1.0) for name in names] == [1.0, 0.0, 0.0, 0.0]


def test_a_tuned_backbone_of_ml_decoder_gets_pixels_in_0_to_1():
    def how(*overrides):
        return load_config("ml_decoder_resnet101", list(overrides)).model.backbone.normalization

    vit = ("model.backbone.name", "dinov2_vits14")
    assert how() == "unit"
    assert how(vit) == "auto"
    assert how(vit, ("model.backbone.normalization", "unit")) == "unit"
    assert load_config("ml_decoder_resnet101:dataset=digits", []).model.backbone.normalization == "auto"


def test_an_unknown_backbone_is_one_sentence(refusal):
    sentence = refusal(lambda: flatten(load_config("mlgcn_resnet101", [("model.backbone.name", "resnet999")])))
    assert sentence.startswith("there is no backbone 'resnet999' for model.backbone.name; did you mean 'resnet")
