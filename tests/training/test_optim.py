from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.paths import PARITY

from mlmoe_jax.training import optim

TORCH = np.load(PARITY / "optim.npz")  # made by tools/parity/optim.py
SHAPES = {"head/kernel": (4, 3), "head/bias": (3,), "prompts/deep": (5,)}
STEPS, PEAK = 40, 0.05
TOTALS = sorted(int(name.split("/")[1]) for name in TORCH.files if name.startswith("one_cycle/"))


def config(**changes):
    defaults = dict(
        name="adamw", learning_rate=PEAK, schedule="one_cycle", warmup_steps=0, milestones=(), weight_decay=0.3,
        b1=0.9, b2=0.999, clip_norm=0.0, rate_rules=[("^prompts/", 0.1)], decay_rules=[("bias$", 0.0)],
    )  # fmt: skip
    return SimpleNamespace(**defaults | changes)


def split(vector):
    ends = np.cumsum([np.prod(shape) for shape in SHAPES.values()])[:-1]
    parts = np.split(np.asarray(vector, np.float32), ends)
    return {path: x.reshape(shape) for (path, shape), x in zip(SHAPES.items(), parts, strict=True)}


def join(params):
    return jnp.concatenate([params[path].ravel() for path in SHAPES])


def quadratic(params):
    v = join(params)
    return 0.5 * v @ TORCH["H"] @ v - TORCH["b"] @ v


def train(optimizer, params, loss, steps=STEPS):
    """Return the parameters after every step."""

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state, rows = optimizer.init(params), []
    for _ in range(steps):
        params, state = step(params, state)
        rows.append(params)
    return rows


# --- schedules


def at(steps, schedule):
    """Return the values of a schedule at some steps, as one program."""
    return jax.jit(jax.vmap(schedule))(np.asarray(steps))


@pytest.mark.variants(total=TOTALS[::4])
@pytest.mark.parametrize("total", TOTALS)
def test_one_cycle_equals_that_of_torch(total):
    rate, beta1 = (at(np.arange(total + 3), schedule) for schedule in optim.one_cycle(PEAK, total))
    expected = TORCH[f"one_cycle/{total}"]
    np.testing.assert_allclose(rate[:total], expected[0], rtol=1e-6)
    np.testing.assert_allclose(beta1[:total], expected[1], rtol=1e-6)
    np.testing.assert_array_equal(rate[total - 1 :], rate[total - 1])


def test_one_cycle_keeps_its_precision_over_a_long_training():
    total, start, top, end = 99_999, PEAK / 25, 0.2 * 99_999 - 1, PEAK / 25e4
    corners = [near + np.arange(-3, 4) for near in (3, int(top), total - 4)]
    steps = np.unique(np.r_[*corners, np.arange(0, total, 997)])
    rising = steps < top
    # 1 + cos π(1−u) = 2 sin²(πu/2): this form avoids cancellation in the float64 reference.
    left = np.where(rising, (top - steps) / top, (total - 1 - steps) / (total - 1 - top))
    share = np.sin(np.pi / 2 * left) ** 2
    expected = np.where(rising, PEAK + (start - PEAK) * share, end + (PEAK - end) * share)
    rate, beta1 = optim.one_cycle(PEAK, total)
    np.testing.assert_allclose(at(steps, rate), expected, rtol=1e-6)
    mirrored = 0.95 - 0.1 * np.where(rising, 1 - share, share)
    np.testing.assert_allclose(at(steps, beta1), mirrored, rtol=1e-6)


def test_one_cycle_where_torch_divides_by_zero_starts_at_the_peak():
    rate, beta1 = (at([0, 4], schedule) for schedule in optim.one_cycle(PEAK, 5))
    np.testing.assert_allclose([*rate, *beta1], [PEAK, PEAK / 25e4, 0.85, 0.95], rtol=1e-6)


