"""`apply`, through which every step runs a model: its two modes, the padding of labels, attention maps."""

from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mlmoe_jax import load_config
from mlmoe_jax.config import default_config
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.apply import PlacedModel, apply_model
from mlmoe_jax.models.attributes import NO_SOFTMAX
from mlmoe_jax.models.outputs import Features, Prediction
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.runtime.sharding import LabelAxes, make_mesh
from mlmoe_jax.training.loop import require_trainable

SIDE, K, B = 4, 3, 8
PREPROCESS = Preprocess(SIDE, (0.5, 0.4, 0.3), (0.25, 0.2, 0.1))


class Model(nnx.Module):
    """Batch norm, dropout and a linear layer; it records its arguments."""

    seen: ClassVar[dict[str, bool]] = {}
    softmax = NO_SOFTMAX

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True)
        self.head = nnx.Linear(SIDE * SIDE * 3, K, rngs=rngs)

    def __call__(self, image, *, labels=None, rngs=None, return_attention=False):
        Model.seen = {"labels": labels is not None, "return_attention": return_attention}
        features = self.dropout(self.norm(image).reshape(len(image), -1), rngs=rngs)
        return Prediction(self.head(features))


@pytest.fixture
def parts():
    """The placed model, and its values with its statistics."""
    definition, params, stats = ModelDef.split(Model(rngs=nnx.Rngs(0)))
    mesh = make_mesh(default_config().mesh)
    return PlacedModel(definition=definition, preprocess=PREPROCESS, mesh=mesh), {**params, **stats}


@pytest.fixture
def batch():
    draw = np.random.default_rng(0)
    image = draw.integers(0, 256, (B, SIDE, SIDE, 3)).astype(np.uint8)
    return {"image": image, "label": draw.integers(0, 2, (B, K)).astype(np.float32)}


def test_without_a_key_the_model_evaluates(parts, batch):
    placed, values = parts
    prediction, stats = apply_model(placed, values, {"image": batch["image"]})
    image = PREPROCESS(batch["image"]).reshape(B, -1)
    expected = image / np.sqrt(1 + 1e-5) @ values["head/kernel"] + values["head/bias"]
    np.testing.assert_allclose(prediction.logits, expected, rtol=1e-4, atol=1e-5)
    assert stats.keys() == {"norm/mean", "norm/var"}
    for path, value in stats.items():
        np.testing.assert_array_equal(value, values[path], err_msg=path)
    assert Model.seen == {"labels": False, "return_attention": False}


def test_flips_average_the_logits_of_an_image_and_its_mirror_in_evaluation(parts, batch):
    placed, values = parts
    flips = replace(PREPROCESS, flips=True)

    def logits(image, preprocess, **options):
        given = {**batch, "image": image}
        return np.asarray(apply_model(replace(placed, preprocess=preprocess), values, given, **options)[0].logits)

    image, key = batch["image"], jax.random.key(0)
    mirrored = logits(image[:, :, ::-1], PREPROCESS)
    assert np.abs(mirrored - logits(image, PREPROCESS)).max() > 0.1
    np.testing.assert_allclose(logits(image, flips), (logits(image, PREPROCESS) + mirrored) / 2, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(logits(image, flips, key=key), logits(image, PREPROCESS, key=key))


def test_cached_features_have_no_mirror_images():
    overrides = {"data.cache_features": "float32", "eval.flips": True}
    config = load_config("linear_probe:dataset=digits", overrides)
    with pytest.raises(UserError, match="has no features of mirror images"):
        require_trainable(config)
    config.eval.flips = False
    require_trainable(config)


def test_with_a_key_the_model_trains(parts, batch):
    placed, values = parts

    def trained(seed):
        return apply_model(placed, values, batch, key=jax.random.key(seed))

    (one, stats), (again, _), (other, _) = trained(1), trained(1), trained(2)
    assert Model.seen["labels"]
    np.testing.assert_array_equal(one.logits, again.logits)
    assert not np.allclose(one.logits, other.logits), "dropout is drawn from the key"
    assert not np.allclose(stats["norm/mean"], values["norm/mean"]), "batch norm takes the statistics of the batch"
    np.testing.assert_allclose(stats["norm/mean"], 0.01 * PREPROCESS(batch["image"]).mean((0, 1, 2)), rtol=1e-4)


def test_the_padding_of_labels_is_removed(parts, batch):
    placed, values = parts
    whole, _ = apply_model(placed, values, batch)
    padded = {
        **values,
        "head/kernel": jnp.pad(values["head/kernel"], [(0, 0), (0, 2)], constant_values=9.0),
        "head/bias": jnp.pad(values["head/bias"], (0, 2), constant_values=9.0),
    }
    axes = LabelAxes(K, {"head/kernel": 1, "head/bias": 0})
    np.testing.assert_array_equal(apply_model(replace(placed, label_axes=axes), padded, batch)[0].logits, whole.logits)


def test_attention_maps_are_returned_on_request(parts, batch):
    apply_model(*parts, batch, return_attention=True)
    assert Model.seen["return_attention"]


def test_pooled_features_are_a_summary_or_the_mean_of_tokens():
    draw = np.random.default_rng(0)
    cls, mean = draw.normal(size=(2, B, 5)).astype(np.float32)
    prompts, patches = draw.normal(size=(2, B, 4, 5)).astype(np.float32)
    for features, expected in (
        (Features(cls, prompts, patches, (2, 2)), cls),
        (Features(None, None, patches, (2, 2), mean=mean), mean),
        (Features(None, prompts, patches, (2, 2)), patches.mean(axis=1)),
        (Features(None, prompts, None, (2, 2)), prompts.mean(axis=1)),
    ):
        np.testing.assert_allclose(features.pooled(), expected, rtol=1e-6)
