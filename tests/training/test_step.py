"""The training step and the evaluation step of a toy model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.bench import Bench, drawn_batch

from mlmoe_jax.config import default_config
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.models.adapters.prompts import TEMPERATURES, clamp
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.training.objective import Objective

B, K, SIDE = 8, 3, 4
PREPROCESS = Preprocess(SIDE, (0.5, 0.4, 0.3), (0.25, 0.2, 0.1))


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
    return drawn_batch(B, SIDE, K, seed=seed)


# ----------------------------------------------------------------------------------------------------- train step
class Toy(nnx.Module):
    """A frozen and a trainable linear layer; in training, logits have noise with the standard deviation `noise`."""

    traces = 0

    def __init__(self, noise: float = 0.0, *, rngs: nnx.Rngs):
        self.backbone = nnx.Linear(SIDE * SIDE * 3, 6, rngs=rngs)
        self.head = nnx.Linear(6, K, rngs=rngs)
        self.noise = noise

    def __call__(self, image, *, labels=None, rngs=None):
        Toy.traces += 1
        assert (labels is None) == (rngs is None), "training passes both, evaluation neither"
        logits = self.head(jnp.tanh(0.1 * self.backbone(image.reshape(len(image), -1))))
        if rngs is not None:
            logits += self.noise * jax.random.normal(rngs(), logits.shape)
        return Prediction(logits)


@functools.cache
def toy_bench(*, seed: int = 0, noise: float = 0.0, accumulate: int = 1, mix: str = "none") -> Bench:
    """Return a bench with a toy model; its config has the default loss and a constant learning rate."""
    config = default_config()
    config.optim.schedule, config.optim.learning_rate = "constant", 0.05
    config.seed, config.train.accumulate, config.augment.mix = seed, accumulate, mix
    config.ema.decay, config.ema.warmup = 0.9, False
    return Bench(config, Toy(noise, rngs=nnx.Rngs(0)), K, preprocess=PREPROCESS)


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_step_is_the_gradient_step_of_the_objective():
    """Recomputed without the step: gradient norm, update and moving average."""
    plain, batch = toy_bench(), make_batch()
    before = jax.device_get(plain.start())

    def loss(trainable):
        model = plain.parts.definition.merge(trainable, before.frozen)
        prediction = model(PREPROCESS(batch["image"]), labels=batch["label"], rngs=nnx.Rngs(0))
        return Objective(default_config().loss)(prediction, batch)[0]

    @jax.jit
    def step(trainable, opt):
        value, gradient = jax.value_and_grad(loss)(trainable)
        updates, _ = plain.steps.optimizer.update(gradient, opt, trainable)
        return value, gradient, optax.apply_updates(trainable, updates)

    value, gradient, expected = jax.device_get(step(before.trainable, before.opt))
    state, (metrics,) = plain.run(batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradient.values()))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
    for path in expected:
        np.testing.assert_allclose(state.trainable[path], expected[path], rtol=1e-4, atol=1e-6)
        averaged = 0.9 * before.trainable[path] + 0.1 * np.asarray(state.trainable[path])
        np.testing.assert_allclose(state.ema[path], averaged, rtol=1e-5, atol=1e-7)


class Heated(nnx.Module):
    """A frozen linear layer, whose outputs are divided by temperatures with the bounds of GateVPT's."""

    class Prompts(nnx.Module):
        def __init__(self):
            self.temperature = nnx.Param(jnp.array([0.05, 9.0, 12.0]))

    def __init__(self, *, rngs: nnx.Rngs):
        self.backbone = nnx.Linear(SIDE * SIDE * 3, K, rngs=rngs)
        self.prompts = Heated.Prompts()

    def __call__(self, image, *, labels=None, rngs=None):
        temperature = clamp(self.prompts.temperature[...], *TEMPERATURES)
        return Prediction(self.backbone(image.reshape(len(image), -1)) / temperature)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_temperatures_move_as_if_clamped_in_place_before_each_forward_pass(name):
    """The loop of GateVPT's code by hand: clamp the stored values, differentiate there, update what was clamped."""
    config, path = default_config(), "prompts/temperature"
    config.optim.update({"name": name, "schedule": "constant", "weight_decay": 0.1, "b1": 0.5})
    config.optim.learning_rate = 6.0 if name == "adamw" else 1.0
    bench = Bench(config, Heated(rngs=nnx.Rngs(0)), K, preprocess=PREPROCESS)
    batch, frozen, optimizer = make_batch(), bench.parts.frozen, bench.steps.optimizer
    outputs = PREPROCESS(batch["image"]).reshape(B, -1) @ frozen["backbone/kernel"] + frozen["backbone/bias"]

    def loss(temperature):
        return Objective(config.loss)(Prediction(outputs / temperature), batch)[0]

    @jax.jit
    def step(stored, opt):
        clamped = jnp.clip(stored, *TEMPERATURES)
        updates, opt = optimizer.update({path: jax.grad(loss)(clamped)}, opt, {path: clamped})
        return clamped + updates[path], opt

    state, stored, seen = bench.start(), bench.parts.trainable[path], []
    opt = optimizer.init({path: stored})
    for number in range(8):
        stored, opt = step(stored, opt)
        state, _ = bench.steps.train_step(state, bench.shard(batch))
        np.testing.assert_allclose(state.trainable[path], stored, rtol=2e-3, atol=1e-4, err_msg=str(number))
        seen.append((stored < TEMPERATURES[0]) | (stored > TEMPERATURES[1]))
    beyond = np.array(seen)
    assert (beyond[:-1] & ~beyond[1:]).any(), "a temperature beyond its bounds returned"


