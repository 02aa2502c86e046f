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
from scipy.special import expit

from mlmoe_jax.data.sampling import assign_folds
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

    The metrics `after` the fit are computed by cross-validation with CALIBRATION_FOLDS folds of images, or of groups of
    images: the scores of each fold are corrected by a fit to the other folds.

    Args:
      table: the scores of the split.
      names: the names of the K labels.
      config: the config of the run.

    Returns:
      The value of `Thresholds.calibration`, with the keys `split`, `images` (number of images), `method`,
      * `labels`: label -> {"scale": a, "offset": b};
      * `before`, `after`: the calibration metrics of the raw and of the corrected scores.

    Raises:
      UserError: the split is too small.
    """
    method, table = config.calibration.method, table.readable()
    entries = table.entries(config.data.difficult_eval)
    _require_enough(table, entries)
    logits = to_logits(entries.scores)
    folds = min(CALIBRATION_FOLDS, len(set(table.units)))
    fold = assign_folds(entries.positive & entries.valid, folds, 0, table.units)
    corrected = np.empty(logits.shape)
    for number in range(folds):
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


def _require_enough(table: SplitScores, entries: Entries) -> None:
    """Raise UserError if a split has too few images, positives or groups for a calibration.

    Args:
      table: the scores of the split.
      entries: the scores and labels of the split.
    """
    present, units = int((entries.positive & entries.valid).sum()), len(set(table.units))
    if len(table) < LEAST_IMAGES or present < LEAST_POSITIVES or units < 2:
        images = f"{len(table)} images {'with scores' if units > 1 else 'of one group'}"
        raise UserError(
            f"{table.name} is too small to calibrate on: {images} and {present} present labels, of at least "
            f"{LEAST_IMAGES} and {LEAST_POSITIVES}; name another split with --config.thresholds.split"
        )


def fit_scales(logits: Floats, positive: Bools, valid: Bools, *, method: str) -> Calibration:
    """Fit a calibration function (temperature or Platt scaling) for each label.

    Args:
      logits: f64[N,K], logits of the raw scores.
      positive: bool[N,K], whether a label is present.
      valid: bool[N,K], whether a label is known.
      method: "temperature" (fits scales) or "platt" (fits scales and offsets).
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
    """The posterior distributions of the scale and the offset of K labels.

    The prior is normal, and equal for all labels. The two parameters are independent in the prior.

    Attributes:
      logits: f64[N,K], logits of the raw scores.
      positive: bool[N,K], whether a label is present.
      valid: bool[N,K], whether a label is known.
      center: f64[2], the mean of the prior.
      spread: f64[2], the variance of the prior.
    """

    logits: Floats
    positive: Bools
    valid: Bools
    center: Floats
    spread: Floats

    def take(self, labels: Ints) -> Posterior:
        """Return the posteriors of the labels with the indices `labels`, i64[k]."""
        return replace(
            self, logits=self.logits[:, labels], positive=self.positive[:, labels], valid=self.valid[:, labels]
        )

    def losses(self, theta: _PerLabel) -> Floats:
        """Return the negative log density of each label's posterior at `theta`, f64[K], up to a constant."""
        margins = self.logits * theta[:, 0] + theta[:, 1]
        data = ((np.logaddexp(0, margins) - self.positive * margins) * self.valid).sum(axis=0)
        return data + ((theta - self.center) ** 2 / self.spread).sum(axis=1) / 2

    def derivatives(self, theta: _PerLabel) -> tuple[_PerLabel, Float[np.ndarray, "k 2 2"]]:
        """Return the gradient and the Hessian of each label's loss in `losses`, with respect to `theta`."""
        shares = expit(self.logits * theta[:, 0] + theta[:, 1])
        errors = (shares - self.positive) * self.valid
        weights = shares * (1 - shares) * self.valid
        gradient = np.stack([(errors * self.logits).sum(axis=0), errors.sum(axis=0)], axis=-1)
        mixed = (weights * self.logits).sum(axis=0)
        rows = [[(weights * self.logits**2).sum(axis=0), mixed], [mixed, weights.sum(axis=0)]]
        hessian = np.moveaxis(np.array(rows), -1, 0)
        return gradient + (theta - self.center) / self.spread, hessian + np.diag(1 / self.spread)


def _fit_increasing(posterior: Posterior, free: Bools, start: _PerLabel) -> tuple[_PerLabel, _PerLabel]:
    """Return the result of `fit_posteriors` under the constraint that each scale is at least _LEAST_SCALE.

    If the unconstrained scale of a label is too small, its scale is fixed at the bound and only its offset is fitted.
    This is exact, because the loss is convex.

    Args:
      posterior: the posteriors of the K labels.
      free: bool[2], which of the two parameters are fitted.
      start: where the search starts.
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
    """Return the modes of the posteriors, and the variances of Laplace's approximation at the modes.

    The modes are computed by Newton's method.

    Args:
      posterior: the posteriors of the K labels.
      free: whether a parameter is fitted. The other parameters keep their value in `start`, with variance 0.
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
    """Halve the Newton step of each label until it does not increase the loss of the label, and return the steps.

    An increase within rounding errors is accepted.

    Args:
      posterior: the posteriors of the labels.
      theta: the parameters before the step.
      step: the Newton steps, which are subtracted from `theta`.
    """
    loss = posterior.losses(theta)
    bound = loss + 1e-12 * np.abs(loss)
    while True:
        rises = (posterior.losses(theta - step) > bound) & (np.abs(step).max(axis=1) > _NEGLIGIBLE_STEP)
        if not rises.any():
            return step
        step = np.where(rises[:, None], step / 2, step)
