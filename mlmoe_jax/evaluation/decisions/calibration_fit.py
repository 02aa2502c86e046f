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
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict
from numpy.typing import NDArray
from scipy.special import expit

from mlmoe_jax.data.split import number_groups
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.decisions.fitting_split import warn_if_trained_on
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.reliability import measure_calibration
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.models.calibration import Calibration, to_logits
from mlmoe_jax.runtime.array_types import Bools, Floats

LEAST_IMAGES, LEAST_POSITIVES = 50, 10  # of a split, over all labels
CALIBRATION_FOLDS = 5  # of the cross-validation of the metrics after the fit
_LEAST_SCALE = 1e-2
_ROUNDS, _NEWTON_STEPS = 20, 100
_NEGLIGIBLE_STEP = 1e-10
_BLOCK = 1 << 22  # entries that are fitted at a time, which bounds the memory


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
    warn_if_trained_on(table, config)
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
    shared = _fit_pooled(logits[valid], positive[valid], free)
    columns = _blocks_of_labels(*logits.shape)
    blocks = [LabelEntries(logits[:, part], positive[:, part], valid[:, part]) for part in columns]
    theta, spread = np.tile(shared, (logits.shape[1], 1)), np.ones(2)
    for _ in range(_ROUNDS):
        prior = Prior(shared, spread)
        fits = [_fit_increasing(block, free, theta[part], prior) for block, part in zip(blocks, columns, strict=True)]
        theta = np.concatenate([fit.theta for fit in fits])
        variance = np.concatenate([fit.variance for fit in fits])
        moments = ((theta - shared) ** 2 + variance).mean(axis=0)
        if np.allclose(moments[free], spread[free], rtol=1e-2):
            break
        spread = np.maximum(moments, 1e-6)
    return Calibration(theta[:, 0], theta[:, 1])