def test_the_parts_of_a_batch_give_the_gradients_of_the_whole():
    """The number of valid images and labels differs between the parts."""
    batch = make_batch()
    batch["mask"][6:] = 0
    batch["label_mask"][:3, 1:] = 0
    whole, parted = toy_bench().run(batch, 3), toy_bench(accumulate=4).run(batch, 3)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_images_of_the_whole_batch_are_mixed_before_it_is_split():
    batch = make_batch()
    (whole, _), (parted, _) = (toy_bench(mix="mixup", accumulate=parts).run(batch, 2) for parts in (1, 4))
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert not same(whole.trainable, toy_bench().run(batch, 2)[0].trainable)


def test_each_part_has_its_own_random_numbers():
    same_twice = {name: np.concatenate([part[:4], part[:4]]) for name, part in make_batch().items()}
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # so that both parts have the same four images
    batch = {name: part[order] for name, part in same_twice.items()}
    half = {name: part[:4] for name, part in same_twice.items()}
    _, (alone,) = toy_bench.__wrapped__(noise=1.0).run(half)
    _, (parted,) = toy_bench(noise=1.0, accumulate=2).run(batch)
    assert abs(float(alone["loss"]) - float(parted["loss"])) > 1e-3 * float(alone["loss"])


@pytest.mark.parametrize("random", [{"noise": 1.0}, {"mix": "splicemix"}], ids=str)
def test_all_randomness_comes_from_seed_and_step(random):
    bench, other, batch = toy_bench(**random), toy_bench(seed=1, **random), make_batch()
    state, log = bench.run(batch, 3)
    repeated, log_again = toy_bench.__wrapped__(**random).run(batch, 3)
    assert same(state, repeated)
    assert same(log, log_again)
    first, later, reseeded = (
        float(one.run(batch, first=step)[1][0]["loss"]) for one, step in ((bench, 0), (bench, 2), (other, 0))
    )
    assert first == float(log[0]["loss"])
    assert len({first, later, reseeded}) == 3


def test_all_steps_run_one_compiled_program(caplog):
    bench = toy_bench.__wrapped__()
    with jax.log_compiles():
        Toy.traces = 0
        state, _ = bench.run(make_batch())
        first = [record.getMessage() for record in caplog.records]
        assert any("Compiling" in message and "step" in message for message in first), "compilations are logged"
        batches = [bench.shard(make_batch(seed)) for seed in range(4)]
        caplog.clear()
        for batch in batches:
            state, _ = bench.steps.train_step(state, batch)
    assert not [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()]
    assert Toy.traces == 1


def test_all_values_but_the_frozen_ones_are_donated():
    plain = toy_bench()
    state = plain.start()
    after, _ = plain.steps.train_step(state, plain.shard(make_batch()))
    assert all(value.is_deleted() for value in (*state.trainable.values(), *state.ema.values()))
    assert all(after.frozen[path] is value for path, value in state.frozen.items())


# ------------------------------------------------------------------------------------------------------ eval step
def test_the_eval_step_returns_logits_with_row_and_mask():
    bench = toy_bench(noise=1.0)
    evaluate, batch, state = bench.steps.eval_step, make_batch(), bench.start()
    batch["id"], batch["mask"] = np.arange(B, 0, -1, dtype=np.int32), (np.arange(B) < 5).astype(np.float32)
    output = evaluate(state.raw(), state.frozen, bench.shard(batch))
    assert set(output) == {"logits", "id", "mask"}
    np.testing.assert_array_equal(output["id"], batch["id"])
    np.testing.assert_array_equal(output["mask"], batch["mask"])
    model = bench.parts.definition.merge
    expected = jax.jit(lambda *values: model(*values)(PREPROCESS(batch["image"])).logits)(state.raw(), state.frozen)
    np.testing.assert_allclose(output["logits"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(evaluate(state.raw(), state.frozen, batch)["logits"], output["logits"])
    assert not state.raw()["head/kernel"].is_deleted()
