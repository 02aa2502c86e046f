import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.devices import run_python

from mlmoe_jax.config import default_config
from mlmoe_jax.data.augment import augment
from mlmoe_jax.data.prepare import Preprocess, prepare
from mlmoe_jax.inference.step import make_eval_step
from mlmoe_jax.models import losses
from mlmoe_jax.models.contracts import Prediction
from mlmoe_jax.models.params import ModelDef, split_trainable
from mlmoe_jax.runtime.sharding import make_mesh, place, shard_batch
from mlmoe_jax.training.objective import _negatives_over_positives, make_objective
from mlmoe_jax.training.optim import make_optimizer
from mlmoe_jax.training.state import initial_state
from mlmoe_jax.training.step import make_train_step

B, K, SIDE = 8, 3, 4
PREPROCESS = Preprocess(SIDE, (0.5, 0.4, 0.3), (0.25, 0.2, 0.1))


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "image": draw.integers(0, 256, (B, SIDE, SIDE, 3)).astype(np.uint8),
        "label": draw.integers(0, 2, (B, K)).astype(np.float32),
        "label_mask": np.ones((B, K), np.float32),
        "mask": np.ones(B, np.float32),
        "id": np.arange(B, dtype=np.int32),
    }


# -------------------------------------------------------------------------------------------------------- prepare
def test_prepare_normalises_each_channel():
    image = np.zeros((2, SIDE, SIDE, 3), np.uint8)
    image[1] = [255, 51, 153]
    ready = prepare({"image": image}, PREPROCESS)
    assert ready.shape == (2, SIDE, SIDE, 3)
    assert ready.dtype == jnp.float32
    np.testing.assert_allclose(ready[0, 0, 0], [-2, -2, -3], rtol=1e-6)
    np.testing.assert_allclose(ready[1, 2, 3], [2, -1, 3], rtol=1e-6)


