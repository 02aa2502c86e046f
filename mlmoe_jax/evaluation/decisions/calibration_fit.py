"""Fit the calibration of a run to the scores of a validation split, as `config.calibration` says.

The corrected score of a logit z is σ(a·z + b) with a scale a and an offset b per label: b = 0 is temperature scaling
(Guo et al. 2017), and both together are Platt scaling (Platt 1999). A label with few positives is drawn towards the
parameters θ₀ that are fitted to the entries of all labels together. The parameters θ of a label have the prior
N(θ₀, diag s²), and s² is fitted to all labels by expectation maximization with Laplace's approximation (empirical
Bayes; Gelman et al., Bayesian Data Analysis, 3rd ed., 5.4). The prior of θ₀ is N((1, 0), 1).

Shape letters: N images, K labels; the two parameters are the scale and the offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from ml_collections import ConfigDict
from numpy.typing import NDArray
from scipy.special import expit

from mlmoe_jax.data.split import number_groups
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.reliability import measure_calibration
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.models.calibration import Calibration, to_logits
from mlmoe_jax.runtime.array_types import Bools, Floats, Ints

LEAST_IMAGES, LEAST_POSITIVES = 50, 10  # of a split, over all labels
CALIBRATION_FOLDS = 5  # of the cross-validation of the metrics after the fit
_LEAST_SCALE = 1e-2
_ROUNDS, _NEWTON_STEPS = 20, 100
_NEGLIGIBLE_STEP = 1e-8  # whose square is the error that is left

_PerLabel = Float[np.ndarray, "k 2"]  # scale and offset of each label


def fit_calibration(table: SplitScores, names: Sequence[str], config: ConfigDict) -> dict[str, Any]:
    """Fit a calibration to the images of a split that have scores.

    Args:
      table: the scores of the split.
      names: the names of the K labels.
      config: the config of the run.

    Returns:
      `Thresholds.calibration`: the parameters of the `labels`, and the metrics of calibration `before` the fit and
      `after` it. For `after`, the scores of each fifth of the images, or of their groups, are corrected by a fit to the
      other images.

    Raises:
      UserError: the split is too small.
    """
    method, table = config.calibration.method, table.readable()
    entries, group = table.entries(config.data.difficult_eval), number_groups(table.groups, len(table))
    _require_enough(table, entries, group)
    logits = to_logits(entries.scores)
    fold = np.random.default_rng(0).permutation(group.max() + 1)[group] % CALIBRATION_FOLDS
    corrected = np.empty(logits.shape)
    for number in range(CALIBRATION_FOLDS):
        held_out = fold == number
        kept = ~held_out
        function = fit_scales(logits[kept], entries.positive[kept], entries.valid[kept], method=method)
        corrected[held_out] = function(logits[held_out])
    function = fit_scales(logits, entries.positive, entries.valid, method=method)
    parameters = zip(names, function.scale.tolist(), function.offset.tolist(), strict=True)
    return {
        "split": table.name,
        "labels": {name: {"scale": scale, "offset": offset} for name, scale, offset in parameters},
        "images": len(table),
        "method": method,
        "before": measure_calibration(entries),
        "after": measure_calibration(Entries(corrected, entries.positive, entries.valid)),
    }


def _require_enough(table: SplitScores, entries: Entries, group: NDArray[np.int64]) -> None:
    """Raise UserError if a split is too small to calibrate on. `group` has the numbers of the groups i64[N]."""
    present = int((entries.positive & entries.valid).sum())
    if len(table) < LEAST_IMAGES or present < LEAST_POSITIVES or not group.any():
        images = f"{len(table)} images {'with scores' if group.any() else 'of one group'}"
        raise UserError(
            f"{table.name} is too small to calibrate on: {images} and {present} present labels, of at least "
            f"{LEAST_IMAGES} and {LEAST_POSITIVES}; name another split with --config.thresholds.split"
        )


def fit_scales(logits: Floats, positive: Bools, valid: Bools, *, method: str) -> Calibration:
    """Return the function of each label.

    Args:
      logits: f64[N,K], of the raw scores.
      positive, valid: bool[N,K], the present and the known labels.
      method: "temperature" or "platt".
    """
    free = np.array([True, method == "platt"])
    identity, spread = np.array([1.0, 0.0]), np.ones(2)
    pooled = Posterior(logits[valid][:, None], positive[valid][:, None], valid[valid][:, None], identity, spread)
    shared = _fit_increasing(pooled, free, identity[None])[0][0]
    theta = np.tile(shared, (logits.shape[1], 1))
    for _ in range(_ROUNDS):
        theta, variance = _fit_increasing(Posterior(logits, positive, valid, shared, spread), free, theta)
        moments = ((theta - shared) ** 2 + variance).mean(axis=0)
        if np.allclose(moments[free], spread[free], rtol=1e-2):
            break
        spread = np.maximum(moments, 1e-6)
    return Calibration(theta[:, 0], theta[:, 1])


@dataclass(frozen=True)
class Posterior:
    """The posteriors of scale and offset of K labels.

    Attributes:
      logits: of the raw scores, f64[N,K].
      positive, valid: bool[N,K], the present and the known labels.
      center, spread: the means and the variances of the prior, f64[2].
    """

    logits: Floats
    positive: Bools
    valid: Bools
    center: Floats
    spread: Floats

    def take(self, labels: Ints) -> Posterior:
        """Return some of the labels."""
        return replace(
            self, logits=self.logits[:, labels], positive=self.positive[:, labels], valid=self.valid[:, labels]
        )

    def losses(self, theta: _PerLabel) -> Floats:
        """Return the negative log density of each label, f64[K], without constants."""
        margins = self.logits * theta[:, 0] + theta[:, 1]
        data = ((np.logaddexp(0, margins) - self.positive * margins) * self.valid).sum(axis=0)
        return data + ((theta - self.center) ** 2 / self.spread).sum(axis=1) / 2

    def derivatives(self, theta: _PerLabel) -> tuple[_PerLabel, Float[np.ndarray, "k 2 2"]]:
        """Return the gradient and the Hessian of `losses`."""
        shares = expit(self.logits * theta[:, 0] + theta[:, 1])
        errors = (shares - self.positive) * self.valid
        weights = shares * (1 - shares) * self.valid
        gradient = np.stack([(errors * self.logits).sum(axis=0), errors.sum(axis=0)], axis=-1)
        mixed = (weights * self.logits).sum(axis=0)
        rows = [[(weights * self.logits**2).sum(axis=0), mixed], [mixed, weights.sum(axis=0)]]
        hessian = np.moveaxis(np.array(rows), -1, 0)
        return gradient + (theta - self.center) / self.spread, hessian + np.diag(1 / self.spread)


def _fit_increasing(posterior: Posterior, free: Bools, start: _PerLabel) -> tuple[_PerLabel, _PerLabel]:
    """Return `fit_posteriors` with scales of at least _LEAST_SCALE; the loss is convex, so the bound is reached or not.

    `free` has the parameters that are fitted, bool[2].
    """
    everywhere = np.broadcast_to(free, start.shape)
    theta, variance = fit_posteriors(posterior, everywhere, start)
    falling = theta[:, 0] < _LEAST_SCALE
    if not falling.any():
        return theta, variance
    bounded, only_offset = theta.copy(), everywhere.copy()
    bounded[falling, 0], only_offset[falling, 0] = _LEAST_SCALE, False
    return fit_posteriors(posterior, only_offset, bounded)


def fit_posteriors(
    posterior: Posterior, free: Bool[np.ndarray, "k 2"], start: _PerLabel
) -> tuple[_PerLabel, _PerLabel]:
    """Return the modes of the posteriors, by Newton's method, and the variances there (Laplace's approximation).

    Args:
      posterior: the posteriors of the K labels.
      free: other parameters stay at the start.
      start: where the search starts.
    """
    theta, variance = start.copy(), np.zeros(start.shape)
    active = np.arange(len(start))
    for _ in range(_NEWTON_STEPS):
        part, point, changes = posterior.take(active), theta[active], free[active]
        gradient, hessian = part.derivatives(point)
        both = changes[:, :, None] & changes[:, None, :]
        covariance = np.linalg.inv(np.where(both, hessian, np.eye(2)))
        step = _shorten_steps(part, point, (covariance @ np.where(changes, gradient, 0)[..., None])[..., 0])
        theta[active] = point - step
        variance[active] = np.where(changes, covariance.diagonal(axis1=1, axis2=2), 0)
        active = active[np.abs(step).max(axis=1) >= _NEGLIGIBLE_STEP]
        if not active.size:
            break
    return theta, variance


def _shorten_steps(posterior: Posterior, theta: _PerLabel, step: _PerLabel) -> _PerLabel:
    """Return the steps, each halved until it does not raise the loss of its label, apart from rounding."""
    loss = posterior.losses(theta)
    bound = loss + 1e-12 * np.abs(loss)
    while True:
        rises = (posterior.losses(theta - step) > bound) & (np.abs(step).max(axis=1) > _NEGLIGIBLE_STEP)
        if not rises.any():
            return step
        step = np.where(rises[:, None], step / 2, step)
