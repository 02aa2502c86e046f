"""Fit the calibration of a run to the scores of a validation split, as `config.calibration` says.

The corrected score of a logit z is σ(a·z + b) with a scale a and an offset b per label: b = 0 is temperature scaling
(Guo et al. 2017), and both together are Platt scaling (Platt 1999). A label with few positives is drawn towards the
parameters θ₀ that are fitted to the entries of all labels together. The parameters θ of a label have the prior
N(θ₀, diag s²), and s² is fitted to all labels by expectation maximization with Laplace's approximation (empirical
Bayes; Gelman et al., Bayesian Data Analysis, 3rd ed., 5.4). The prior of θ₀ is N((1, 0), 1).

The values of an attribute have one temperature T: their corrected scores are the softmax of z/T.

Shape letters: N images, K labels, V values of an attribute; the two parameters are the scale and the offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from ml_collections import ConfigDict
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from mlmoe_jax.data.label_tree import Attribute
from mlmoe_jax.data.sampling import assign_folds
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.reliability import measure_calibration
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.models.attributes import AttributeSoftmax
from mlmoe_jax.models.calibration import Calibration
from mlmoe_jax.runs.decisions import to_logits
from mlmoe_jax.runtime.array_types import Bools, Floats, Ints
from mlmoe_jax.runtime.machine import cores

LEAST_IMAGES, LEAST_POSITIVES = 50, 10  # of a split, over all labels
CALIBRATION_FOLDS = 5  # of the cross-validation of the metrics after the fit
_LEAST_SCALE, _MOST_SCALE = 1e-2, 1e2  # the largest is a bound for attributes alone
_ROUNDS, _NEWTON_STEPS = 20, 100
_NEGLIGIBLE_STEP = 1e-8  # whose square is the error that is left
_BLOCK = 2**15  # entries whose arrays stay in the cache of a core

_PerLabel = Float[np.ndarray, "k 2"]  # scale and offset of each label
_Matrices = Float[np.ndarray, "k 2 2"]


def fit_calibration(
    table: SplitScores, names: Sequence[str], config: ConfigDict, attributes: Sequence[Attribute] = ()
) -> dict[str, Any]:
    """Fit a calibration to the images of a split that have scores, and return the value of `Thresholds.calibration`.

    Its keys are `split`, `images` (number of images), `method`, `labels` (label -> {"scale": a, "offset": b}), and
    `before` and `after`, the calibration metrics of the raw and of the corrected scores. `after` is computed by
    cross-validation with CALIBRATION_FOLDS folds of images, or of groups of images: the scores of each fold are
    corrected by a fit to the other folds. Raises UserError if the split is too small.
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
        function = fit_all(logits[kept], entries.positive[kept], entries.valid[kept], attributes, method=method)
        corrected[held_out] = function(logits[held_out])
    function = fit_all(logits, entries.positive, entries.valid, attributes, method=method)
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
    """Raise UserError if a split has too few images, positives or groups for a calibration."""
    present, units = int((entries.positive & entries.valid).sum()), len(set(table.units))
    if len(table) < LEAST_IMAGES or present < LEAST_POSITIVES or units < 2:
        images = f"{len(table)} images {'with scores' if units > 1 else 'of one group'}"
        raise UserError(
            f"{table.name} is too small to calibrate on: {images} and {present} present labels, of at least "
            f"{LEAST_IMAGES} and {LEAST_POSITIVES}; name another split with --config.thresholds.split"
        )


def fit_all(
    logits: Floats, positive: Bools, valid: Bools, attributes: Sequence[Attribute], *, method: str
) -> Calibration:
    """Fit a temperature for each attribute, and the result of `fit_scales` for all other labels."""
    softmax = AttributeSoftmax.of(attributes, logits.shape[1])
    scale, offset, tags = np.ones(logits.shape[1]), np.zeros(logits.shape[1]), ~softmax.is_value
    if tags.any():
        found = fit_scales(logits[:, tags], positive[:, tags], valid[:, tags], method=method)
        scale[tags], offset[tags] = found.scale, found.offset
    for item in attributes:
        labels = list(item.labels)
        scale[labels] = fit_temperature(softmax.logarithms(logits)[:, labels], (positive & valid)[:, labels])
    return Calibration(scale, offset, softmax=softmax)


