"""Learning-rate schedules, optimizers with rules by parameter path, and the moving average of parameters.

Parameters, gradients and updates are flat dicts {path: array}. A path is a string such as `head/co/gate/bias`.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import Array
from jax.typing import ArrayLike

from mlmoe_jax.errors import UserError
from mlmoe_jax.models import rules
from mlmoe_jax.models.layers.dispatch import sum_of_squares
from mlmoe_jax.models.losses import LOSS_VALUES
from mlmoe_jax.models.params import Params

Schedule = Callable[[ArrayLike], ArrayLike]

EPS = 1e-8  # added to the denominator of Adam's update, as in torch.optim
MILESTONE_FACTOR = 0.1  # multiplies the learning rate at each milestone of multi_step
LOSS_RATE, LOSS_DECAY = (f"^{LOSS_VALUES}", 10.0), (f"^{LOSS_VALUES}", 0.0)  # of the values of a loss, as ROLE's code


def one_cycle(peak: float, total_steps: int) -> tuple[Schedule, Schedule]:
    """Return the learning rate and beta1 of the one-cycle schedule, as functions of the number of steps taken, inside
    jit.

    This is PyTorch's OneCycleLR with pct_start=0.2 and the defaults of its other settings. The learning rate rises from
    peak/25 to peak at step 0.2·total_steps − 1 (rarely an integer), and falls to peak/25e4 at the last step,
    total_steps − 1. beta1 goes 0.95 → 0.85 → 0.95 at these steps. After the last step, both stay constant. If
    0.2·total_steps = 1, the first step has the peak (PyTorch divides by zero).
    """
    last = float(total_steps - 1)
    top = 0.2 * total_steps - 1

    def cycle(initial: float, middle: float, final: float) -> Schedule:
        def value(step: ArrayLike) -> Array:
            step = jnp.minimum(jnp.asarray(step, jnp.float32), last)
            rising = step < top
            start, stop = jnp.where(rising, 0.0, top), jnp.where(rising, top, last)
            falling, growing = jnp.where(rising, initial, middle), jnp.where(rising, middle, final)
            # (1 ± cos πx)/2 as squared sines: both terms are positive, so nothing cancels in float32.
            quarter = 0.5 * jnp.pi / (stop - start)
            return falling * jnp.sin(quarter * (stop - step)) ** 2 + growing * jnp.sin(quarter * (step - start)) ** 2

        return value

    return cycle(peak / 25.0, peak, peak / 25.0 / 1e4), cycle(0.95, 0.85, 0.95)


def make_schedules(optim: Any, total_steps: int) -> tuple[Schedule, Schedule]:
    """Return the schedules (learning rate, beta1) of a config. Both map the number of steps taken to a value.

    "one_cycle" also sets beta1, so `optim.b1` is not used. "cosine" decays to 0 at `total_steps`, and "multi_step"
    multiplies the rate by MILESTONE_FACTOR after each fraction of the training in `optim.milestones`. All except
    "one_cycle" rise linearly from 0 during the first `optim.warmup_steps` steps, and their beta1 is `optim.b1`.

    Raises UserError for too many warm-up steps.
    """
    peak = optim.learning_rate
    if optim.schedule == "one_cycle":
        return one_cycle(peak, total_steps)
    rise = round(optim.warmup_steps if optim.warmup_steps >= 1 else optim.warmup_steps * total_steps)
    if not 0 <= rise < total_steps:
        raise UserError(f"optim.warmup_steps is {rise}, but the whole training has {total_steps} steps")
    falls = {round(share * total_steps) - rise: MILESTONE_FACTOR for share in optim.milestones}
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, total_steps - rise),
        "multi_step": optax.piecewise_constant_schedule(peak, falls),
    }[optim.schedule]
    warmup = optax.linear_schedule(0.0, peak, max(rise, 1))
    return optax.join_schedules([warmup, after], [rise]), optax.constant_schedule(optim.b1)


def make_optimizer(optim: Any, total_steps: int, paths: Iterable[str]) -> optax.GradientTransformation:
    """Return the optimizer of a config for `total_steps` steps. The parameters {path: array} must have exactly `paths`.

    * adamw (decoupled weight decay), adam, and sgd with momentum beta1 (both add the decay to the gradient) give the
      same updates as torch.optim at every step.
    * muon uses Muon (see `_scale_by_muon`) for kernels of the backbone with two axes, and AdamW for all other
      parameters.

    `optim.rate_rules` and `optim.decay_rules` are lists of (regex, factor): the learning rate and the weight decay of a
    parameter are multiplied by the factor of the first rule that matches its path. The learning rate also multiplies
    the decay, as in PyTorch.

    Raises UserError for too many warm-up steps, or a regex that does not compile.
    """
    rate, beta1 = make_schedules(optim, total_steps)
    adam = _scale_by_adam(beta1, optim.b2)
    clip = _clip_by_global_norm(optim.clip_norm) if optim.clip_norm else optax.identity()
    paths = list(paths)
    rate_rules, decay_rules = (LOSS_RATE, *optim.rate_rules), (LOSS_DECAY, *optim.decay_rules)
    rate_factor = {path: rules.first_match(rate_rules, path, 1.0) for path in paths}
    decay = {path: optim.weight_decay * rules.first_match(decay_rules, path, 1.0) for path in paths}
    add_decay = optax.stateless(lambda updates, params: {p: u + decay[p] * params[p] for p, u in updates.items()})
    scale_rate = optax.stateless(lambda updates, _: {p: rate_factor[p] * u for p, u in updates.items()})
    momentum = optax.inject_hyperparams(optax.trace, hyperparam_dtype=jnp.float32)(decay=beta1)
    core = {
        "adamw": (adam, add_decay),
        "adam": (add_decay, adam),
        "muon": (optax.partition({"muon": _scale_by_muon(), "adamw": adam}, _muon_or_adamw), add_decay),
        "sgd": (add_decay, momentum),
    }[optim.name]
    return optax.chain(clip, *core, scale_rate, optax.scale_by_learning_rate(rate))


def global_norm(gradient: Params) -> Array:
    """Return the norm of all gradients together, f32[]."""
    return jnp.sqrt(sum(map(sum_of_squares, gradient.values())))


def _clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm` with the norm that a step reports, so that it is computed once."""

    def clip(updates: Params, _: Any) -> Params:
        norm = global_norm(updates)
        return {path: jnp.where(norm < limit, u, u / norm * limit) for path, u in updates.items()}

    return optax.stateless(clip)