def test_prepare_augments_with_a_key_only():
    batch, settings, key = make_batch(), default_config().augment, jax.random.key(3)
    settings.brightness, settings.cutout = 0.5, 0.5
    plain = prepare(batch, PREPROCESS)
    np.testing.assert_array_equal(prepare(batch, PREPROCESS, settings), plain)
    changed = augment(jnp.asarray(batch["image"], jnp.float32), key, settings)
    expected = (np.asarray(changed) / 255 - PREPROCESS.mean) / PREPROCESS.std
    ready = prepare(batch, PREPROCESS, settings, key)
    np.testing.assert_allclose(ready, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(ready - plain).max() > 0.1


# ------------------------------------------------------------------------------------------------------ objective
def loss_settings(**changes):
    settings = default_config().loss
    for name, value in changes.items():
        settings[name] = value
    return settings


def make_prediction(seed: int = 1) -> Prediction:
    keys = jax.random.split(jax.random.key(seed), 3)
    logits, co, dc = (3 * jax.random.normal(key, (B, K)) for key in keys)
    return Prediction(logits, {"co": co, "dc": dc})


def value_and_gradient(settings, prediction, batch, **options):
    def loss(logits):
        return make_objective(settings, **options)(Prediction(logits), batch)[0]

    return jax.value_and_grad(loss)(prediction.logits)


ASYMMETRIC = {"gamma_neg": 3.0, "gamma_pos": 1.5, "clip": 0.05, "eps": 0.2, "detach": False}


@pytest.mark.parametrize(
    ("changes", "weight", "per_element"),
    [
        ({}, None, lambda z, y: losses.asymmetric_loss(z, y, gamma_neg=2, gamma_pos=0, clip=0, eps=1e-5)),
        (ASYMMETRIC, None, lambda z, y: losses.asymmetric_loss(z, y, **ASYMMETRIC)),
        ({"kind": "bce"}, None, losses.binary_cross_entropy),
        (
            {"kind": "bce", "positive_weight": 2.5},
            [1.0, 2.0, 3.0],
            lambda z, y: losses.binary_cross_entropy(z, y, positive_weight=2.5),
        ),
        (
            {"kind": "bce", "positive_weight": 0.0},
            [1.0, 2.0, 3.0],
            lambda z, y: losses.binary_cross_entropy(z, y, positive_weight=jnp.array([1.0, 2.0, 3.0])),
        ),
        ({"kind": "focal"}, None, lambda z, y: losses.focal_loss(z, y, gamma=2, detach=True)),
        (
            {"kind": "focal", "gamma": 1.0, "gamma_neg": 3.0, "detach": False},
            None,
            lambda z, y: losses.focal_loss(z, y, gamma=1, detach=False),
        ),
        ({"kind": "softmax"}, None, lambda z, y: y * (jax.nn.logsumexp(z, axis=1, keepdims=True) - z)),
    ],
)
def test_each_loss_is_built_from_its_settings(changes, weight, per_element):
    batch, prediction = make_batch(), make_prediction()
    balance = None if weight is None else lambda: jnp.array(weight)
    ours = value_and_gradient(loss_settings(**changes), prediction, batch, balance=balance)
    theirs = jax.value_and_grad(lambda z: 1000 * jnp.mean(per_element(z, batch["label"])))(prediction.logits)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


def test_reduction_and_scale():
    batch, prediction = make_batch(), make_prediction()
    mean = value_and_gradient(loss_settings(scale=1.0), prediction, batch)[0]
    total = value_and_gradient(loss_settings(scale=10.0, reduce="sum"), prediction, batch)[0]
    np.testing.assert_allclose(total, 10 * B * K * mean, rtol=1e-5)


def test_terms_are_weighted_and_reported_without_their_weight():
    batch, prediction = make_batch(), make_prediction()
    settings = loss_settings(terms={"logits": 0.0, "co": 1.0, "dc": 0.25})
    total, parts = make_objective(settings)(prediction, batch)
    assert set(parts) == {"loss/co", "loss/dc"}
    alone, _ = make_objective(loss_settings())(Prediction(prediction.terms["dc"]), batch)
    np.testing.assert_allclose(parts["loss/dc"], alone, rtol=1e-6)
    np.testing.assert_allclose(total, parts["loss/co"] + 0.25 * parts["loss/dc"], rtol=1e-6)


def test_penalties_are_means_over_real_images():
    batch, prediction = make_batch(), make_prediction()
    batch["mask"][2:] = 0
    penalty = jnp.array([1.0, 4.0, *[1e6] * (B - 2)])
    plain, _ = make_objective(loss_settings())(prediction, batch)
    total, parts = make_objective(loss_settings())(Prediction(prediction.logits, penalties={"load": penalty}), batch)
    assert parts["loss/load"] == 2.5
    np.testing.assert_allclose(total, plain + 2.5, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["asymmetric", "bce", "focal"])
def test_padding_and_unknown_labels_change_nothing(kind, reduction):
    batch, prediction, settings = make_batch(), make_prediction(), loss_settings(kind=kind, reduce=reduction)
    batch["mask"][[1, 6]] = 0
    batch["label_mask"][3, 2] = batch["label_mask"][5] = 0
    loss, gradient = value_and_gradient(settings, prediction, batch)
    counts = batch["label_mask"] * batch["mask"][:, None] > 0
    assert np.all((np.asarray(gradient) != 0) == counts)

    label, logits = batch["label"].copy(), np.array(prediction.logits)
    label[~counts] = 1 - label[~counts]
    logits[~counts] = np.where(np.arange((~counts).sum()) % 2, 1e30, -1e30)
    other = value_and_gradient(settings, Prediction(jnp.asarray(logits)), {**batch, "label": label})
    np.testing.assert_array_equal(other[0], loss)
    np.testing.assert_array_equal(other[1], gradient)

    kept = [row for row in range(B) if row not in (1, 6)]
    without = {name: value[kept] for name, value in batch.items()}
    np.testing.assert_allclose(
        value_and_gradient(settings, Prediction(prediction.logits[np.array(kept)]), without)[0], loss, rtol=1e-6
    )


# ----------------------------------------------------------------------------------------------------- train step
class Toy(nnx.Module):
    """A frozen and a trained linear layer; in training the logits carry noise of the strength `noise`."""

    traces = 0

    def __init__(self, noise: float = 0.0, *, rngs: nnx.Rngs):
        self.backbone = nnx.Linear(SIDE * SIDE * 3, 6, rngs=rngs)
        self.head = nnx.Linear(6, K, rngs=rngs)
        self.noise = noise

    def __call__(self, image, *, labels=None, rngs=None):
        Toy.traces += 1
        assert (labels is None) == (rngs is None), "training gives both, evaluation none"
        logits = self.head(jnp.tanh(0.1 * self.backbone(image.reshape(len(image), -1))))
        if rngs is not None:
            logits += self.noise * jax.random.normal(rngs(), logits.shape)
        return Prediction(logits)


class Bench:
    """A toy model, ready to be trained."""

    def __init__(self, *, seed: int = 0, noise: float = 0.0, accumulate: int = 1, **augmentation):
        config = default_config()
        config.optim.schedule, config.optim.learning_rate = "constant", 0.05
        for name, strength in augmentation.items():
            config.augment[name] = strength
        self.mesh = make_mesh(config.mesh)
        self.objective = make_objective(config.loss)
        self.definition, params, stats = ModelDef.split(Toy(noise, rngs=nnx.Rngs(0)))
        trainable, frozen = split_trainable(params, config.trainable)
        self.optimizer = make_optimizer(config.optim, 100, trainable)
        self.step = make_train_step(
            self.definition,
            self.objective,
            self.optimizer,
            PREPROCESS,
            config.augment,
            ema_decay=0.9,
            seed=seed,
            mesh=self.mesh,
            accumulate=accumulate,
        )
        self._start = initial_state(trainable, frozen, stats, self.optimizer.init(trainable))

    def start(self, step: int = 0):
        """Return the same first state each time, in arrays that a step may donate."""
        state = jax.tree.map(jnp.copy, self._start).replace(step=jnp.int32(step))
        return place(state, self.mesh)

    def run(self, steps: int = 1, *, first: int = 0, batch=None):
        state, log = self.start(first), []
        for _ in range(steps):
            state, metrics = self.step(state, shard_batch(batch or make_batch(), self.mesh))
            log.append(metrics)
        return state, log


@pytest.fixture(scope="module")
def plain():
    return Bench()


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_the_loss_falls_and_only_the_head_moves(plain):
    before = jax.device_get(plain.start())
    state, log = plain.run(60)
    assert float(log[-1]["loss"]) < 0.6 * float(log[0]["loss"])
    assert float(log[0]["loss"]) == float(log[0]["loss/logits"])
    assert int(state.step) == 60
    assert set(state.trainable) == {"head/kernel", "head/bias"}
    for path, value in state.trainable.items():
        assert np.all(np.asarray(value) != before.trainable[path]), path
    assert set(state.frozen) == {"backbone/kernel", "backbone/bias"}
    assert same(state.frozen, before.frozen)


def test_the_optimizer_holds_nothing_for_frozen_parameters(plain):
    state, _ = plain.run()
    sizes = [leaf.size for leaf in jax.tree.leaves(state.opt) if leaf.ndim]
    assert sorted(sizes) == sorted(2 * [value.size for value in state.trainable.values()])
    assert set(state.ema) == set(state.trainable)


def test_a_step_is_the_gradient_step_of_the_objective(plain):
    """Recomputed without the step: gradient norm, update and moving average."""
    before = jax.device_get(plain.start())
    batch = make_batch()

    def loss(trainable):
        model = plain.definition.merge(trainable, before.frozen)
        prediction = model(prepare(batch, PREPROCESS), labels=batch["label"], rngs=nnx.Rngs(0))
        return plain.objective(prediction, batch)[0]

    value, gradient = jax.value_and_grad(loss)(before.trainable)
    updates, _ = plain.optimizer.update(gradient, plain.start().opt, before.trainable)
    expected = optax.apply_updates(before.trainable, updates)
    state, (metrics,) = plain.run()
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradient.values()))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
    for path in expected:
        np.testing.assert_allclose(state.trainable[path], expected[path], rtol=1e-4, atol=1e-6)
        averaged = 0.9 * before.trainable[path] + 0.1 * np.asarray(state.trainable[path])
        np.testing.assert_allclose(state.ema[path], averaged, rtol=1e-5, atol=1e-7)


