import jax
import numpy as np
import pytest
from flax import nnx
from scipy.special import logsumexp

from mlmoe_jax.config import default_config
from mlmoe_jax.models.contracts import Features
from mlmoe_jax.models.heads.linear import LinearHead

B, N, D, K = 3, 4, 6, 5


@pytest.fixture(scope="module")
def features():
    cls, patches = jax.random.split(jax.random.key(1))
    cls, mean = jax.random.normal(cls, (2, B, D))
    return Features(cls, None, jax.random.normal(patches, (B, N, D)), (2, 2), mean=mean)


def linear(layer, x):
    return np.asarray(x, np.float64) @ np.asarray(layer.kernel) + np.asarray(layer.bias)


def test_the_class_token_alone_is_the_default(features):
    head = LinearHead(D, K, rngs=nnx.Rngs(0))
    assert head.read == ("cls",)
    prediction = head(Features(features.cls, None, None, (2, 2)))
    np.testing.assert_allclose(prediction.logits, linear(head.classifier, features.cls), rtol=1e-5, atol=1e-6)
    assert list(prediction.terms) == ["cls"]


def test_patches_are_pooled_by_a_smooth_maximum(features):
    head = LinearHead(D, K, pool="patches", rngs=nnx.Rngs(0))
    assert head.read == ("patches",)
    prediction = head(Features(None, None, features.patches, (2, 2)))
    votes = linear(head.patch_classifier, features.patches)
    np.testing.assert_allclose(prediction.logits, logsumexp(votes, axis=1) - np.log(N), rtol=1e-5, atol=1e-5)
    assert np.all(prediction.logits > votes.mean(axis=1)), "above the mean"
    assert np.all(prediction.logits < votes.max(axis=1)), "below the maximum"


def test_both_has_two_terms_and_reports_their_mean(features):
    head = LinearHead(D, K, pool="both", rngs=nnx.Rngs(0))
    assert head.read == ("cls", "patches")
    prediction = head(features)
    assert not np.allclose(head.classifier.kernel, head.patch_classifier.kernel)
    np.testing.assert_allclose(prediction.terms["cls"], linear(head.classifier, features.cls), rtol=1e-5, atol=1e-6)
    votes = linear(head.patch_classifier, features.patches)
    np.testing.assert_allclose(prediction.terms["patches"], logsumexp(votes, axis=1) - np.log(N), rtol=1e-5, atol=1e-5)
    mean = (prediction.terms["cls"] + prediction.terms["patches"]) / 2
    np.testing.assert_allclose(prediction.logits, mean, rtol=1e-6)


def test_a_mean_is_classified_like_a_class_token(features):
    head = LinearHead(D, K, pool="mean", rngs=nnx.Rngs(0))
    assert head.read == ("mean",)
    prediction = head(features)
    np.testing.assert_allclose(prediction.logits, linear(head.classifier, features.mean), rtol=1e-5, atol=1e-6)
    assert prediction.terms == {}
    config = default_config()
    config.model.head.pool = "mean"
    assert LinearHead.terms(config) == ("logits",)
    assert head.published_macs(N) == LinearHead(D, K, rngs=nnx.Rngs(0)).published_macs(N) == (D * K, 0)