def test_constant_and_cosine_with_warmup():
    constant, beta1 = optim.make_schedules(config(schedule="constant", warmup_steps=4), 10)
    np.testing.assert_allclose(at([0, 1, 4, 9, 50], constant), PEAK * np.array([0, 0.25, 1, 1, 1]))
    assert beta1(0) == beta1(9) == 0.9
    cosine, _ = optim.make_schedules(config(schedule="cosine", warmup_steps=2), 10)
    expected = PEAK * np.array([0, 0.5, 1, 0.5, 0, 0])
    np.testing.assert_allclose(at([0, 1, 2, 6, 10, 50], cosine), expected, atol=1e-9)
    assert optim.make_schedules(config(schedule="cosine"), 10)[0](0) == pytest.approx(PEAK)


def test_a_warmup_below_1_is_a_fraction_of_all_steps():
    """As two of thirty epochs, whatever their number of steps."""
    rate, _ = optim.make_schedules(config(schedule="constant", warmup_steps=2 / 30), 60)
    np.testing.assert_allclose(at([0, 1, 3, 4, 59], rate), PEAK * np.array([0, 0.25, 0.75, 1, 1]), rtol=1e-6)


def test_multi_step_falls_after_its_shares_of_the_training():
    """As torch's MultiStepLR with milestones 30 and 40 of 50 epochs, with 2 steps per epoch."""
    settings = config(schedule="multi_step", milestones=(0.6, 0.8))
    rate, beta1 = optim.make_schedules(settings, 100)
    expected = PEAK * np.repeat([1, 0.1, 0.01], [60, 20, 20])
    np.testing.assert_allclose(at(np.arange(100), rate), expected, rtol=1e-6)
    assert beta1(99) == 0.9
    settings.warmup_steps = 10
    rate, _ = optim.make_schedules(settings, 100)
    np.testing.assert_allclose(at([5, 59, 60], rate), PEAK * np.array([0.5, 1, 0.1]))


# --- moving averages
def average(values, **settings):
    """Return the average after each value, as training steps compute it; it starts at 100."""
    decay, averaged = optim.ema_schedule(SimpleNamespace(**settings)), {"w": jnp.float32(100)}
    averages = []
    for step, value in enumerate(values):
        averaged = optim.ema_update(averaged, {"w": jnp.float32(value)}, decay(jnp.int32(step)))
        averages.append(float(averaged["w"]))
    return averages


def test_an_average_with_a_constant_decay_is_that_of_the_papers():
    expected = 100 * 0.9 ** np.arange(1, 5)
    np.testing.assert_allclose(average([0, 0, 0, 0], decay=0.9, warmup=False), expected, rtol=1e-6)


def test_an_average_that_warms_up_forgets_its_start():
    """By the formula of TensorFlow: after 100 steps, a constant decay of 0.995 still has 61 % of the start."""
    grown = average(np.zeros(100), decay=0.995, warmup=True)
    np.testing.assert_allclose(grown[:3], [10, 10 * 2 / 11, 10 * 2 / 11 * 3 / 12], rtol=1e-5)
    assert grown[-1] < 1e-9
    assert average(np.zeros(100), decay=0.995, warmup=False)[-1] > 60
    ramp = average(np.arange(4000.0), decay=0.9, warmup=True)
    assert ramp[-1] == pytest.approx(3999 - 9, abs=0.1), "from step 80 on the decay is 0.9: an average of ten steps"


# --- optimizers


@pytest.mark.parametrize("case", ["adamw", "adamw_clip", "adam", "adam_clip", "sgd", "sgd_clip"])
def test_trajectories_of_torch(case):
    """One-cycle rate and beta1, decay on all but the bias, a tenth of the rate for the prompts."""
    settings = config(name=case.split("_")[0], clip_norm=0.5 if case.endswith("clip") else 0.0)
    rows = train(optim.make_optimizer(settings, STEPS, SHAPES), split(TORCH["start"]), quadratic)
    for ours, row in zip(rows, TORCH[case], strict=True):
        for path, expected in split(row).items():
            np.testing.assert_allclose(ours[path], expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=path)


def test_rate_rule_of_zero_freezes():
    settings = config(rate_rules=[("bias$", 0.0), ("^head/", 2.0)])
    start = split(TORCH["start"])
    last = train(optim.make_optimizer(settings, STEPS, SHAPES), start, quadratic)[-1]
    np.testing.assert_array_equal(last["head/bias"], start["head/bias"])
    assert np.abs(last["head/kernel"] - start["head/kernel"]).max() > 0.1