def test_the_parts_of_a_batch_give_the_gradients_of_the_whole(plain):
    """Images and labels that count are not the same number in each part."""
    batch = make_batch()
    batch["mask"][6:] = 0
    batch["label_mask"][:3, 1:] = 0
    whole, parted = plain.run(3, batch=batch), Bench(accumulate=4).run(3, batch=batch)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_each_part_draws_anew():
    same_twice = {name: np.concatenate([part[:4], part[:4]]) for name, part in make_batch().items()}
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # so that both parts hold the same four images
    batch = {name: part[order] for name, part in same_twice.items()}
    half = {name: part[:4] for name, part in same_twice.items()}
    _, (alone,) = Bench(noise=1.0).run(batch=half)
    _, (parted,) = Bench(noise=1.0, accumulate=2).run(batch=batch)
    assert abs(float(alone["loss"]) - float(parted["loss"])) > 1e-3 * float(alone["loss"])


def test_padding_rows_do_not_train(plain):
    batch, other = make_batch(), make_batch(1)
    batch["mask"][5:] = 0
    changed = {**batch, **{name: batch[name].copy() for name in ("image", "label", "label_mask")}}
    for name in ("image", "label", "label_mask"):
        changed[name][5:] = other[name][5:]
    assert not np.array_equal(changed["image"], batch["image"])
    one, other = plain.run(batch=batch), plain.run(batch=changed)
    assert same(one[0], other[0])
    assert same(one[1], other[1])


