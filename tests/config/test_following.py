"""Settings that follow others until they are set themselves."""

import copy

import pytest

from mlmoe_jax.config import default_config, from_json, load_config, to_json
from mlmoe_jax.config.recipes.benchmarks import follow
from mlmoe_jax.models.rules import first_match


@pytest.fixture
def config():
    """A config whose learning rate is a thousandth of the batch size times the number of epochs."""
    config = default_config()
    config.train.batch_size, config.train.epochs = 4, 2
    follow(config, "optim.learning_rate", lambda size, epochs: size * epochs / 1000, "train.batch_size", "train.epochs")
    return config


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


def test_ml_decoder_decays_matrices_only():
    rules = load_config("ml_decoder_resnet101", []).optim.decay_rules
    names = ("head/decoder/embed/kernel", "backbone/stages/0/0/layer_scale/gamma", "backbone/norm/scale", "a/bias")
    assert [first_match(rules, name, 1.0) for name in names] == [1.0, 0.0, 0.0, 0.0]
