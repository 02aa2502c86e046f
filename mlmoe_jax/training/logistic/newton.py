"""The minima of many logistic regressions at once, by Newton's method.

The linear systems are solved by conjugate gradients (C.-J. Lin, R. C. Weng and S. S. Keerthi, "Trust region Newton
method for large-scale logistic regression", JMLR 9, 2008), with a line search instead of a trust region. All labels and
fits are columns of one matmul. N images, R features, K labels, F fits per label, P = K · F. If the labels are the
values of one attribute, the K columns of a fit are one multinomial regression.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from mlmoe_jax.runtime.compiler import compiler_options
from mlmoe_jax.runtime.sharding import find_devices

NEWTON, CONJUGATE, HALVINGS = 50, 100, 20  # the most steps of each loop
RESIDUAL = 0.1  # largest residual of a linear system, relative to its right-hand side
ROUNDING, TINY = 1e-6, 1e-30  # relative rounding error of a float32 sum, lower bound of a divisor

Scalar = Float[Array, ""]
PerColumn, Flags = Float[Array, " p"], Bool[Array, " p"]
PerImage = Float[Array, "n p"]


def solve(
    values: Float[Array, "n r"],
    label: Float[Array, "n k"],
    known: Float[Array, "n k"],
    fold: Int[Array, " n"],
    penalty: Scalar,
    offsets: Float[Array, "n k"],
    weights: Float[Array, "r k f"],
    biases: Float[Array, "k f"],
    tolerance: Scalar,
    *,
    exclusive: bool = False,
) -> tuple[Float[Array, "r k f"], Float[Array, "k f"]]:
    """Return the weights and biases that minimize the objective of each label and fit.

    The objective of label k and fit f is

        C · Σ_i log(1 + exp(−y_i (w·x_i + b + o_i))) + |w|²/2,    y_i = ±1,

    where C is `penalty`, and x_i, y_i and o_i are the features, the label and the offset of image i. The sum is over
    the images whose label k is known and that are not in fold f. If these images are all positive or all negative, the
    weights w and the bias b keep their start values, the arguments `weights` and `biases`.

    If the labels are `exclusive`, the objective of a fit is C · Σ_i −log softmax(w·x_i + b + o_i) of the positive label
    + |w|²/2, over all labels together, and no label is constant. `label` may be a distribution over the labels.

    Args:
      values: x, the features on their principal axes, see `penalty_search.rotate`.
      label: 1 for positive labels, otherwise 0.
      known: 1 for known labels, otherwise 0.
      tolerance: relative size of the last Newton step: it changes w by at most tolerance · |w|, and b by at most
        tolerance · (1 + |b|).
    """
    return _jitted(exclusive)(values, label, known, fold, penalty, offsets, weights, biases, tolerance)


@functools.cache
def _jitted(exclusive: bool) -> Callable:
    options = compiler_options(find_devices()[0].platform, many_rows=True)
    return jax.jit(functools.partial(_solve, exclusive=exclusive), compiler_options=options)


def _solve(values, label, known, fold, penalty, offsets, weights, biases, tolerance, exclusive):
    fits = biases.shape[1]
    kept = fold[:, None] != jnp.arange(fits)
    counted = (known[:, :, None] * kept[:, None]).reshape(len(values), -1)
    target = jnp.repeat(label, fits, axis=1)
    problem = _Problem(values, target, counted, penalty, label.shape[1] if exclusive else 1)
    start = _Step(weights.reshape(len(weights), -1), biases.ravel())
    solution = _newton(problem, start, jnp.repeat(offsets, fits, axis=1), tolerance)
    return solution.weights.reshape(weights.shape), solution.biases.reshape(biases.shape)


class _Step(NamedTuple):
    """Weights and biases of P regressions, or a direction in the space of these parameters."""

    weights: Float[Array, "r p"]
    biases: PerColumn

    def plus(self, factor: PerColumn, other: _Step) -> _Step:
        return _Step(self.weights + factor * other.weights, self.biases + factor * other.biases)

    def dot(self, other: _Step) -> PerColumn:
        return (self.weights * other.weights).sum(axis=0) + self.biases * other.biases


class _Problem(NamedTuple):
    """A batch of P independent binary logistic regressions, one per (label, fit) pair.

    With `joined` K > 1, the columns of each fit are one regression, whose sums are in each of them.
    """

    values: Float[Array, "n r"]  # the features on their principal axes, shared by all regressions
    target: PerImage  # 1 for positive labels, otherwise 0
    counted: PerImage  # 1 for the images that a regression is fitted to, otherwise 0
    penalty: Scalar  # C, the factor of the log loss in the objective of `solve`
    joined: int = 1

    def join(self, columns: Float[Array, "*n p"]) -> Float[Array, "*n p"]:
        """Return the sum over the columns of the regression of each column."""
        if self.joined == 1:
            return columns
        split = columns.reshape(*columns.shape[:-1], self.joined, -1)
        return jnp.broadcast_to(split.sum(axis=-2, keepdims=True), split.shape).reshape(columns.shape)

    def dot(self, first: _Step, second: _Step) -> PerColumn:
        return self.join(first.dot(second))

    def log_shares(self, margins: PerImage) -> PerImage:
        """Return log softmax of the margins within each fit."""
        split = margins.reshape(len(margins), self.joined, -1)
        return jax.nn.log_softmax(split, axis=1).reshape(margins.shape)

    def are_constant(self) -> Flags:
        """Return which regressions are constant: all images are positive, all are negative, or there is none."""
        if self.joined > 1:
            return jnp.zeros(self.target.shape[1], bool)
        positives = (self.counted * self.target).sum(axis=0)
        return (positives == 0) | (positives == self.counted.sum(axis=0))

    def margins(self, point: _Step) -> PerImage:
        """Return w·x + b for each image and regression, without the offset."""
        return jnp.dot(self.values, point.weights, precision="highest") + point.biases

    def transpose(self, residuals: PerImage) -> _Step:
        """Return the gradient of Σ residuals · margins with respect to the weights and biases."""
        return _Step(jnp.dot(self.values.T, residuals, precision="highest"), residuals.sum(axis=0))

    def derivatives(self, point: _Step, margins: PerImage) -> tuple[_Step, PerImage, PerImage]:
        """Return the gradients of the objectives, the second derivatives of losses by the margin, and probabilities."""
        shares = jax.nn.sigmoid(margins) if self.joined == 1 else jnp.exp(self.log_shares(margins))
        gradient = self.transpose(self.penalty * self.counted * (shares - self.target))
        gradient = _Step(gradient.weights + point.weights, gradient.biases)
        return gradient, self.penalty * self.counted * shares * (1 - shares), shares

    def objective(self, margins: PerImage, norms: PerColumn) -> PerColumn:
        """Return the objectives; `norms` are |w|²."""
        if self.joined == 1:
            losses = jax.nn.softplus(margins) - self.target * margins
        else:
            losses = -self.target * self.log_shares(margins)
        return self.join(self.penalty * (self.counted * losses).sum(axis=0)) + norms / 2


def _newton(problem: _Problem, point: _Step, offsets: PerImage, tolerance: Scalar) -> _Step:
    """Minimize the objectives of all regressions that are not constant, and return the weights and biases.

    The `offsets` of `solve` change margins by a constant, and no other term.
    """

    def continues(state) -> Bool[Array, ""]:
        count, _, _, converged = state
        return (count < NEWTON) & ~converged.all()

    def step(state):
        count, point, margins, converged = state
        gradient, curvature, shares = problem.derivatives(point, margins)
        direction = _conjugate_gradients(_NewtonSystem.of(problem, curvature, shares, gradient), gradient, converged)
        change = problem.margins(direction)
        factor = _line_search(problem, point, direction, margins, change, problem.dot(gradient, direction))
        factor = jnp.where(converged, 0, factor)
        point, margins = point.plus(factor, direction), margins + factor * change
        moved, norms = (problem.join((some.weights**2).sum(axis=0)) for some in (direction, point))
        far = jnp.abs(direction.biases) > tolerance * (1 + jnp.abs(point.biases))
        small = (moved <= tolerance**2 * norms) & ~(problem.join(far.astype(norms.dtype)) > 0)
        return count + 1, point, margins, converged | small | (factor == 0)

    start = (0, point, problem.margins(point) + offsets, problem.are_constant())
    return jax.lax.while_loop(continues, step, start)[1]


class _NewtonSystem(NamedTuple):
    """The linear systems H · direction = −g of P regressions, with the Hessian H and the gradient g of the objective.

    The bias is not penalized, so its diagonal entry of H can vanish where all margins are large. This entry is raised
    to at least |g_b|/4, where g_b is the entry of the bias in the gradient. Joined columns have no gradient for equal
    changes of their biases, so H gets a curvature there, which changes no direction.
    """

    problem: _Problem
    curvature: PerImage  # the second derivative of each image's loss with respect to its margin
    shares: PerImage  # the probabilities
    # An approximate diagonal of H, which preconditions the solver. It is exact if all images have equal curvatures.
    diagonal: _Step
    added: PerColumn  # the number added to the diagonal entry of the bias to reach its lower bound

    @classmethod
    def of(cls, problem: _Problem, curvature: PerImage, shares: PerImage, gradient: _Step) -> _NewtonSystem:
        mean, squares = curvature.mean(axis=0), (problem.values**2).sum(axis=0)
        bias_curvature = jnp.maximum(curvature.sum(axis=0), jnp.abs(gradient.biases) / 4 + TINY)
        diagonal = _Step(squares[:, None] * mean + 1, bias_curvature)
        return cls(problem, curvature, shares, diagonal, bias_curvature - curvature.sum(axis=0))

    def product(self, direction: _Step) -> _Step:
        """Return the product of H and `direction`."""
        product = self.problem.transpose(self._bend(self.problem.margins(direction)))
        biases = product.biases + self.added * direction.biases
        if self.problem.joined > 1:
            biases += (
                self.problem.join(self.diagonal.biases) / self.problem.joined**2 * self.problem.join(direction.biases)
            )
        return _Step(product.weights + direction.weights, biases)

    def _bend(self, change: PerImage) -> PerImage:
        """Return the change of the first derivatives of the losses by the margins, for a small change of margins."""
        if self.problem.joined == 1:
            return self.curvature * change
        # Without the change of the most probable label, whose share is nearly 1, no difference cancels.
        shares = self.shares.reshape(len(change), self.problem.joined, -1)
        is_top = jax.nn.one_hot(shares.argmax(axis=1), self.problem.joined, axis=1).reshape(change.shape)
        change = change - self.problem.join(is_top * change)
        mean = self.problem.join(self.shares * change)
        return self.problem.penalty * self.problem.counted * self.shares * (change - mean)

    def preconditioned(self, residual: _Step) -> _Step:
        return jax.tree.map(jnp.divide, residual, self.diagonal)


def _conjugate_gradients(system: _NewtonSystem, gradient: _Step, converged: Flags) -> _Step:
    """Return approximate Newton directions −H⁻¹g, computed by preconditioned conjugate gradients.

    The iteration ends when each regression has `converged` or has a residual below RESIDUAL, or after CONJUGATE steps.
    """
    zero = jax.tree.map(jnp.zeros_like, gradient)

    def continues(state) -> Bool[Array, ""]:
        count, _, _, _, size = state
        return (count < CONJUGATE) & ((size > RESIDUAL**2 * first_size) & ~converged).any()

    def step(state):
        count, point, residual, direction, size = state
        product = system.product(direction)
        steepness = jnp.maximum(system.problem.dot(direction, product), TINY)
        factor = jnp.where(size > RESIDUAL**2 * first_size, size / steepness, 0)
        point, residual = point.plus(factor, direction), residual.plus(-factor, product)
        scaled = system.preconditioned(residual)
        new_size = system.problem.dot(residual, scaled)
        direction = scaled.plus(new_size / jnp.maximum(size, TINY), direction)
        return count + 1, point, residual, direction, new_size

    residual = jax.tree.map(jnp.negative, gradient)
    scaled = system.preconditioned(residual)
    first_size = system.problem.dot(residual, scaled)
    return jax.lax.while_loop(continues, step, (0, zero, residual, scaled, first_size))[1]


def _line_search(
    problem: _Problem,
    point: _Step,
    direction: _Step,
    margins: PerImage,
    change: PerImage,
    slope: PerColumn,
) -> PerColumn:
    """Return the largest step size of 1, 1/2, 1/4, … that decreases each objective enough (Armijo); 0 if none does.

    `margins` are the margins at `point`, `change` is their change for step size 1, and `slope` is the derivative of
    each objective along `direction`.
    """
    norm = problem.join((point.weights * point.weights).sum(axis=0))
    mixed = problem.join((point.weights * direction.weights).sum(axis=0))
    square = problem.join((direction.weights * direction.weights).sum(axis=0))
    objective = problem.objective(margins, norm)

    def enough(factor: PerColumn) -> Flags:
        new = problem.objective(margins + factor * change, norm + 2 * factor * mixed + factor**2 * square)
        return new <= objective + 1e-4 * factor * slope + ROUNDING * objective

    def halved(state):
        count, factor = state
        return count + 1, jnp.where(enough(factor), factor, factor / 2)

    start = (0, jnp.ones_like(slope))
    _, factor = jax.lax.while_loop(lambda s: (s[0] < HALVINGS) & ~enough(s[1]).all(), halved, start)
    return jnp.where(enough(factor), factor, 0)