def updates_made(opt: Any) -> Array:
    """Return the number of updates in the state `opt` of an optimizer from `make_optimizer`, i32[]."""
    return opt[-1].count  # the state of optax.scale_by_learning_rate


def ema_schedule(settings: Any) -> Schedule:
    """Return the decay of the moving average as a function of the number of steps taken; `settings` is `config.ema`.

    With `warmup`, the decay grows as (1 + t)/(10 + t) up to `decay`, as with TensorFlow's `num_updates`, so that the
    average is of the last ninth of the steps so far. After 100 steps with a constant decay of 0.995, the initial values
    have a weight of 61 %. A division as in Adam would remove them, but not the values of the first steps.
    """
    if not settings.warmup:
        return lambda step: settings.decay
    return lambda step: jnp.minimum(settings.decay, (1 + step) / (10 + step))


def ema_update(ema: Params, new: Params, decay: ArrayLike) -> Params:
    """Return decay · ema + (1 − decay) · new for each path: exactly `ema` where `new` equals it."""
    return jax.tree.map(lambda old, value: old + (1 - decay) * (value - old), dict(ema), dict(new))


def _scale_by_adam(beta1: Schedule, b2: float) -> optax.GradientTransformation:
    """Return Adam's update direction m̂ / (√v̂ + EPS), with a beta1 that depends on the step.

    m̂ and v̂ are the bias-corrected moving averages of the gradient and of its square. The bias correction uses only
    the beta1 of the current step, as in PyTorch. 1 − b2^t is computed as −expm1(t · log b2), because the difference in
    float32 has a relative error of 10⁻⁵ in the first steps, which the parameters of all later steps would have, too.
    """

    log_b2 = math.log(b2) if b2 else -math.inf

    def init(params: Params) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=zeros, nu=zeros)

    def update(
        grads: Params, state: optax.ScaleByAdamState, params: Params | None = None
    ) -> tuple[Params, optax.ScaleByAdamState]:
        b1, count = beta1(state.count), optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.nu, grads)
        correct1, correct2 = -jnp.expm1(count * jnp.log(b1)), -jnp.expm1(count * log_b2)
        updates = jax.tree.map(lambda m, v: m / correct1 / (jnp.sqrt(v / correct2) + EPS), mu, nu)
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def _scale_by_muon() -> optax.GradientTransformation:
    """Return the updates of Muon (Jordan et al., 2024) for matrices.

    Newton–Schulz iterations move the singular values of the momentum to 1. The result is scaled by 0.2·√max(rows,
    columns), so that updates are as large as AdamW's and both use one learning rate (Moonlight, sec. 2.2).
    """
    # Documented as the default for matrices, but optax fails without it.
    axes = optax.contrib.MuonDimensionNumbers()
    direction = optax.contrib.scale_by_muon(weight_dimension_numbers=lambda grads: jax.tree.map(lambda _: axes, grads))

    def scaled(updates: Params, _: Params | None) -> Params:
        return jax.tree.map(lambda update: 0.2 * math.sqrt(max(update.shape)) * update, updates)

    return optax.chain(direction, optax.stateless(scaled))


def _muon_or_adamw(values: Params) -> dict[str, str]:
    """Return path -> "muon" for backbone kernels with two axes, and path -> "adamw" for all other parameters."""
    kernels = {path for path, value in values.items() if value.ndim == 2 and re.fullmatch("backbone/.*/kernel", path)}
    return {path: "muon" if path in kernels else "adamw" for path in values}