@pytest.mark.parametrize("options", [{"noise": 1.0}, {"cutout": 0.5, "brightness": 0.5}], ids=["model", "augmentation"])
def test_all_randomness_comes_from_seed_and_step(options):
    bench, other = Bench(**options), Bench(seed=1, **options)
    state, log = bench.run(3)
    repeated, log_again = bench.run(3)
    assert same(state, repeated)
    assert same(log, log_again)
    first, later, reseeded = (
        float(run.run(first=step)[1][0]["loss"]) for run, step in ((bench, 0), (bench, 2), (other, 0))
    )
    assert first == float(log[0]["loss"])
    assert len({first, later, reseeded}) == 3


def test_a_resumed_run_repeats_the_undisturbed_one():
    bench = Bench(noise=1.0, shift=0.5)
    state, _ = bench.run(2)
    middle = jax.device_get(state)
    undisturbed, _ = bench.step(state, shard_batch(make_batch(5), bench.mesh))
    fresh = Bench(noise=1.0, shift=0.5)
    resumed, _ = fresh.step(place(middle, fresh.mesh), shard_batch(make_batch(5), fresh.mesh))
    assert same(undisturbed, resumed)


def test_all_steps_run_one_compiled_program(caplog):
    bench = Bench()
    with jax.log_compiles():
        Toy.traces = 0
        state, _ = bench.run(1)
        first = [record.getMessage() for record in caplog.records]
        assert any("Compiling" in message and "step" in message for message in first), "compilations are seen at all"
        batches = [shard_batch(make_batch(seed), bench.mesh) for seed in range(4)]
        caplog.clear()
        for batch in batches:
            state, _ = bench.step(state, batch)
    assert not [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()]
    assert Toy.traces == 1


def test_old_values_are_donated_and_frozen_ones_are_not(plain):
    state = plain.start()
    after, _ = plain.step(state, shard_batch(make_batch(), plain.mesh))
    assert all(value.is_deleted() for value in (*state.trainable.values(), *state.ema.values()))
    assert all(after.frozen[path] is value for path, value in state.frozen.items())