def fit_temperature(logarithms: Floats, present: Bools) -> float:
    """Return the scale of the log probabilities f64[N,V] of an attribute with the highest posterior density.

    Images without a present value, bool[N,V], do not count. The prior of the scale is N(1, 1).
    """
    known = present.any(axis=1)
    logarithms, present = logarithms[known], present[known]

    def loss(scale: float) -> float:
        scaled = scale * logarithms
        return float((logsumexp(scaled, axis=1) - scaled[present]).sum() + (scale - 1) ** 2 / 2)

    return float(minimize_scalar(loss, bounds=(_LEAST_SCALE, _MOST_SCALE), method="bounded").x)


def fit_scales(logits: Floats, positive: Bools, valid: Bools, *, method: str) -> Calibration:
    """Fit a scale (method "temperature"), or a scale and an offset ("platt"), for each label.

    Logits of the raw scores are f64[N,K]. `positive` and `valid`, bool[N,K], say whether a label is present and known.
    """
    free = np.array([True, method == "platt"])
    identity, spread = np.array([1.0, 0.0]), np.ones(2)
    labels = [np.ascontiguousarray(x.T) for x in (logits, positive, valid)]
    pooled = Posterior(*(x.reshape(1, -1) for x in labels), identity, spread)
    shared = _fit_increasing(pooled, free, identity[None])[0][0]
    posterior, start = Posterior(*labels, shared, spread), np.tile(shared, (logits.shape[1], 1))
    for _ in range(_ROUNDS):
        theta, covariance = _fit_increasing(posterior, free, start)
        moments = ((theta - shared) ** 2 + covariance.diagonal(axis1=1, axis2=2)).mean(axis=0)
        if np.allclose(moments[free], posterior.spread[free], rtol=1e-2):
            break
        narrower = replace(posterior, spread=np.maximum(moments, 1e-6))
        start = _expect_mode(theta, covariance, posterior, narrower)
        posterior = narrower
    return Calibration(theta[:, 0], theta[:, 1])


def _expect_mode(theta: _PerLabel, covariance: _Matrices, before: Posterior, after: Posterior) -> _PerLabel:
    """Return to first order the mode of `after`, a posterior with another spread than `before`, whose mode is `theta`.

    From there, the next search needs fewer passes over the entries.
    """
    change = covariance * (1 / after.spread - 1 / before.spread)
    step = np.linalg.solve(np.eye(2) + change, change @ (theta - before.center)[..., None])
    return theta - step[..., 0]


@dataclass(frozen=True)
class Posterior:
    """The posterior distributions of the scale and the offset of K labels.

    In the normal prior, which is equal for all labels, the two parameters are independent. Its mean is `center`,
    f64[2], and its variance is `spread`, f64[2]. The logits of the raw scores are f64[K,N]. `positive`, [K,N], is
    1 if a label is present and 0 if it is absent; it may also be a fraction. `valid`, bool[K,N], is True if a label is
    known.
    """

    logits: Floats
    positive: Bools | Floats
    valid: Bools
    center: Floats
    spread: Floats

    def derivatives(self, theta: _PerLabel, labels: Ints) -> tuple[_PerLabel, _Matrices]:
        """Return the gradient and the Hessian of the negative log densities at parameters f64[k,2] of labels i64[k]."""
        sums, blocks = np.zeros((5, len(labels))), list(_blocks(len(labels), self.logits.shape[1]))
        with ThreadPoolExecutor(cores()) as pool:  # NumPy runs outside of Python's lock
            parts = pool.map(lambda block: self._sums(theta[block[0]], labels[block[0]], block[1]), blocks)
            for (rows, _), part in zip(blocks, parts, strict=True):
                sums[:, rows] += part
        gradient = sums[:2].T + (theta - self.center) / self.spread
        return gradient, np.moveaxis(sums[[[2, 3], [3, 4]]], -1, 0) + np.diag(1 / self.spread)

    def _sums(self, theta: _PerLabel, labels: Ints, columns: slice) -> Floats:
        """Return the sums over the entries in `columns` that the gradient and the Hessian consist of, f64[5,k]."""
        logits, positive, valid = (x[labels, columns] for x in (self.logits, self.positive, self.valid))
        shares = logits * -theta[:, :1]
        shares -= theta[:, 1:]
        with np.errstate(over="ignore"):  # the share is 0 then
            np.exp(shares, out=shares)  # a third of the time of scipy.special.expit
        shares += 1
        np.reciprocal(shares, out=shares)
        errors = shares - positive
        errors *= valid
        weights = np.subtract(1, shares)
        weights *= shares
        weights *= valid
        scaled = weights * logits
        products = [np.einsum("kn,kn->k", x, logits) for x in (errors, scaled)]
        return np.stack([products[0], errors.sum(axis=1), products[1], scaled.sum(axis=1), weights.sum(axis=1)])


