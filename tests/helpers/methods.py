"""The models of config files without values, and the check of what two training steps change."""

import functools

import numpy as np
from flax import nnx

import mlmoe_jax.config as configuration
from mlmoe_jax.config import load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.build import build_model
from mlmoe_jax.models.params import ModelDef, split_trainable
from mlmoe_jax.runs.assemble import trainable_rules


@functools.cache
def abstract(reference, labels=80, overrides=()):
    """Return the config of a reference and its model, without values, which no test changes."""
    config = load_config(reference, list(overrides))
    configuration.validate(config)
    space = synthetic_label_space(labels, config.model.prompts.num_groups)
    return config, nnx.eval_shape(lambda: build_model(config, space, rngs=nnx.Rngs(0)))


def split(config, model):
    """Return all parameters of a model, and those that train."""
    _, params, _ = ModelDef.split(model)
    return params, split_trainable(params, trainable_rules(config))[0]


def counts(config, model):
    """Return the number of all parameters of a model, and of those that train."""
    return tuple(sum(p.size for p in params.values()) for params in split(config, model))


def on_digits(reference):
    """Return the config of a reference on digits, with small decoders."""
    name, _, arguments = reference.partition(":")
    config = load_config(f"{name}:dataset=digits,{arguments}".rstrip(","), [])
    configuration.validate(config)
    config.model.head.decoder.encoder_layers = min(1, config.model.head.decoder.encoder_layers)
    config.model.head.decoder.decoder_layers = 1  # one layer is like the next
    return config


def assert_frozen_values_stay_and_others_move(before, after, *, biases=False, rests=()):
    """Compare states. biases: also those, which have no effect before a batch norm, of keys and of the code's gates."""
    for path, value in before.frozen.items():
        np.testing.assert_array_equal(after.frozen[path], value, err_msg=path)
    for path, value in before.trainable.items():
        if biases or not path.endswith("bias"):
            assert (np.asarray(after.trainable[path]) != value).any() == (path not in rests), path