# ------------------------------------------------------------------------------------------------------ eval step
def test_the_eval_step_returns_logits_with_row_and_mask():
    bench = Bench(noise=1.0, brightness=0.5)
    evaluate = make_eval_step(bench.definition, PREPROCESS, bench.mesh)
    batch, state = make_batch(), bench.start()
    batch["id"], batch["mask"] = np.arange(B, 0, -1, dtype=np.int32), (np.arange(B) < 5).astype(np.float32)
    output = evaluate(state.raw(), state.frozen, shard_batch(batch, bench.mesh))
    assert set(output) == {"logits", "id", "mask"}
    np.testing.assert_array_equal(output["id"], batch["id"])
    np.testing.assert_array_equal(output["mask"], batch["mask"])
    model = bench.definition.merge(state.raw(), state.frozen)
    np.testing.assert_allclose(output["logits"], model(prepare(batch, PREPROCESS)).logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(evaluate(state.raw(), state.frozen, batch)["logits"], output["logits"])
    assert not state.raw()["head/kernel"].is_deleted()


# --------------------------------------------------------------------------------------------------- many devices
MESHES = """
import jax
import numpy as np
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh

from mlmoe_jax.config import default_config
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.group_experts import GroupExpertsHead
from mlmoe_jax.models.prompts import DeepPrompts
from mlmoe_jax.training.optim import make_optimizer
from mlmoe_jax.runtime.sharding import AXES, make_mesh, place, shard_batch
from mlmoe_jax.models.params import ModelDef, split_trainable
from mlmoe_jax.training.state import initial_state
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.inference.step import make_eval_step
from mlmoe_jax.training.objective import make_objective
from mlmoe_jax.training.step import make_train_step

assert len(jax.devices()) == 4
config = default_config()
config.loss.terms = {"logits": 0.0, "co": 1.0, "dc": 1.0, "co_gate": 1.0, "dc_gate": 1.0}
config.augment.cutout = 0.5
config.optim.schedule, config.optim.name = "constant", "sgd"
config.optim.learning_rate = 1e-4


class Normalised(nnx.Module):
    # the model behind a batch normalisation, whose statistics are of the global batch
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.model = Classifier(
            ViT(ViTShape(width=16, depth=2, heads=2, patch=4, native=8), rngs=rngs),
            DeepPrompts(2, 16, 4, count=8, mask=np.eye(8, dtype=bool), rngs=rngs),
            GroupExpertsHead(16, {"co": [0, 1, 0], "dc": [1, 1, 0]}, groups=2, per_group=2, hidden=3, rngs=rngs),
            final_norm=True,
        )

    def __call__(self, image, *, labels=None, rngs=None):
        return self.model(self.norm(image, use_running_average=rngs is None))


model, draw = nnx.eval_shape(Normalised), np.random.default_rng(0)
values = jax.tree.map(lambda x: jnp.asarray(0.2 * draw.normal(size=x.shape) ** 2, x.dtype), nnx.state(model))
nnx.update(model, values)
definition, params, stats = ModelDef.split(model)
trainable, frozen = split_trainable(params, ((r"backbone/", False), (r"", True)))
optimizer = make_optimizer(config.optim, 10, trainable)
preprocess = Preprocess(8, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
batch = {
    "image": draw.integers(0, 256, (8, 8, 8, 3)).astype(np.uint8),
    "label": draw.integers(0, 2, (8, 3)).astype(np.float32),
    "label_mask": draw.integers(0, 2, (8, 3)).astype(np.float32),
    "mask": np.array([1, 1, 1, 1, 1, 0, 0, 0], np.float32),  # unequal from device to device
    "id": np.arange(8, dtype=np.int32),
}


def outcome(mesh):
    step = make_train_step(definition, make_objective(config.loss), optimizer, preprocess, config.augment,
                           ema_decay=0.5, seed=0, mesh=mesh)
    state = place(initial_state(trainable, frozen, stats, optimizer.init(trainable)), mesh)
    sharded = shard_batch(batch, mesh)
    state, metrics = step(state, sharded)
    output = make_eval_step(definition, preprocess, mesh)(state.raw(), state.frozen, sharded)
    assert output["logits"].sharding.is_fully_replicated
    return jax.device_get({"state": state.raw(), "ema": state.ema, "metrics": metrics, "output": output})


alone = outcome(Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3))
moved = max(np.abs(alone["state"][path] - value).max() for path, value in trainable.items())
assert moved > 1e-3, moved
for sizes in ((4, 1, 1), (2, 2, 1)):
    together = outcome(make_mesh(dict(zip(AXES, sizes))))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(together), strict=True):
        scale = max(1e-3, np.abs(one).max())
        assert np.abs(one - other).max() <= 1e-5 * scale, (sizes, path, one, other)
print("equal")
"""


@pytest.mark.slow  # test_meshes.py has one for every run
def test_meshes_of_devices_agree_with_one_device():
    assert run_python(MESHES, devices=4).strip() == "equal"


# ------------------------------------------------------------------------------------------------- balanced losses
@pytest.mark.parametrize(
    ("difficult", "weights"),
    [("negative", [2.0, 3.0, 1.0]), ("ignore", [2.0, 2.0, 1.0]), ("positive", [2.0, 1.0, 1.0])],
)
def test_positives_weigh_as_much_as_the_known_negatives(difficult, weights):
    labels = np.array([[1, 1, 0], [0, 0, 0], [0, 0, -1], [-1, 2, 0]], np.int8)
    np.testing.assert_allclose(_negatives_over_positives(labels, difficult), weights)
