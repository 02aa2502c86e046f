"""L2-penalized logistic regression of many labels on fixed features, to convergence; the penalty by cross-validation.

For each label the weights w and the intercept b minimize, as in scikit-learn,

    C · Σ_i log(1 + exp(−y_i (w·x_i + b))) + |w|²/2,    y_i = ±1,

over the images whose label is known. The problem is convex, so the result depends on no start, rate or number of steps.
All labels use one C, selected by cross-validation: the value with the least mean log loss on held-out folds (M. Stone,
"Cross-validatory choice and assessment of statistical predictions", JRSS B 36, 1974).

If the labels have weights w₀ and intercepts b₀ already, such as vectors of their names give, the penalty is
|w − w₀|²/2. With w = w₀ + v and o_i = w₀·x_i + b₀, this is the same problem for v with the offset o_i in the logit of
image i. The search then covers both origins, w₀ and 0, and takes the origin with the smaller loss.

The values of an attribute have one multinomial regression, with the loss −log softmax of the present value. As if one
further image had the mean of all features, and each value with equal probability, values without images get finite
biases.

The features are first rotated onto the principal axes of the images. This changes no solution, because it preserves
|w|. With fewer images than features it leaves fewer coordinates than images, and the Hessian becomes nearly diagonal,
which preconditions the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.linalg import eigh
from scipy.special import logsumexp

from mlmoe_jax.data.label_codes import targets
from mlmoe_jax.data.label_tree import Attribute
from mlmoe_jax.data.sampling import assign_folds
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.attributes import NO_SOFTMAX, AttributeSoftmax
from mlmoe_jax.models.calibration import probabilities
from mlmoe_jax.training.logistic.newton import solve

FOLDS = 5
FIRST_PENALTY, PENALTY_STEP = 1e-3, 10**0.5  # of C: the first value, and the factor to the next value
PENALTY_LIMITS = 1e-9, 1e9  # of C
NO_LOSS = 5e-3  # out of fold, in nats
PATIENCE = 3  # values of C without a lower loss before the search ends
ROUGH, EXACT = 1e-2, 1e-4  # |Δw| / |w| of the last Newton step, in the search and at its result
BLOCK_BYTES = 2**27  # size of an array of images × labels × fits
NEGLIGIBLE = 1e-5  # singular values, relative to the largest, that float32 features do not determine


class Origin(NamedTuple):
    """The linear classifiers of K labels on D features towards which a fit is drawn: w₀ and b₀."""

    kernel: Float[np.ndarray, "d k"]
    bias: Float[np.ndarray, " k"]

    @classmethod
    def zero(cls, width: int, labels: int) -> Origin:
        return cls(np.zeros((width, labels), np.float32), np.zeros(labels, np.float32))

    def only(self, labels: Bool[np.ndarray, " k"]) -> Origin:
        """Return the classifiers of some labels, and zeros for other labels."""
        return Origin(self.kernel * labels, self.bias * labels)

    def logits(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n k"]:
        return features @ self.kernel + self.bias


@dataclass(frozen=True)
class LogisticFit:
    """Linear classifiers of K labels on D features."""

    kernel: Float[np.ndarray, "d k"]
    bias: Float[np.ndarray, " k"]
    # The logits of each training image, by the classifiers that were fitted without its fold
    held_out_logits: Float[np.ndarray, "n k"]
    penalty: float  # the selected C, which has the lowest loss in `losses`
    losses: dict[float, float]  # C -> mean log loss of the held-out logits, in nats
    origin: Origin  # the classifiers towards which these are drawn

    @property
    def held_out_scores(self) -> Float[np.ndarray, "n k"]:
        """The probabilities of `held_out_logits`."""
        return probabilities(self.held_out_logits)

    def doubt(self) -> str:
        """Return a sentence if the loss is too good to be true, or C is at an end of PENALTY_LIMITS; else ""."""
        least, most = PENALTY_LIMITS[0] * PENALTY_STEP, PENALTY_LIMITS[1] / PENALTY_STEP
        loss = self.losses[self.penalty]
        if self.penalty < least:
            return f"C={self.penalty:.3g} is at the end of its range: the features tell nothing about the labels"
        if loss >= NO_LOSS and self.penalty < most:
            return ""
        return (
            f"C={self.penalty:.3g} with a loss of {loss:.4f} out of fold is too good to be true if several images are "
            "of one scene, clip or patient; name their column with data.group_column"
        )


def fit_logistic(
    features: Float[np.ndarray, "n d"],
    codes: Int[np.ndarray, "n k"],
    *,
    difficult: str = "negative",
    seed: int = 0,
    units: Sequence[str] | None = None,
    origin: Origin | None = None,
    attributes: Sequence[Attribute] = (),
) -> LogisticFit:
    """Fit logistic regression for all labels, with the penalty selected by cross-validation.

    A label that is positive for all images or for none gets no weights and the bias ±log(n + 1). With an `origin`, such
    a label keeps the weights and the bias of `origin` instead. `attributes` have indices of labels.

    Args:
      codes: label codes, as `difficult`, in `data.label_codes.targets`.
      units: the unit of each image, as in `assign_folds`; the images of a unit are in one fold.
      origin: classifiers towards which the fit is drawn if that lowers the loss; None = 0.

    Raises:
      UserError: there are fewer than two images or units.
    """
    count = len(codes) if units is None else len(set(units))
    require_units(count)
    codes = np.asarray(codes)
    fold = assign_folds(codes, min(FOLDS, count), seed, units)
    label, known = (flags.astype(np.float32) for flags in targets(codes, difficult))
    origins = [Origin.zero(features.shape[1], label.shape[1])]
    if origin is not None:
        positives = label.sum(axis=0)
        origins = [origin, origin.only((positives == 0) | (positives == known.sum(axis=0)))]
    rotation, softmax = rotate(features), AttributeSoftmax.of(attributes, label.shape[1])
    fits = []
    for start in origins:
        search = PenaltySearch(rotation.values, label, known, fold, start.logits(features), softmax)
        fits.append(_fit_from(start, search, rotation))
    return min(fits, key=lambda fit: fit.losses[fit.penalty])


def require_units(count: int) -> None:
    """Raise UserError unless `count` units of images are enough for a cross-validation."""
    if count < 2:
        raise UserError("train.fit=logistic needs two images or more, of two groups, to choose its penalty")


def _fit_from(origin: Origin, search: PenaltySearch, rotation: Rotation) -> LogisticFit:
    """Return the classifiers of a search whose offsets are the logits of `origin`."""
    rough, losses = search.best()
    fit = search.solve(rough.penalty, rough, EXACT)
    added = rotation.axes @ fit.weights[:, :, -1]
    kernel = origin.kernel + added
    bias = origin.bias + fit.biases[:, -1] - rotation.mean @ added
    held_out = search.held_out_logits(fit)
    return LogisticFit(kernel.astype(np.float32), bias.astype(np.float32), held_out, fit.penalty, losses, origin)


# ------------------------------------------------------------------------------------------------------------ rotation
@dataclass(frozen=True)
class Rotation:
    """Features x in principal coordinates: x = mean + axes · values."""

    mean: Float[np.ndarray, " d"]  # the mean of the features
    axes: Float[np.ndarray, "d r"]  # orthonormal principal axes, one per column
    values: Float[np.ndarray, "n r"]  # the coordinates of each image on the axes


def rotate(features: Float[np.ndarray, "n d"]) -> Rotation:
    """Return the features of the images on their principal axes. The axis with the largest variance is first.

    With fewer images than features, only axes with a variance above rounding errors are kept.
    """
    mean = features.mean(axis=0, dtype=np.float64)
    centered = (features - mean).astype(np.float32)
    if len(features) >= features.shape[1]:
        axes = eigh(centered.T @ centered, driver="evd")[1][:, ::-1]
    else:  # axes from the Gram matrix; float64, because they are divided by their lengths
        wide = centered.astype(np.float64)
        squares, vectors = eigh(wide @ wide.T, driver="evd")
        used = np.flatnonzero(squares > NEGLIGIBLE**2 * squares[-1])[::-1]
        axes = wide.T @ (vectors[:, used] / np.sqrt(squares[used]))
    return Rotation(mean, axes, (centered @ axes).astype(np.float32))


# -------------------------------------------------------------------------------------------------------------- search
@dataclass(frozen=True)
class PenaltyFit:
    """The logistic regressions of all labels for one penalty, with F fits per label.

    Fit f < F − 1 is on the images outside fold f. The last fit is on all images.
    """

    penalty: float  # C
    weights: Float[np.ndarray, "r k f"]
    biases: Float[np.ndarray, "k f"]


@dataclass(frozen=True)
class PenaltySearch:
    """A search for the penalty C by cross-validation."""

    values: Float[np.ndarray, "n r"]  # the features of N images on their principal axes
    label: Float[np.ndarray, "n k"]  # 1 for positive labels, otherwise 0
    known: Float[np.ndarray, "n k"]  # 1 for known labels, otherwise 0
    fold: Int[np.ndarray, " n"]
    offsets: Float[np.ndarray, "n k"]  # the logits of the origin of the weights
    softmax: AttributeSoftmax = NO_SOFTMAX

    @property
    def fits(self) -> int:
        """The number of fits per label: one without each fold, and one on all images."""
        return int(self.fold.max()) + 2

    def start(self) -> PenaltyFit:
        """Return the start of the first solution: weights of zero, and the biases of constant labels.

        A label is constant in a fit if its known images are all positive or all negative, and `newton.solve` then
        leaves its parameters unchanged. If a label is constant in all fits and has offsets, its biases are 0, so that
        its logits are the offsets.
        """
        weights = np.zeros((self.values.shape[1], self.label.shape[1], self.fits), np.float32)
        biases = np.stack([self._constant_biases(self.fold != number) for number in range(self.fits)], axis=1)
        biases[(biases[:, -1] != 0) & self.offsets.any(axis=0)] = 0
        biases[[label for group in self.softmax.groups for label in group]] = 0
        return PenaltyFit(FIRST_PENALTY, weights, biases)

    def _constant_biases(self, rows: Bool[np.ndarray, " n"]) -> Float[np.ndarray, " k"]:
        """Return the bias of each label that is constant on the images `rows`, and 0 for other labels.

        Without offsets, the bias is log(n + 1) if the label is positive, else −log(n + 1), where n is the number of all
        images. The odds of the opposite label are then 1 / (n + 1). With offsets, their mean is 1 / (n + 1).
        """
        counted = rows.astype(np.float32)
        positives = counted @ self.label
        constant = np.flatnonzero((positives == 0) | (positives == counted @ self.known))
        sign = np.where(positives[constant] > 0, 1, -1).astype(np.float32)
        mean_odds = logsumexp(-sign * self.offsets[np.ix_(rows, constant)], axis=0) - np.log(counted.sum())
        biases = np.zeros(len(positives), np.float32)
        biases[constant] = sign * (np.log(len(rows) + 1) + mean_odds)
        return biases

    def best(self) -> tuple[PenaltyFit, dict[float, float]]:
        """Return the solution for the C with the lowest loss, and the loss of each C that was tried.

        C starts at FIRST_PENALTY and increases until PATIENCE values in a row have not lowered the loss. If
        FIRST_PENALTY has the lowest loss, C then decreases from FIRST_PENALTY by the same rule. Each solution starts
        from the previous solution.
        """
        first_fit = self.solve(FIRST_PENALTY, self.start(), ROUGH)
        losses = {first_fit.penalty: self.loss(first_fit)}
        best = self._walk(first_fit, PENALTY_STEP, first_fit, losses)
        if min(losses, key=losses.__getitem__) == first_fit.penalty:
            best = self._walk(first_fit, 1 / PENALTY_STEP, best, losses)
        return best, losses

    def _walk(self, fit: PenaltyFit, factor: float, best: PenaltyFit, losses: dict[float, float]) -> PenaltyFit:
        """Multiply C by `factor` until PATIENCE values in a row have not lowered the loss; return the best solution.

        `fit` is the solution for the current C, and `best` is the best solution so far. The losses of new values are
        added to `losses`.
        """
        waited = 0
        while waited < PATIENCE:
            penalty = fit.penalty * factor
            if not PENALTY_LIMITS[0] <= penalty <= PENALTY_LIMITS[1]:
                break
            fit = self.solve(penalty, fit, ROUGH)
            losses[penalty] = self.loss(fit)
            waited += 1
            if losses[penalty] <= losses[best.penalty]:
                best, waited = fit, 0
        return best

    def solve(self, penalty: float, start: PenaltyFit, tolerance: float) -> PenaltyFit:
        """Return the solution for one C, from `start`, to the tolerance of `newton.solve`. Blocks of labels limit the
        memory.
        """
        tags = np.setdiff1d(np.arange(self.label.shape[1]), [label for group in self.softmax.groups for label in group])
        size = min(len(tags), max(1, BLOCK_BYTES // (4 * len(self.values) * self.fits)))
        weights, biases = np.empty_like(start.weights), np.empty_like(start.biases)
        for group in self.softmax.groups:
            weights[:, group], biases[group, :] = self._solve_attribute(group, penalty, start, tolerance)
        for low in range(0, len(tags), max(1, size)):
            block = tags[np.arange(low, low + size) % len(tags)]  # the last repeats labels, for the same shapes
            weights[:, block], biases[block] = solve(
                self.values,
                self.label[:, block],
                self.known[:, block],
                self.fold,
                penalty,
                self.offsets[:, block],
                start.weights[:, block],
                start.biases[block],
                tolerance,
            )
        return PenaltyFit(penalty, weights, biases)

    def _solve_attribute(
        self, group: Sequence[int], penalty: float, start: PenaltyFit, tolerance: float
    ) -> tuple[Float[np.ndarray, "r v f"], Float[np.ndarray, "v f"]]:
        """Return the weights and biases of the V values of an attribute."""
        columns = np.array(group)
        ends = {"values": 0, "label": 1 / len(columns), "known": 1, "fold": -1, "offsets": 0}  # of the further image
        rows = [self.values, self.label[:, columns], self.known[:, columns], self.fold, self.offsets[:, columns]]
        values, label, known, fold, offsets = (
            np.concatenate([some, np.full_like(some[:1], end)]) for some, end in zip(rows, ends.values(), strict=True)
        )
        starts = start.weights[:, columns], start.biases[columns]
        return solve(values, label, known, fold, penalty, offsets, *starts, tolerance, exclusive=True)

    def held_out_logits(self, fit: PenaltyFit) -> Float[np.ndarray, "n k"]:
        """Return the logits of each image by the fit without the fold of the image."""
        logits = np.empty(self.label.shape, np.float32)
        for number in range(self.fits - 1):
            rows = self.fold == number
            logits[rows] = self.values[rows] @ fit.weights[:, :, number] + fit.biases[:, number]
        return self.softmax(logits + self.offsets)

    def loss(self, fit: PenaltyFit) -> float:
        """Return the mean log loss of `held_out_logits` over all known labels, in nats."""
        logits = self.held_out_logits(fit).astype(np.float64)
        losses = np.logaddexp(0, logits) - self.label * logits
        if self.softmax:
            losses = np.where(self.softmax.is_value, self.label * np.logaddexp(0, -logits), losses)
        return float((losses * self.known).sum() / max(1, self.known.sum()))