# --- moving average


def test_ema_close_to_one_keeps_its_precision():
    """n steps from 0 towards 1 give 1 − decay^n; with 1 − decay in float32 the error would be 5 parts in 10⁵."""
    decay, steps = 0.9998452, 20
    step = lambda _, ema: optim.ema_update(ema, {"a": jnp.ones(())}, decay)  # noqa: E731
    ema = jax.jit(lambda start: jax.lax.fori_loop(0, steps, step, start))({"a": 0.0})
    assert ema["a"] == pytest.approx(1 - decay**steps, rel=5e-6)


# --- Muon

TALL, WIDE = "backbone/tall/kernel", "backbone/wide/kernel"


def muon(**changes):
    plain = dict(name="muon", schedule="constant", weight_decay=0.0, rate_rules=[], decay_rules=[])
    return config(**plain | changes)


def some(seed, shapes):
    random = np.random.default_rng(seed)
    return {path: random.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}


def updates_of(settings, params, *gradients):
    """Return the updates of the last of some gradients, as one program."""
    optimizer = optim.make_optimizer(settings, STEPS, params)

    @jax.jit
    def run(gradients):
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
        return updates

    return run(gradients)


def pushed(matrix):
    """Return a matrix after five Newton-Schulz steps, by the scalar polynomial of its singular values."""
    u, s, vt = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
    s /= np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


@pytest.mark.parametrize("shape", [(7, 3), (3, 7)])
def test_muon_moves_the_singular_values_of_the_gradient_to_one(shape):
    gradient = some(0, {TALL: shape})
    update = updates_of(muon(), gradient, gradient)
    expected = -PEAK * 0.2 * np.sqrt(7) * pushed(gradient[TALL])
    np.testing.assert_allclose(update[TALL], expected, atol=2e-5 * np.abs(expected).max())
    assert np.all(np.abs(np.linalg.svd(pushed(gradient[TALL]), compute_uv=False) - 1) < 0.4)


def test_muon_averages_gradients_with_nesterovs_look_ahead():
    first, second = some(1, {TALL: (6, 4)}), some(2, {TALL: (6, 4)})
    update = updates_of(muon(), first, first, second)
    g1, g2 = (np.asarray(g[TALL], np.float64) for g in (first, second))
    mean = 0.95 * 0.05 * g1 + 0.05 * g2
    ahead = 0.95 * mean / (1 - 0.95**3) + 0.05 * g2 / (1 - 0.95**2)
    expected = -PEAK * 0.2 * np.sqrt(6) * pushed(ahead)
    np.testing.assert_allclose(update[TALL], expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_muon_updates_the_matrices_of_the_backbone_and_adamw_the_other_parameters():
    others = {"backbone/norm/scale": (5,), "backbone/convolution/kernel": (2, 3, 4), "head/kernel": (6, 4)}
    shapes = {TALL: (6, 4), WIDE: (2, 5), **others}
    params, gradient = some(3, shapes), some(4, shapes)
    updates = {}
    for name in ("muon", "adamw"):
        settings = muon(name=name, weight_decay=0.3, rate_rules=[("wide", 0.1)])
        updates[name] = updates_of(settings, params, gradient)
    for path in others:
        np.testing.assert_array_equal(updates["muon"][path], updates["adamw"][path])
    for path, factor in ((TALL, 1.0), (WIDE, 0.1)):
        step = 0.2 * np.sqrt(max(shapes[path])) * pushed(gradient[path]) + 0.3 * params[path]
        np.testing.assert_allclose(updates["muon"][path], -PEAK * factor * step, rtol=1e-3, atol=1e-5)


def test_the_global_norm_is_that_of_all_values():
    gradient = some(5, {"matrix": (6, 4), "bias": (3,), "experts": (5, 2, 3), "kernel": (3, 3, 2, 4)})
    expected = np.linalg.norm(np.concatenate([value.ravel() for value in gradient.values()]))
    np.testing.assert_allclose(jax.jit(optim.global_norm)(gradient), expected, rtol=1e-6)