def _blocks_of_labels(images: int, labels: int) -> list[slice]:
    """Return slices of all labels that have about _BLOCK entries each."""
    width = max(1, _BLOCK // max(1, images))
    return [slice(first, first + width) for first in range(0, labels, width)]


def _fit_pooled(logits: Floats, positive: Bools, free: Bools) -> Floats:
    """Return the parameters f64[2] that are fitted to the known entries f64[n] of all labels together."""
    entries = LabelEntries(logits[:, None], positive[:, None], np.ones((len(logits), 1), bool))
    start = np.array([1.0, 0.0])
    return _fit_increasing(entries, free, start[None], Prior(start, np.ones(2))).theta[0]


# -------------------------------------------------------------------------------------------- logistic regression
@dataclass(frozen=True)
class LabelEntries:
    """The entries of K labels.

    Attributes:
      logits: of the raw scores, f64[N,K].
      positive, valid: bool[N,K], the present and the known labels.
    """

    logits: Floats
    positive: Bools
    valid: Bools

    def take(self, labels: Bools) -> LabelEntries:
        """Return some of the labels, bool[K]."""
        return LabelEntries(self.logits[:, labels], self.positive[:, labels], self.valid[:, labels])

    def losses(self, theta: Float[np.ndarray, "k 2"]) -> Float[np.ndarray, " k"]:
        """Return the log loss of each label."""
        margins = self.logits * theta[:, 0] + theta[:, 1]
        return ((np.logaddexp(0, margins) - self.positive * margins) * self.valid).sum(axis=0)

    def derivatives(
        self, theta: Float[np.ndarray, "k 2"]
    ) -> tuple[Float[np.ndarray, "k 2"], Float[np.ndarray, "k 2 2"]]:
        """Return the gradient and the Hessian of `losses`."""
        shares = expit(self.logits * theta[:, 0] + theta[:, 1])
        errors = (shares - self.positive) * self.valid
        weights = shares * (1 - shares) * self.valid
        gradient = np.stack([(errors * self.logits).sum(axis=0), errors.sum(axis=0)], axis=-1)
        mixed = (weights * self.logits).sum(axis=0)
        first_row = np.stack([(weights * self.logits**2).sum(axis=0), mixed], axis=-1)
        second_row = np.stack([mixed, weights.sum(axis=0)], axis=-1)
        return gradient, np.stack([first_row, second_row], axis=-2)


@dataclass(frozen=True)
class Prior:
    """A Gaussian prior of scale and offset.

    Attributes:
      center: the means, f64[2].
      variance: the variances, f64[2].
    """

    center: Floats
    variance: Floats

    def losses(self, theta: Float[np.ndarray, "k 2"]) -> Float[np.ndarray, " k"]:
        return ((theta - self.center) ** 2 / self.variance).sum(axis=1) / 2


@dataclass(frozen=True)
class PosteriorFit:
    """Gaussian approximations of the posteriors of K labels (Laplace's approximation).

    Attributes:
      theta: the modes, that is, scale and offset of each label.
      variance: the variances of both parameters.
    """

    theta: Float[np.ndarray, "k 2"]
    variance: Float[np.ndarray, "k 2"]


def _fit_increasing(labels: LabelEntries, free: Bools, start: Float[np.ndarray, "k 2"], prior: Prior) -> PosteriorFit:
    """Return the modes with scales of at least _LEAST_SCALE; the loss is convex, so the bound is reached or not.

    Args:
      labels: the K labels.
      free: bool[2], the parameters that are fitted.
      start: where the search starts.
      prior: the prior of the parameters.
    """
    everywhere = np.broadcast_to(free, start.shape)
    fit = fit_posteriors(labels, everywhere, start, prior)
    falling = fit.theta[:, 0] < _LEAST_SCALE
    if not falling.any():
        return fit
    bounded, only_offset = fit.theta.copy(), everywhere.copy()
    bounded[falling, 0], only_offset[falling, 0] = _LEAST_SCALE, False
    return fit_posteriors(labels, only_offset, bounded, prior)


def fit_posteriors(labels: LabelEntries, free: Bools, start: Float[np.ndarray, "k 2"], prior: Prior) -> PosteriorFit:
    """Return the modes of the posteriors, by Newton's method.

    Args:
      labels: the K labels.
      free: bool[K,2]; other parameters stay at the start.
      start: where the search starts.
      prior: the prior of the parameters.
    """
    theta, variance = start.copy(), np.zeros(start.shape)
    active = np.ones(len(start), bool)
    for _ in range(_NEWTON_STEPS):
        part, point, changes = labels.take(active), theta[active], free[active]
        gradient, hessian = part.derivatives(point)
        gradient = np.where(changes, gradient + (point - prior.center) / prior.variance, 0)
        both = changes[:, :, None] & changes[:, None, :]
        covariance = np.linalg.inv(np.where(both, hessian + np.diag(1 / prior.variance), np.eye(2)))
        step = _shorten_steps(part, prior, point, (covariance @ gradient[..., None])[..., 0])
        theta[active] = point - step
        variance[active] = np.where(changes, covariance.diagonal(axis1=1, axis2=2), 0)
        active[active] = np.abs(step).max(axis=1) >= _NEGLIGIBLE_STEP
        if not active.any():
            break
    return PosteriorFit(theta, variance)


def _shorten_steps(
    labels: LabelEntries, prior: Prior, theta: Float[np.ndarray, "k 2"], step: Float[np.ndarray, "k 2"]
) -> Float[np.ndarray, "k 2"]:
    """Return the steps, each halved until it does not raise the loss of its label, apart from rounding."""
    loss = labels.losses(theta) + prior.losses(theta)
    bound = loss + 1e-12 * np.abs(loss)
    while True:
        new_loss = labels.losses(theta - step) + prior.losses(theta - step)
        rises = (new_loss > bound) & (np.abs(step).max(axis=1) > _NEGLIGIBLE_STEP)
        if not rises.any():
            return step
        step = np.where(rises[:, None], step / 2, step)
