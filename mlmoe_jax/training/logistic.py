"""L2-penalized logistic regression of many labels on fixed features, to convergence; the penalty by cross-validation.

For each label the weights w and the intercept b minimize, as in scikit-learn,

    C · Σ_i log(1 + exp(−y_i (w·x_i + b))) + |w|²/2,    y_i = ±1,

over the images whose label is known. The problem is convex, so the result depends on no start, rate or number of steps.
All labels use one C, the value with the least mean log loss of the images outside each fold's fit (M. Stone,
"Cross-validatory choice and assessment of statistical predictions", JRSS B 36, 1974).

The features are first rotated onto the principal axes of the images. This changes no solution, because it preserves
|w|. With fewer images than features it leaves fewer coordinates than images, and the Hessian becomes nearly diagonal,
which preconditions the solver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.linalg import eigh

from mlmoe_jax.data.label_codes import targets
from mlmoe_jax.data.stratified_split import draw_stratified
from mlmoe_jax.errors import UserError
from mlmoe_jax.training.logistic_solver import solve

FOLDS = 5
FIRST, STEP = 1e-3, 10**0.5  # of C: the first value, and the factor to the next value
LIMITS = 1e-9, 1e9  # of C
PATIENCE = 3  # values of C without a lower loss before the search ends
ROUGH, EXACT = 1e-2, 1e-4  # |Δw| / |w| of the last Newton step, in the search and at its result
BLOCK_BYTES = 2**27  # size of an array of images × labels × fits
NEGLIGIBLE = 1e-5  # singular values, relative to the largest, that float32 features do not determine


@dataclass(frozen=True)
class LogisticFit:
    """The classifiers of K labels on D features.

    Attributes:
      kernel, bias: the classifiers.
      logits_outside: the logits of each image by the fit without its fold.
      penalty: the C with the least loss.
      losses: C -> mean log loss of the images outside each fold's fit, in nats.
    """

    kernel: Float[np.ndarray, "d k"]
    bias: Float[np.ndarray, " k"]
    logits_outside: Float[np.ndarray, "n k"]
    penalty: float
    losses: dict[float, float]


def fit_logistic(
    features: Float[np.ndarray, "n d"],
    codes: Int[np.ndarray, "n k"],
    *,
    difficult: str = "negative",
    seed: int = 0,
    groups: Int[np.ndarray, " n"] | None = None,
) -> LogisticFit:
    """Fit the classifiers of all labels with the penalty that cross-validation chooses.

    A label with one value only has no weights, see `logistic_solver.solve`.

    Args:
      features: one row per image.
      codes: as in `data.label_codes.targets`.
      difficult: as in `data.label_codes.targets`.
      seed: draws the folds.
      groups: number of each image's group; the images of a group are in one fold.

    Raises:
      UserError: there are fewer than two images or groups.
    """
    units, what = (len(codes), "images") if groups is None else (len(np.unique(groups)), "groups of images")
    if units < 2:
        raise UserError(f"train.fit=logistic needs two {what} or more to choose its penalty, and has {units}")
    rotation = rotate(features)
    fold = stratified_folds(codes, min(FOLDS, units), seed, groups)
    positive, valid = targets(codes, difficult)
    search = Search(rotation.values, positive.astype(np.float32), valid.astype(np.float32), fold)
    losses, best = {}, search.start()
    for point in search.path(losses):
        if losses[point.penalty] == min(losses.values()):
            best = point
    best = search.solve(best.penalty, best, EXACT)
    kernel = rotation.axes @ best.weights[:, :, -1]
    bias = best.biases[:, -1] - rotation.mean @ kernel
    outside = search.outside(best)
    return LogisticFit(kernel.astype(np.float32), bias.astype(np.float32), outside, best.penalty, losses)


# ------------------------------------------------------------------------------------------------------------ rotation
@dataclass(frozen=True)
class Rotation:
    """Features x = mean + axes · values. The number of orthonormal axes is the rank of the centered features."""

    mean: Float[np.ndarray, " d"]
    axes: Float[np.ndarray, "d r"]
    values: Float[np.ndarray, "n r"]


def rotate(features: Float[np.ndarray, "n d"]) -> Rotation:
    """Return features on the principal axes of the images, the axis with the largest variance first."""
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


# --------------------------------------------------------------------------------------------------------------- folds
def stratified_folds(
    codes: Int[np.ndarray, "n k"], count: int, seed: int, groups: Int[np.ndarray, " n"] | None = None
) -> Int[np.ndarray, " n"]:
    """Return the fold of each image, 0 … count − 1. The folds have one size, and equal shares of each label.

    `codes` are as in `data.split`. Only POSITIVE counts. With `groups`, the number of each image's group, the images of
    a group are in one fold; sizes and shares are then similar, and there may be fewer folds, but two or more if there
    are two groups.
    """
    fold, rest = np.zeros(len(codes), np.int64), np.arange(len(codes))
    for number in range(count - 1):
        rest_groups = None if groups is None else groups[rest]
        rows = draw_stratified(codes[rest], round(len(rest) / (count - number)), seed, rest_groups)
        fold[rest[rows]] = number
        rest = np.delete(rest, rows)
    fold[rest] = count - 1
    return np.unique(fold, return_inverse=True)[1]


# -------------------------------------------------------------------------------------------------------------- search
@dataclass(frozen=True)
class Point:
    """The solutions for one penalty, of each label K and fit F. Fit f omits fold f. The last fit is on all images."""

    penalty: float
    weights: Float[np.ndarray, "r k f"]
    biases: Float[np.ndarray, "k f"]


@dataclass(frozen=True)
class Search:
    """The data of a search for the penalty: rotated features, targets, masks of known targets, and folds."""

    values: Float[np.ndarray, "n r"]
    label: Float[np.ndarray, "n k"]
    known: Float[np.ndarray, "n k"]
    fold: Int[np.ndarray, " n"]

    @property
    def fits(self) -> int:
        """The number of fits per label: one without each fold, and one on all images."""
        return int(self.fold.max()) + 2

    def start(self) -> Point:
        (_, width), labels = self.values.shape, self.label.shape[1]
        return Point(FIRST, np.zeros((width, labels, self.fits), np.float32), np.zeros((labels, self.fits), np.float32))

    def path(self, losses: dict[float, float]) -> Iterator[Point]:
        """Yield the solutions for one C after another, each started at the previous solution, and fill `losses`.

        C starts at FIRST and grows until PATIENCE values have brought no lower loss. If FIRST has the least loss, C
        then falls from FIRST in this way.
        """
        first = point = self.start()
        for factor in (STEP, 1 / STEP):
            point, waited = first, 0
            while waited < PATIENCE:
                penalty = FIRST if not losses else point.penalty * factor
                if not LIMITS[0] <= penalty <= LIMITS[1]:
                    break
                point = self.solve(penalty, point, ROUGH)
                losses[penalty] = self.loss(point)
                first = point if len(losses) == 1 else first
                waited = 0 if losses[penalty] == min(losses.values()) else waited + 1
                yield point
            if min(losses, key=losses.__getitem__) != FIRST:
                return

    def solve(self, penalty: float, start: Point, tolerance: float) -> Point:
        """Return the solutions for one C; blocks of labels bound the memory."""
        labels, size = self.label.shape[1], self._block()
        weights, biases = np.empty_like(start.weights), np.empty_like(start.biases)
        for low in range(0, labels, size):
            place = np.arange(low, low + size) % labels  # the last block repeats labels, for the same shapes
            weights[:, place], biases[place] = solve(
                self.values, self.label[:, place], self.known[:, place], self.fold, penalty, start.weights[:, place],
                start.biases[place], tolerance,
            )  # fmt: skip
        return Point(penalty, weights, biases)

    def _block(self) -> int:
        labels = self.label.shape[1]
        return min(labels, max(1, BLOCK_BYTES // (4 * len(self.values) * self.fits)))

    def outside(self, point: Point) -> Float[np.ndarray, "n k"]:
        """Return the logits of each image by the fit without its fold."""
        logits = np.empty(self.label.shape, np.float32)
        for number in range(self.fits - 1):
            rows = self.fold == number
            logits[rows] = self.values[rows] @ point.weights[:, :, number] + point.biases[:, number]
        return logits

    def loss(self, point: Point) -> float:
        """Return the mean log loss of `outside` over all known labels, in nats."""
        logits = self.outside(point).astype(np.float64)
        losses = np.logaddexp(0, logits) - self.label * logits
        return float((losses * self.known).sum() / max(1, self.known.sum()))
