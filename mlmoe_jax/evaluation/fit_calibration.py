"""Fit the calibration of a run to the scores of a validation split, as `config.calibration` says.

A label with few positives is drawn towards the calibration that is fitted to the entries of all labels together:

* temperature and Platt (Platt 1999; Guo et al. 2017): the parameters θ of a label have the prior N(θ₀, diag s²) around
  the shared parameters θ₀, and s² is fitted to all labels by expectation maximization with Laplace's approximation
  (empirical Bayes; Gelman et al., Bayesian Data Analysis, 3rd ed., 5.4). The prior of θ₀ is N((1, 0), 1).
* isotonic (Zadrozny and Elkan 2002): with n the smaller of the numbers of positives and negatives of a label, its
  isotonic regression has the weight n / (n + PRIOR), and the shared Platt function the rest. The function therefore
  increases strictly, and rankings and predictions do not change.

Shape letters: N images, K labels, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray
from scipy.special import expit

from mlmoe_jax.data.split import number_groups
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.fit_thresholds import warn_if_trained_on
from mlmoe_jax.evaluation.metrics import reliability as metrics
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.models.calibration import logits_of
from mlmoe_jax.runs.thresholds import Thresholds

Floats = NDArray[np.float64]
LEAST_IMAGES, LEAST_POSITIVES = 50, 10  # of a split, over all labels
FOLDS = 5  # of the cross-validation of the metrics after the fit
PRIOR = 10  # images that the shared function counts for in the isotonic regression of a label
_LEAST_SCALE = 1e-2
_ROUNDS, _NEWTON = 20, 100


def fit_split(table: SplitScores, names: Sequence[str], config: ConfigDict) -> dict[str, Any]:
    """Fit a calibration to the images of a split that have scores; return `Thresholds.calibration`.

    It has the functions of the `labels`, and the metrics of calibration `before` the fit and `after` it, where the
    scores of each fifth of the images, or of their groups, are corrected by a fit to the other images. Raises UserError
    if the split is too small.
    """
    warn_if_trained_on(table, config)
    settings, table = config.calibration, table.readable()
    entries = table.entries(config.data.difficult_eval)
    scores, positive, valid = entries.scores, entries.positive, entries.valid
    present, group = int((positive & valid).sum()), number_groups(table.groups, len(table))
    if len(table) < LEAST_IMAGES or present < LEAST_POSITIVES or not group.any():
        images = f"{len(table)} images {'with scores' if group.any() else 'of one group'}"
        raise UserError(
            f"{table.name} is too small to calibrate on: {images} and {present} present labels, of at least "
            f"{LEAST_IMAGES} and {LEAST_POSITIVES}; name another split with --config.calibration.split"
        )

    def calibration_of(rows: NDArray[np.bool_]) -> dict[str, Any]:
        functions = fit(scores[rows], positive[rows], valid[rows], method=settings.method)
        return {"split": table.name, "operating_point": False, "labels": dict(zip(names, functions, strict=True))}

    fold, after = np.random.default_rng(0).permutation(group.max() + 1)[group] % FOLDS, np.empty(scores.shape)
    for number in range(FOLDS):
        rows = fold == number
        after[rows] = Thresholds({}, calibration=calibration_of(~rows)).correct(scores[rows], names)
    return {
        **calibration_of(np.ones(len(table), bool)),
        "images": len(table),
        "method": settings.method,
        "operating_point": settings.operating_point,
        "before": metrics.measure(Entries(scores, positive, valid)),
        "after": metrics.measure(Entries(after, positive, valid)),
    }


def fit(scores: Floats, positive: NDArray[np.bool_], valid: NDArray[np.bool_], *, method: str) -> list[dict[str, Any]]:
    """Return the function of each label, as in thresholds.json, see `models.calibration`.

    Args:
      scores: f[N,K], probabilities.
      positive, valid: bool[N,K], the present and the known labels.
      method: "temperature", "platt" or "isotonic".
    """
    logits, columns = logits_of(scores), range(scores.shape[1])
    parameters = 1 if method == "temperature" else 2
    labels = [(_features(logits[valid[:, k], k], parameters), positive[valid[:, k], k]) for k in columns]
    shared, _ = _increasing(_features(logits[valid], parameters), positive[valid], np.eye(2)[0, :parameters])
    if method != "isotonic":
        return [_linear(theta) for theta in _drawn_towards(shared, labels)]
    functions = []
    for k, (_, present) in enumerate(labels):
        fewer = int(min(present.sum(), (~present).sum()))
        knots = fit_isotonic(scores[valid[:, k], k], present) if fewer else np.zeros((2, 1))
        functions.append(_linear(shared) | {"weight": fewer / (fewer + PRIOR), "knots": knots.tolist()})
    return functions


def _features(logits: Floats, parameters: int) -> Floats:
    return np.stack([logits, np.ones_like(logits)][:parameters], axis=1)


def _linear(theta: Floats) -> dict[str, float]:
    return {"scale": float(theta[0]), "offset": float(theta[1:].sum())}


def fit_isotonic(scores: Floats, positive: NDArray[np.bool_]) -> Floats:
    """Return the knots f64[2,J], scores and values, of the isotonic regression of labels on their scores."""
    from sklearn.isotonic import IsotonicRegression  # takes a second to import

    fitted = IsotonicRegression(y_min=0, y_max=1).fit(scores.astype(np.float64), positive.astype(np.float64))
    return np.stack([fitted.X_thresholds_, fitted.y_thresholds_])


def fit_logistic(features: Floats, positive: NDArray, center: Floats, variance: Floats) -> tuple[Floats, Floats]:
    """Return the mode θ of the posterior of σ(features · θ) f64[P], and the inverse of its Hessian f64[P,P].

    Args:
      features: f64[N,P].
      positive: [N], the present labels, or their probabilities.
      center, variance: f64[P], of the Gaussian prior of θ.
    """

    def loss(theta: Floats) -> float:
        margins = features @ theta
        return np.sum(np.logaddexp(0, margins) - positive * margins) + np.sum((theta - center) ** 2 / variance) / 2

    theta, curvature = center, np.diag(variance)
    for _ in range(_NEWTON):
        share = expit(features @ theta)
        gradient = features.T @ (share - positive) + (theta - center) / variance
        curvature = np.linalg.inv((features.T * (share * (1 - share))) @ features + np.diag(1 / variance))
        step, present = curvature @ gradient, loss(theta)
        while loss(theta - step) > present and np.abs(step).max() > 1e-12:
            step = step / 2
        theta = theta - step
        if np.abs(step).max() < 1e-10:
            break
    return theta, curvature


def _increasing(
    features: Floats, positive: NDArray, center: Floats, variance: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return `fit_logistic` with a scale of at least _LEAST_SCALE; the loss is convex, so a bound is reached or not."""
    variance = np.ones(len(center)) if variance is None else variance
    theta, curvature = fit_logistic(features, positive, center, variance)
    if theta[0] < _LEAST_SCALE:
        first = np.arange(len(center)) == 0
        bound = np.where(first, _LEAST_SCALE, center), np.where(first, 1e-12, variance)
        theta, curvature = fit_logistic(features, positive, *bound)
        theta = np.where(first, _LEAST_SCALE, theta)
    return theta, curvature


def _drawn_towards(shared: Floats, labels: Sequence[tuple[Floats, NDArray]]) -> list[Floats]:
    """Return the parameters of each label f64[P], under the prior N(shared, diag s²) with s² fitted to all labels."""
    variance = np.ones(len(shared))
    fits = []
    for _ in range(_ROUNDS):
        fits = [_increasing(features, positive, shared, variance) for features, positive in labels]
        spread = np.mean([(theta - shared) ** 2 + np.diag(curvature) for theta, curvature in fits], axis=0)
        if np.allclose(spread, variance, rtol=1e-2):
            break
        variance = np.maximum(spread, 1e-6)
    return [theta for theta, _ in fits]
