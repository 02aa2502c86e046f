"""Logistic regression to convergence, against scikit-learn; the choice of the penalty, against all values of a grid."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE, UNKNOWN, targets
from mlmoe_jax.data.sampling import assign_folds
from mlmoe_jax.training.logistic import penalty_search
from mlmoe_jax.training.logistic.newton import solve
from mlmoe_jax.training.logistic.penalty_search import Origin, PenaltySearch, fit_logistic, rotate


def problem(images: int, width: int, *, labels: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return features f32[N,D] with a mean and unequal scales, and codes i8[N,K] that depend on them."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(images, width)) * np.geomspace(2, 0.05, width) + 0.4
    logits = 1.5 * features @ random.normal(size=(width, labels)) / np.sqrt(width) * 3
    logits -= np.quantile(logits, np.linspace(0.5, 0.9, labels), axis=0).diagonal()
    codes = (logits + random.logistic(size=logits.shape) > 0).astype(np.int8)
    codes[::9, 0], codes[1::9, 1] = UNKNOWN, DIFFICULT
    return features.astype(np.float32), codes


def sklearn_fit(features: np.ndarray, codes: np.ndarray, rows: np.ndarray, penalty: float) -> tuple[np.ndarray, float]:
    """Return the weights and the intercept of one label on `rows` with a known label."""
    rows = rows & (codes != UNKNOWN)
    model = LogisticRegression(C=penalty, tol=1e-10, solver="newton-cholesky")
    model.fit(features[rows].astype(np.float64), codes[rows] == POSITIVE)
    return model.coef_[0], float(model.intercept_[0])


@pytest.mark.parametrize(("images", "width"), [(60, 100), (200, 30)])
def test_the_coefficients_are_those_of_scikit_learn(images, width):
    features, codes = problem(images, width)
    found = fit_logistic(features, codes)
    for k in range(codes.shape[1]):
        weights, bias = sklearn_fit(features, codes[:, k], np.full(images, True), found.penalty)
        assert np.linalg.norm(found.kernel[:, k] - weights) < 1e-4 * np.linalg.norm(weights)
        assert found.bias[k] == pytest.approx(bias, abs=2e-4)


@pytest.mark.slow
@pytest.mark.variants("images")
@pytest.mark.parametrize(("images", "width"), [(50, 60), (100, 20)])
def test_the_penalty_has_the_least_loss_outside_of_the_folds_of_fits(images, width):
    features, codes = problem(images, width)
    found, fold = fit_logistic(features, codes, seed=3), assign_folds(codes, 5, 3)
    label, known = targets(codes, "negative")

    def outside(penalty: float) -> np.ndarray:
        logits = np.zeros(codes.shape)
        for number in range(5):
            for k in range(codes.shape[1]):
                weights, bias = sklearn_fit(features, codes[:, k], fold != number, penalty)
                logits[fold == number, k] = features[fold == number] @ weights + bias
        return logits

    def loss(logits: np.ndarray) -> float:
        return float((known * (np.logaddexp(0, logits) - label * logits)).sum() / known.sum())

    np.testing.assert_allclose(found.held_out_logits, outside(found.penalty), atol=2e-3)
    losses = {penalty: loss(outside(penalty)) for penalty in 10 ** np.arange(-3, 1.1, 0.5)}
    assert found.penalty == pytest.approx(min(losses, key=losses.__getitem__))
    assert found.losses[found.penalty] == pytest.approx(min(losses.values()), rel=1e-3)


@pytest.mark.slow
@pytest.mark.variants("factor")
@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_the_search_goes_on_beyond_the_ends_of_the_grid(factor):
    """Features times s with C / s² are the same problem."""
    features, codes = problem(80, 20)
    first, second = fit_logistic(features, codes), fit_logistic(factor * features, codes)
    assert second.penalty == pytest.approx(first.penalty / factor**2, rel=1e-6)
    assert not 1e-3 < second.penalty < 1e2
    np.testing.assert_allclose(second.kernel * factor, first.kernel, rtol=1e-3, atol=1e-5)


def test_labels_with_one_value_have_no_weights_and_finite_odds():
    features, codes = problem(40, 10, labels=5)
    codes[:, 0], codes[:, 1], codes[:, 2] = NEGATIVE, POSITIVE, UNKNOWN
    codes[:, 3] = NEGATIVE
    codes[7, 3] = POSITIVE  # no fit without its fold has a positive
    found = fit_logistic(features, codes)
    assert np.isfinite(found.kernel).all()
    assert np.isfinite(found.held_out_logits).all()
    np.testing.assert_array_equal(found.kernel[:, :3], 0)
    np.testing.assert_allclose(found.bias[:3], np.log(41) * np.array([-1, 1, -1]), rtol=1e-6)
    assert found.kernel[:, 3].any()
    assert found.held_out_logits[7, 3] == pytest.approx(-np.log(41))


@pytest.mark.parametrize(("difficult", "code"), [("positive", POSITIVE), ("ignore", UNKNOWN)])
def test_difficult_labels_count_as_the_config_says(difficult, code):
    """As negative ones they count above. The folds stratify POSITIVE only."""
    features, codes = problem(80, 10)
    given, as_code = fit_logistic(features, codes, difficult=difficult), np.where(codes == DIFFICULT, code, codes)
    tolerances = {"rtol": 0.05, "atol": 0.5} if difficult == "positive" else {"rtol": 0}
    np.testing.assert_allclose(given.kernel, fit_logistic(features, as_code).kernel, **tolerances)


@pytest.mark.parametrize(
    ("penalty", "loss", "said"),
    [
        (1e8, 4e-3, "C=1e+08 with a loss of 0.0040 out of fold is too good to be true"),
        (1e9, 0.3, "C=1e+09 with a loss of 0.3000 out of fold is too good to be true"),
        (1e-9, 0.3, "C=1e-09 is at the end of its range"),
        (1e8, 6e-3, ""),
        (1e-8, 0.3, ""),
    ],
)
def test_a_fit_that_is_too_good_or_has_no_best_penalty_is_doubted(penalty, loss, said):
    fit = replace(fit_logistic(*problem(40, 4)), penalty=penalty, losses={penalty: loss})
    assert fit.doubt().startswith(said)
    assert bool(fit.doubt()) == bool(said)


@pytest.mark.slow
def test_blocks_of_labels_change_nothing(monkeypatch):
    features, codes = problem(60, 20, labels=5)
    whole = fit_logistic(features, codes)
    monkeypatch.setattr(penalty_search, "BLOCK_BYTES", 4 * 60 * 6 * 2)  # two labels
    parts = fit_logistic(features, codes)
    assert parts.penalty == whole.penalty
    np.testing.assert_allclose(parts.kernel, whole.kernel, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_start_far_away_leads_to_the_same_minimum():
    """A step of Newton's method alone would not."""
    features, codes = problem(60, 10)
    label, known = (flags.astype(np.float32) for flags in targets(codes, "negative"))
    fold, random = assign_folds(codes, 5, 0), np.random.default_rng(1)
    search = PenaltySearch(rotate(features).values, label, known, fold, np.zeros_like(label))
    given, near = (search.values, label, known, fold, 0.1, search.offsets), search.start()
    near = solve(*given, near.weights, near.biases, 1e-4)
    far = solve(*given, 30 * random.normal(size=near[0].shape), near[1] + 20, 1e-4)
    for one, other in zip(near, far, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_few_images_have_fewer_folds():
    features, codes = problem(3, 5)
    codes[:, 0] = [1, 0, 1]
    assert np.isfinite(fit_logistic(features, codes).held_out_logits).all()


def test_each_image_is_scored_by_the_fit_without_its_group():
    """Copies of an image with random labels tell nothing about the image if they are in its group."""
    draw, copies = np.random.default_rng(0), np.repeat(np.arange(40), 2)
    features, codes = draw.normal(size=(40, 60)).astype(np.float32), draw.integers(0, 2, (40, 2)).astype(np.int8)
    fits = [fit_logistic(features[copies], codes[copies], units=units) for units in (None, list(map(str, copies)))]
    right = [((fit.held_out_logits > 0) == codes[copies]).mean() for fit in fits]
    assert right[0] > 0.8
    assert right[1] < 0.65


# ------------------------------------------------------------------------------------------------------------- origins
def truth(features: np.ndarray, codes: np.ndarray, *, noise: float = 0.0, seed: int = 5) -> Origin:
    """Return classifiers near those that the labels come from, with noise of the same norm times `noise`."""
    fitted = fit_logistic(features, np.where(codes == DIFFICULT, NEGATIVE, codes))
    drawn = np.random.default_rng(seed).normal(size=fitted.kernel.shape)
    drawn *= np.linalg.norm(fitted.kernel) / np.linalg.norm(drawn)
    return Origin((fitted.kernel + noise * drawn).astype(np.float32), fitted.bias)


def take(images: np.ndarray | slice, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(array[images] for array in arrays)


@pytest.mark.parametrize("width", [12, 80], ids=["more images than features", "fewer"])
def test_a_fit_drawn_towards_classifiers_is_a_fit_of_the_rest_with_offsets(width):
    """A closed form: at the minimum the gradient vanishes, C Σ (σ(w·x + b) − y) x + w − w₀ = 0, and Σ (σ − y) = 0."""
    features, codes = problem(400, width)
    origin = truth(*take(slice(60, None), features, codes), noise=0.3)
    features, codes = take(slice(60), features, codes)
    found = fit_logistic(features, codes, origin=origin)
    assert found.origin is origin
    assert found.penalty > 1e-3
    positive, known = targets(codes, "negative")
    wide = features.astype(np.float64)
    errors = known * (1 / (1 + np.exp(-(wide @ found.kernel + found.bias))) - positive)
    np.testing.assert_allclose(errors.sum(axis=0), 0, atol=2e-4)
    step = found.penalty * wide.T @ errors + found.kernel - origin.kernel
    np.testing.assert_array_less(
        np.linalg.norm(step, axis=0), 2e-3 * np.linalg.norm(found.kernel - origin.kernel, axis=0)
    )


@pytest.mark.parametrize("sign", [1, -1], ids=["vectors that fit", "vectors that do not"])
def test_labels_without_images_keep_their_classifier_and_its_scores(sign):
    features, codes = problem(300, 30, labels=6)
    origin = truth(*take(slice(100, None), features, codes))
    origin = Origin(sign * origin.kernel, origin.bias)
    features, codes = take(slice(50), features, codes)
    codes[:, 0], codes[:, 1], codes[:, 2] = UNKNOWN, NEGATIVE, POSITIVE
    found = fit_logistic(features, codes, origin=origin)
    assert (found.origin is origin) == (sign > 0)
    np.testing.assert_array_equal(found.kernel[:, :3], origin.kernel[:, :3])
    np.testing.assert_array_equal(found.bias[:3], origin.bias[:3])
    np.testing.assert_allclose(found.held_out_logits[:, :3], origin.logits(features)[:, :3], rtol=1e-5, atol=1e-5)
    assert (found.kernel[:, 3:] != origin.kernel[:, 3:]).all()


def test_the_only_image_of_a_label_is_held_out_with_odds_of_the_others():
    """The fit without it has no positive image, so it keeps the weights, and the bias expects one image of n + 1."""
    features, codes = problem(40, 10)
    origin = Origin(np.eye(10, 4, dtype=np.float32), np.zeros(4, np.float32))
    codes[:, 0] = NEGATIVE
    codes[7, 0] = POSITIVE
    label, known = (flags.astype(np.float32) for flags in targets(codes, "negative"))
    fold = assign_folds(codes, 5, 0)
    search = PenaltySearch(rotate(features).values, label, known, fold, origin.logits(features))
    outside = search.held_out_logits(search.start())[:, 0]
    others = fold != fold[7]
    bias = outside[7] - features[7, 0]
    assert np.mean(np.exp(features[others, 0] + bias)) == pytest.approx(1 / 41, rel=1e-5)
