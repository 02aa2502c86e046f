from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY

from mlmoe_jax.models.heads.sequence import BEAM_WIDTH, CNNRNNHead
from mlmoe_jax.models.layers.beam_search import beam_search, log_odds
from mlmoe_jax.models.macs import count_macs
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.models.params import ModelDef

TWIN = np.load(PARITY / "graph_heads.npz")
ORDER, MAX_LABELS, WIDTH = TWIN["cnn_rnn/order"].tolist(), 3, 32
SIZES = {"embedding": 8, "hidden": 16, "max_labels": MAX_LABELS}
# Our paths and torch's tensors; torch adds a second bias.
PATHS = {
    "embedding": "embedding.weight",
    "lstm/dense_i/kernel": "cell.weight_ih",
    "lstm/dense_h/kernel": "cell.weight_hh",
    "lstm/dense_h/bias": "cell.bias_hh",
    "state_projection/kernel": "state_projection.weight",
    "image_projection/kernel": "image_projection.weight",
}


def make_head(order=ORDER, **options):
    return CNNRNNHead(WIDTH, order, **SIZES | options, rngs=nnx.Rngs(0))


def structure(order=ORDER, **options):
    """Return the ModelDef of the head without computing initial values."""
    return ModelDef.split(nnx.eval_shape(lambda: make_head(order, **options)))[0]


def ours(path, name, tensor):
    return tensor if path in ("embedding", "lstm/dense_h/bias") else tensor.T


def twin_values():
    tensors = {name: TWIN[f"cnn_rnn/weights/{name}"].astype(np.float32) for name in (*PATHS.values(), "cell.bias_ih")}
    tensors["cell.bias_hh"] = tensors["cell.bias_hh"] + tensors["cell.bias_ih"]
    return {path: ours(path, name, tensors[name]) for path, name in PATHS.items()}


def features_of(vectors):
    return Features(vectors, None, None, (1, 1))


FEATURES = features_of(TWIN["cnn_rnn/features"].astype(np.float32))


def close(found, expected, about=""):
    assert np.abs(np.asarray(found) - expected).max() <= 2e-5 * np.abs(expected).max(), about


# ------------------------------------------------------------------------------------------------------------ training
def test_scores_and_training_are_those_of_the_torch_twin():
    definition, params, stats = ModelDef.split(nnx.eval_shape(make_head))
    assert set(params) == set(PATHS)
    assert not stats

    @jax.jit
    def train(values, features, labels, path):
        def loss(values):
            prediction = definition.merge(values)(features, labels=labels)
            return prediction.penalties["sequence"].mean(), prediction

        head = definition.merge(values)
        scores = head.scores(head.image_feature(features_of(features.cls[:1])), path)
        head.train()
        dropped = head(features, labels=labels, rngs=nnx.Rngs(7)).penalties["sequence"]
        (_, prediction), gradient = jax.value_and_grad(loss, has_aux=True)(values)
        return scores, prediction, gradient, dropped

    path = TWIN["cnn_rnn/path"]
    scores, prediction, gradient, dropped = train(twin_values(), FEATURES, TWIN["cnn_rnn/labels"], path[None])
    assert scores.shape == (1, len(path), 7)
    close(scores[0], TWIN["cnn_rnn/scores"])
    close(prediction.penalties["sequence"], TWIN["cnn_rnn/losses"])
    close(prediction.logits, TWIN["cnn_rnn/logits"])
    for path, name in PATHS.items():
        close(gradient[path], ours(path, name, TWIN[f"cnn_rnn/gradient/{name}"]), path)
    assert np.abs(dropped - prediction.penalties["sequence"]).min() > 1e-3


def test_sequences_are_sorted_by_frequency():
    """ORDER is 4 0 5 2 1 3; 6 is the end."""
    definition, longer = structure(), structure(max_labels=50)

    @jax.jit
    def sequences(values, labels):
        return [head.merge(values).sequence(labels) for head in (definition, longer)]

    (targets, counts), (long, _) = sequences(twin_values(), TWIN["cnn_rnn/labels"])
    assert targets.tolist() == [[6, 6, 6, 6], [4, 0, 1, 6], [4, 5, 1, 6], [2, 6, 6, 6]]
    # the second image has a fourth label: its third is not followed by the end
    assert counts.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert long.tolist()[1] == [4, 0, 1, 3, 6, 6, 6], "at most all labels and the end"


# ----------------------------------------------------------------------------------------------------------- the search
LABELS, STATE = 5, 4


def small_rnn(seed, scale=2.5):
    """Return weights of a network that scores the successors of a path."""
    random = np.random.default_rng(seed)
    shapes = (STATE, STATE), (LABELS + 2, STATE), (STATE, LABELS + 1)
    mix, take, give = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    return mix, take, scale * give