def _blocks(labels: int, entries: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of the labels and of their entries with about _BLOCK entries each."""
    height = max(1, _BLOCK // entries)
    for row in range(0, labels, height):
        for column in range(0, entries, _BLOCK):
            yield slice(row, row + height), slice(column, column + _BLOCK)


def _fit_increasing(posterior: Posterior, free: Bools, start: _PerLabel) -> tuple[_PerLabel, _Matrices]:
    """Return the result of `fit_posteriors` under the constraint that each scale is at least _LEAST_SCALE.

    If the unconstrained scale of a label is too small, its scale is fixed at the bound and only its offset is fitted.
    This is exact, because the loss is convex.
    """
    everywhere = np.broadcast_to(free, start.shape)
    theta, covariance = fit_posteriors(posterior, everywhere, start)
    falling = theta[:, 0] < _LEAST_SCALE
    if not falling.any():
        return theta, covariance
    bounded, only_offset = theta.copy(), everywhere.copy()
    bounded[falling, 0], only_offset[falling, 0] = _LEAST_SCALE, False
    return fit_posteriors(posterior, only_offset, bounded)


def fit_posteriors(
    posterior: Posterior, free: Bool[np.ndarray, "k 2"], start: _PerLabel
) -> tuple[_PerLabel, _Matrices]:
    """Return the modes of the posteriors by Newton's method, and the covariances of Laplace's approximation there.

    The search begins at `start`. Parameters that are not `free` keep their value in it, with variance 0.
    """
    theta, covariance = start.copy(), np.zeros((len(start), 2, 2))
    active = np.arange(len(start))
    gradient, hessian = posterior.derivatives(theta, active)
    for _ in range(_NEWTON_STEPS):
        changes = free[active]
        both = changes[:, :, None] & changes[:, None, :]
        inverse = np.where(both, np.linalg.inv(np.where(both, hessian, np.eye(2))), 0)
        step = (inverse @ gradient[..., None])[..., 0]
        covariance[active] = inverse
        going = np.abs(step).max(axis=1) >= _NEGLIGIBLE_STEP
        theta[active[~going]] -= step[~going]
        active = active[going]
        if not active.size:
            break
        theta[active], gradient, hessian = _descend(posterior, active, theta[active], step[going], gradient[going])
    return theta, covariance


def _descend(
    posterior: Posterior, labels: Ints, theta: _PerLabel, step: _PerLabel, gradient: _PerLabel
) -> tuple[_PerLabel, _PerLabel, _Matrices]:
    """Return the parameters after a Newton step, `theta` - `step`, and the gradient and the Hessian there.

    The step of a label is halved while the loss rises more steeply at its end than the loss falls at its start.
    """
    after, hessian = posterior.derivatives(theta - step, labels)
    while (rises := ((after + gradient) * step).sum(axis=1) < 0).any():
        step = np.where(rises[:, None], step / 2, step)
        after[rises], hessian[rises] = posterior.derivatives((theta - step)[rises], labels[rises])
    return theta - step, after, hessian
