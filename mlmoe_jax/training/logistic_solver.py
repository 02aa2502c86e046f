"""The minima of many logistic regressions at once, by Newton's method.

The linear systems are solved by conjugate gradients (C.-J. Lin, R. C. Weng and S. S. Keerthi, "Trust region Newton
method for large-scale logistic regression", JMLR 9, 2008), and a line search takes the place of the trust region. All
labels and fits are columns of the same matrix products. N images, R features, K labels, F fits per label, P = K · F.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

NEWTON, CONJUGATE, HALVINGS = 50, 100, 20  # the most steps of each loop
RESIDUAL = 0.1  # of a linear system, relative to its right-hand side
ROUNDING, TINY = 1e-6, 1e-30  # of a sum in float32; of a divisor


@jax.jit
def solve(
    values: Float[Array, "n r"],
    label: Float[Array, "n k"],
    known: Float[Array, "n k"],
    fold: Int[Array, " n"],
    penalty: Float[Array, ""],
    weights: Float[Array, "r k f"],
    biases: Float[Array, "k f"],
    tolerance: Float[Array, ""],
) -> tuple[Float[Array, "r k f"], Float[Array, "k f"]]:
    """Return the weights and biases that minimize the objective of each label and fit.

    That is C · Σ_i log(1 + exp(−y_i (w·x_i + b))) + |w|²/2 with y_i = ±1, over the images with a known label that are
    not in fold f. If these have one value only, the weights stay as they are and the bias is the log odds ∓log(n + 1).

    fold: of each image. penalty: C. weights, biases: where to start. tolerance: the last Newton step moves w by at most
    this times |w|, and b by this times 1 + |b|.
    """
    images, fits = len(values), biases.shape[1]
    inside = fold[:, None] != jnp.arange(fits)
    counted = (known[:, :, None] * inside[:, None]).reshape(images, -1)
    target = jnp.repeat(label, fits, axis=1)
    positive, of_all = (counted * target).sum(axis=0), counted.sum(axis=0)
    fixed = (positive == 0) | (positive == of_all)
    odds = jnp.log(images + 1.0)
    began = weights.reshape(len(weights), -1), jnp.where(fixed, jnp.where(positive > 0, odds, -odds), biases.ravel())
    found = _newton(_Problem(values, target, counted, penalty), _Step(*began), fixed, tolerance)
    return found.weights.reshape(weights.shape), found.biases.reshape(biases.shape)


class _Step(NamedTuple):
    """Weights and biases of P columns, or a direction in them."""

    weights: Float[Array, "r p"]
    biases: Float[Array, " p"]

    def plus(self, factor: Float[Array, " p"], other: _Step) -> _Step:
        return _Step(self.weights + factor * other.weights, self.biases + factor * other.biases)

    def dot(self, other: _Step) -> Float[Array, " p"]:
        return (self.weights * other.weights).sum(axis=0) + self.biases * other.biases


class _Problem(NamedTuple):
    """The objectives of P columns; counted: 1 for the images of a column."""

    values: Float[Array, "n r"]
    target: Float[Array, "n p"]
    counted: Float[Array, "n p"]
    penalty: Float[Array, ""]

    def margins(self, at: _Step) -> Float[Array, "n p"]:
        return jnp.dot(self.values, at.weights, precision="highest") + at.biases

    def back(self, residuals: Float[Array, "n p"]) -> _Step:
        """Return the transposed product: the derivative by weights and biases of Σ residuals · margins."""
        return _Step(jnp.dot(self.values.T, residuals, precision="highest"), residuals.sum(axis=0))

    def objective(self, margins: Float[Array, "n p"], norms: Float[Array, " p"]) -> Float[Array, " p"]:
        losses = jax.nn.softplus(margins) - self.target * margins
        return self.penalty * (self.counted * losses).sum(axis=0) + norms / 2


def _newton(problem: _Problem, at: _Step, fixed: Bool[Array, " p"], tolerance: Float[Array, ""]) -> _Step:
    """Return the minima of all columns but the fixed ones."""

    def continues(state) -> Bool[Array, ""]:
        count, _, _, done = state
        return (count < NEWTON) & ~done.all()

    def step(state):
        count, at, margins, done = state
        shares = jax.nn.sigmoid(margins)
        gradient = problem.back(problem.penalty * problem.counted * (shares - problem.target))
        gradient = _Step(gradient.weights + at.weights, gradient.biases)
        curvature = problem.penalty * problem.counted * shares * (1 - shares)
        direction = _conjugate_gradients(problem, curvature, gradient, done)
        change = problem.margins(direction)
        factor = _line_search(problem, at, direction, margins, change, gradient.dot(direction))
        factor = jnp.where(done, 0, factor)
        at, margins = at.plus(factor, direction), margins + factor * change
        there = (direction.weights**2).sum(axis=0) <= tolerance**2 * (at.weights**2).sum(axis=0)
        there &= jnp.abs(direction.biases) <= tolerance * (1 + jnp.abs(at.biases))
        return count + 1, at, margins, done | there | (factor == 0)

    return jax.lax.while_loop(continues, step, (0, at, problem.margins(at), fixed))[1]


def _conjugate_gradients(
    problem: _Problem, curvature: Float[Array, "n p"], gradient: _Step, done: Bool[Array, " p"]
) -> _Step:
    """Return the Newton directions −H⁻¹g; the squares of rotated values give the diagonal of H for equal curvatures.

    The bias has no penalty, so its entry of H can vanish where all margins are large; it is kept above |g|/4.
    """
    mean, squares = curvature.mean(axis=0), (problem.values**2).sum(axis=0)
    of_bias = jnp.maximum(curvature.sum(axis=0), jnp.abs(gradient.biases) / 4 + TINY)
    diagonal, added = _Step(squares[:, None] * mean + 1, of_bias), of_bias - curvature.sum(axis=0)
    zero = jax.tree.map(jnp.zeros_like, gradient)

    def preconditioned(residual: _Step) -> _Step:
        return jax.tree.map(jnp.divide, residual, diagonal)

    def continues(state) -> Bool[Array, ""]:
        count, _, _, _, size = state
        return (count < CONJUGATE) & ((size > RESIDUAL**2 * first) & ~done).any()

    def step(state):
        count, at, residual, direction, size = state
        product = problem.back(curvature * problem.margins(direction))
        product = _Step(product.weights + direction.weights, product.biases + added * direction.biases)
        factor = jnp.where(size > RESIDUAL**2 * first, size / jnp.maximum(direction.dot(product), TINY), 0)
        at, residual = at.plus(factor, direction), residual.plus(-factor, product)
        scaled = preconditioned(residual)
        after = residual.dot(scaled)
        return count + 1, at, residual, scaled.plus(after / jnp.maximum(size, TINY), direction), after

    residual = jax.tree.map(jnp.negative, gradient)
    scaled = preconditioned(residual)
    first = residual.dot(scaled)
    return jax.lax.while_loop(continues, step, (0, zero, residual, scaled, first))[1]


def _line_search(
    problem: _Problem,
    at: _Step,
    direction: _Step,
    margins: Float[Array, "n p"],
    change: Float[Array, "n p"],
    slope: Float[Array, " p"],
) -> Float[Array, " p"]:
    """Return the largest of the steps 1, 1/2, 1/4, … that lowers the objective enough (Armijo); 0 without any."""
    norm, mixed, square = ((a * b).sum(axis=0) for a, b in (
        (at.weights, at.weights), (at.weights, direction.weights), (direction.weights, direction.weights)
    ))  # fmt: skip
    before = problem.objective(margins, norm)

    def enough(factor: Float[Array, " p"]) -> Bool[Array, " p"]:
        after = problem.objective(margins + factor * change, norm + 2 * factor * mixed + factor**2 * square)
        return after <= before + 1e-4 * factor * slope + ROUNDING * before

    def halved(state):
        count, factor = state
        return count + 1, jnp.where(enough(factor), factor, factor / 2)

    start = (0, jnp.ones_like(slope))
    _, factor = jax.lax.while_loop(lambda s: (s[0] < HALVINGS) & ~enough(s[1]).all(), halved, start)
    return jnp.where(enough(factor), factor, 0)