@partial(jax.jit, static_argnums=(2, 3))
def search_rnn(weights, images, width, max_labels):
    mix, take, give = weights

    def advance(known, last):
        known = jnp.tanh(known @ mix + take[last])
        return known, known @ give

    known = jnp.broadcast_to(images[:, None], (len(images), width, STATE))
    return beam_search(advance, known, start=LABELS + 1, labels=LABELS, max_labels=max_labels)


def after(weights):
    """Return a function that computes log p of the successors of a path of one image, in float64."""
    mix, take, give = (np.asarray(x, np.float64) for x in weights)

    def log_p(image, path):
        known = image
        for label in (LABELS + 1, *path):
            known = np.tanh(known @ mix + take[label])
        scores = known @ give
        return scores - np.log(np.exp(scores).sum())

    return log_p


def beam_by_hand(log_p, image, width, max_labels, labels=LABELS):
    """Search with lists of paths; return the best path, its log-probability and each label's best probability."""
    beam, best, probability = [(0.0, ())], (-np.inf, ()), np.zeros(labels)
    for step in range(max_labels + 1):
        if beam[0][0] <= best[0]:
            break
        grown = []
        for score, path in beam:
            following = log_p(image, path)
            probability = np.maximum(probability, np.exp(following[:-1]))
            best = max(best, (score + following[-1], path))
            grown += [(score + following[k], (*path, k)) for k in range(labels) if k not in path]
        beam = sorted(grown, reverse=True)[:width]
        if step == max_labels or not beam:
            break
    return best[1], best[0], probability


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def path_of(row):
    return tuple(int(label) for label in row if label >= 0)


@pytest.mark.parametrize("width", [1, 3])
def test_a_narrow_beam_follows_the_definition(width):
    images = np.random.default_rng(2).normal(size=(12, STATE)).astype(np.float32)
    for seed in range(3):
        weights = small_rnn(seed, scale=1.0 + seed)
        result = search_rnn(weights, images, width, 4)
        for row, image in enumerate(images):
            path, score, probability = beam_by_hand(after(weights), image, width, 4)
            assert path_of(result.path[row]) == path
            np.testing.assert_allclose(result.log_probability[row], score, rtol=1e-5)
            np.testing.assert_allclose(sigmoid(result.label_logits[row]), probability, rtol=2e-5)


def test_log_odds_are_exact_and_finite():
    scores = np.random.default_rng(0).normal(size=(50, 6)) * 4
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(jax.jit(log_odds)(scores.astype(np.float32)), np.log(p / (1 - p)), rtol=1e-4, atol=1e-5)
    extreme = jax.jit(log_odds)(np.array([[300, 0, -300], [301, 0, -300], [0, 0, 0]], np.float32))
    assert np.isfinite(extreme).all()
    assert extreme[1, 0] > extreme[0, 0] > 290
    np.testing.assert_allclose(extreme[2], -np.log(2), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: log_odds(x).sum()))(np.array([300, 0, -300], np.float32))
    assert np.isfinite(gradient).all()


# ------------------------------------------------------------------------------------------------------------- the head
@pytest.mark.slow
def test_predictions_are_those_of_the_search():
    definition, values = structure(), twin_values()

    @jax.jit
    def predict(values, features):
        head = definition.merge(values)
        return head(features), head.search(features), head.image_feature(features)

    @jax.jit
    def scores(values, image, path):
        return definition.merge(values).scores(image, path)

    prediction, found, images = predict(values, FEATURES)
    assert not prediction.penalties
    np.testing.assert_array_equal(prediction.logits, found.label_logits)

    def log_p(image, path):
        before = np.zeros((1, MAX_LABELS + 1), int)
        before[0, : len(path) + 1] = (7, *path)
        following = np.asarray(scores(values, image[None], before)[0, len(path)], np.float64)
        return following - np.log(np.exp(following).sum())

    for row, image in enumerate(images):
        path, score, probability = beam_by_hand(log_p, image, BEAM_WIDTH, MAX_LABELS, labels=6)
        assert path_of(found.path[row]) == path
        np.testing.assert_allclose(found.log_probability[row], score, rtol=1e-4)
        np.testing.assert_allclose(sigmoid(prediction.logits[row]), probability, rtol=1e-4)


def test_training_does_not_search():
    definition, image = structure(), jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)

    def executed(**labels):
        run = jax.make_jaxpr(lambda values, x: definition.merge(values)(features_of(x), **labels).logits)
        return count_macs(run(twin_values(), image).jaxpr)

    published, _ = definition.merge(twin_values()).published_macs(1, executed())
    assert executed(labels=np.ones((1, 6))) == published
