"""Losses for missing labels: the authors' numbers, extreme logits, unknown labels, batches."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import PARITY

from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.data.labels.counts import TrainingLabels
from mlmoe_jax.models.loss_catalog import LOSSES
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.training.objective import Objective

KINDS = [kind for kind in LOSSES if LOSSES[kind].__module__.endswith(("missing_labels", "selective_loss"))]
WITH_GAMMA = ("hill", "focal_margin", "splc", "distribution_balanced")
ESTIMATES, CORRECTED = "loss/estimates", "loss/corrected"
COUNTS = np.array([3.0, 1.0, 17.0])
LOGITS = np.array([[0.5, -1.2, 2.1], [-0.3, 0.9, 1.4], [-2.2, 0.1, -0.7], [3.0, -0.4, 0.2]], np.float32)
CODES = np.array([[1, -1, -1], [-1, 1, -1], [-1, -1, -1], [1, -1, 0]])


def settings(kind, **changes):
    """`config.loss` of a loss, reduced by the mean without a factor."""
    loss = default_config().loss
    loss.update({"kind": kind, "scale": 1.0, "expected_positives": 1.5, "large_loss_rate": 0.1, **changes})
    return loss


def batch_of(codes):
    codes = np.asarray(codes)
    label, known = (codes == 1).astype(np.float32), (codes != -1).astype(np.float32)
    rows = np.arange(len(codes), dtype=np.int32)
    return {"label": label, "label_mask": known, "mask": np.ones(len(codes), np.float32), "id": rows}


def training_of(kind, counts=COUNTS):
    """The training labels CODES, or for the loss that depends on counts those of 20 images with these counts."""
    codes = (np.arange(20)[:, None] < np.asarray(counts)) if kind == "distribution_balanced" else CODES
    return TrainingLabels(codes.astype(np.int8), "negative")


def compiled(loss, training, values=None):
    """A function from logits, a batch and a step to the loss, and its gradients by logits and by ROLE's estimates."""
    objective, tables = Objective(loss, training), jax.tree.map(jnp.asarray, dict(values or {}))
    estimates = {ESTIMATES: tables.pop(ESTIMATES)} if ESTIMATES in tables else {}

    @jax.jit
    @jax.value_and_grad
    def run(learned, batch, step):
        return objective(Prediction(learned["logits"]), batch, step=step, values=tables | learned)[0]

    def call(logits, batch, step=0):
        total, slopes = run({"logits": jnp.asarray(logits, jnp.float32)} | estimates, batch, step)
        return total, slopes["logits"], slopes.get(ESTIMATES)

    return call


def noting(loss, training):
    """A function from logits, a batch, a step and tables to the tables after the step."""
    objective = Objective(loss, training)
    return jax.jit(lambda logits, batch, step, tables: objective.note(Prediction(logits), batch, step, tables))


def initial(loss, training):
    objective = Objective(loss, training)
    assert objective.learned_paths() == [*objective.learned()]
    return {**objective.learned(), **objective.noted()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# ----------------------------------------------------------------------------------------------- the authors' numbers
CASES = {case["name"]: case for case in json.loads((PARITY / "missing_labels.json").read_text())["cases"]}
ARRAYS = np.load(PARITY / "missing_labels.npz")
ARGUMENTS = {"delta_rel": "large_loss_rate", "gamma": "gamma", "expected_positives": "expected_positives"}
ARGUMENTS |= {f"gamma_{name}": f"gamma_{name}" for name in ("pos", "neg", "unann")} | {"clip": "clip"}
ARGUMENTS |= {f"alpha_{name}": f"alpha_{name}" for name in ("pos", "neg", "unann")}
ARGUMENTS |= {"topk": "likelihood_topk", "prior_threshold": "prior_threshold"}
MODES = ("negative", "ignore", "ignore_normalize", "selective")  # of CSL
# The constants of the losses: the authors' names, and ours if they differ.
CONSTANTS = {"lambda": "peak", "tau": "min_probability", "change_epoch": "first_epoch"}
CONSTANTS |= {"neg_scale": "negative_scale", "kappa": "bias"}


def set_constants(loss, args, number, monkeypatch):
    """Give a loss the constants of a case; those of the first case are the published ones, which it has."""
    for key, value in args.items():
        constant = CONSTANTS.get(key, key)
        if key in ARGUMENTS or not hasattr(loss, constant):
            continue
        if number == 1:
            assert getattr(loss, constant) == value, key
        else:
            monkeypatch.setattr(loss, constant, value)


@pytest.mark.variants("number")
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind != "csl"), *(f"csl_{mode}" for mode in MODES)])
def test_value_and_gradient_of_the_authors_code(kind, number, monkeypatch):
    name = f"{kind.replace('distribution_balanced', 'db')}_{number}"
    case, args = CASES[name], CASES[name]["args"]
    read = {key: ARRAYS[f"{name}/{key}"] for key in ("logits", "y", *case["arrays"])}
    kind, _, mode = kind.partition("_") if kind.startswith("csl") else (kind, "", "auto")
    reduce = args.get("reduction", "sum" if kind == "csl" else "mean")
    loss = settings(kind, reduce=reduce, unknown=mode.replace("ignore_normalize", "normalize"))
    for key in set(args) & set(ARGUMENTS):
        loss[ARGUMENTS[key]] = type(loss[ARGUMENTS[key]])(args[key])
    set_constants(LOSSES[kind], args, number, monkeypatch)
    loss.gamma = loss.gamma if args.get("focal", True) else 0.0
    codes = read["y"]
    if kind == "distribution_balanced":
        codes = (np.arange(args["images"])[:, None] < read["class_freq"]).astype(np.int8)
    training = TrainingLabels(codes, "negative", prior=read.get("prior"))
    values = {ESTIMATES: read["estimate_logits"]} if kind == "role" else initial(loss, training)
    step = args.get("epoch", 0) - kind.startswith("ll_")
    result = compiled(loss, training, values)(read["logits"], batch_of(read["y"]), step)
    np.testing.assert_allclose(result[0], case["value_f64"], rtol=1e-6)
    for gradient, key in zip(result[1:], ("grad_f64", "grad_estimate_f64"), strict=True):
        if gradient is not None:
            exact = ARRAYS[f"{name}/{key}"]
            np.testing.assert_allclose(gradient, exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_ll_cp_stores_the_labels_that_the_authors_code_stores(number):
    name = f"ll_cp_{number}"
    y, args = ARRAYS[f"{name}/y"], CASES[name]["args"]
    loss = settings("ll_cp", large_loss_rate=args["delta_rel"])
    note, empty = noting(loss, TrainingLabels(y, "negative")), {CORRECTED: jnp.zeros(y.shape, jnp.int8)}
    noted = note(ARRAYS[f"{name}/logits"], batch_of(y), args["epoch"] - 1, empty)
    np.testing.assert_array_equal(np.where(noted[CORRECTED] == 1, 1, y), ARRAYS[f"{name}/y_after"])


@pytest.mark.variants(gamma=(2.0,))
@pytest.mark.parametrize(
    ("kind", "gamma"),
    [*((kind, 2.0) for kind in KINDS), *((kind, gamma) for kind in WITH_GAMMA for gamma in (0.0, 0.5))],
)
def test_extreme_logits_have_finite_values_and_gradients(kind, gamma):
    codes, loss = np.array([[1, -1, -1], [1, -1, -1], [-1, 1, 1]]), settings(kind, gamma=gamma)
    training = training_of(kind, [5, 0, 20])
    logits = np.array([[100, -100, 100], [-100, 100, 0], [100, 0, -100]])
    result = compiled(loss, training, initial(loss, training))(logits, batch_of(codes), step=1)
    assert all(np.isfinite(part).all() for part in result if part is not None)


# ------------------------------------------------------------------------------------------------- unknown labels
# What unknown labels are by default.
UNKNOWN = {
    "left out": ("asymmetric", "bce", "focal", "softmax", "iu"),
    "absent": ("hill", "focal_margin", "splc", "an", "wan", "an_ls", "distribution_balanced", "csl"),
    "learned from": ("ll_r", "ll_ct", "ll_cp", "epr", "role"),
}


TOGETHER = {"softmax": "logits", "distribution_balanced": "batch"}  # what the loss of a label reads of all labels


@pytest.mark.parametrize("kind", LOSSES)
def test_unknown_labels_count_as_configured(kind):
    """Left out, neither the score of an unknown label nor whether it is present changes the value or a gradient."""
    default = next((name for name, kinds in UNKNOWN.items() if kind in kinds), None)
    assert default, f"say in UNKNOWN what unknown labels are by default for the loss {kind}"
    if default == "learned from":
        config = load_config("linear_probe:dataset=digits", [("loss.kind", kind), ("loss.unknown", "ignore")])
        assert f"loss.kind={kind} learns from unknown labels: set loss.unknown=auto" in LOSSES[kind].mistakes(config)
        return
    unknown, batch = CODES == -1, batch_of(CODES)
    modes = ("auto", "ignore", "negative")
    runs = {mode: compiled(settings(kind, unknown=mode), training_of(kind)) for mode in modes}

    def loss(mode, logits=LOGITS, batch=batch):
        return runs[mode](logits, batch, step=2)[:2]

    auto, ignored, absent = map(loss, modes)
    np.testing.assert_array_equal(absent[1], loss("negative", batch=batch_of(np.maximum(CODES, 0)))[1])
    for found, expected in zip(auto, ignored if default == "left out" else absent, strict=True):
        np.testing.assert_array_equal(found, expected)
    present = {**batch, "label": np.where(unknown, 1, batch["label"]).astype(np.float32)}
    for what, changed in (("batch", present), ("logits", np.where(unknown, LOGITS + 2, LOGITS))):
        if TOGETHER.get(kind) != what:
            for found, expected in zip(loss("ignore", **{what: changed}), ignored, strict=True):
                np.testing.assert_array_equal(found, expected)
    assert kind == "softmax" or np.all((np.asarray(ignored[1]) == 0) == unknown)
    assert ignored[0] != absent[0]


@pytest.mark.parametrize("kind", LOSSES)
def test_padding_has_no_effect(kind):
    mode, training, batch = "selective" if kind == "csl" else "auto", training_of(kind), batch_of(CODES)
    loss = settings(kind, unknown=mode, likelihood_topk=1)
    run = compiled(loss, training, initial(loss, training))
    batch["mask"][1] = 0
    padded = run(LOGITS, batch, step=2)
    assert not np.any(padded[1][1])
    without = run(LOGITS[[0, 2, 3]], {name: value[[0, 2, 3]] for name, value in batch.items()}, step=2)
    np.testing.assert_allclose(padded[0], without[0], rtol=1e-6)
    np.testing.assert_allclose(padded[1][np.array([0, 2, 3])], without[1], rtol=1e-6, atol=1e-9)


def test_epochs_are_functions_of_the_step():
    training = TrainingLabels(CODES, "negative", steps_per_epoch=3)
    run = compiled(settings("ll_r"), training)
    values = [float(run(LOGITS, batch_of(CODES), step)[0]) for step in range(9)]
    assert len(set(values)) == 3
    assert values[0] == values[2] > values[3] == values[5] > values[6] == values[8]


def test_corrections_stay_and_accumulate():
    """One of two ranked labels is stored per step (> instead of ≥), and is then a positive that is not ranked."""
    codes, logits = np.full((2, 5), -1, np.int8), np.arange(10, dtype=np.float32).reshape(2, 5) / 10
    codes[0, 0] = 1
    loss, training = settings("ll_cp", large_loss_rate=0.2), TrainingLabels(codes, "negative")
    note, batch, tables = noting(loss, training), batch_of(codes), initial(loss, training)
    for step, stored in enumerate([[], [9], [8, 9], [7, 8, 9]]):
        tables = note(logits, batch, step, tables)
        assert np.flatnonzero(tables[CORRECTED]).tolist() == stored
    value = compiled(loss, training, tables)(logits, batch)[0]
    positives = np.isin(np.arange(10), [0, 7, 8, 9]).reshape(2, 5)
    np.testing.assert_allclose(value, np.logaddexp(0, np.where(positives, -logits, logits)).mean(), rtol=1e-6)


def test_an_image_that_is_padding_or_twice_in_a_batch_keeps_its_corrections():
    codes, training = np.full((3, 4), -1), TrainingLabels(np.full((3, 4), -1, np.int8), "negative")
    batch = batch_of(codes)
    batch["id"], batch["mask"] = np.array([2, 2, -1], np.int32), np.array([1.0, 1.0, 0.0], np.float32)
    logits = np.array([[3, 0, 0, 0], [0, 2, 0, 1], [9, 9, 9, 9]], np.float32)
    note = noting(settings("ll_cp", large_loss_rate=0.3), training)
    noted = note(logits, batch, 1, {CORRECTED: jnp.zeros((3, 4), jnp.int8)})
    np.testing.assert_array_equal(noted[CORRECTED], [[0] * 4, [0] * 4, [1, 1, 0, 0]])


def test_initial_estimates():
    codes = np.array([[1, 0, -1, -1]] * 500, np.int8)
    first, second = (
        initial(settings("role"), TrainingLabels(codes, "negative", seed=seed))[ESTIMATES] for seed in (0, 1)
    )
    assert first.dtype == np.float32
    np.testing.assert_allclose(sigmoid(first[:, :2]), [[0.995, 0.005]] * 500, rtol=1e-5)
    assert sigmoid(first[:, 2:]).min() == pytest.approx(0.4, abs=0.005)
    assert sigmoid(first[:, 2:]).max() == pytest.approx(0.6, abs=0.005)
    assert (first[:, 2:] != second[:, 2:]).all()


def test_the_number_of_large_losses_is_that_of_exact_arithmetic():
    """500 labels and a rate of 0.002 are one label per epoch; 0.002 · 500 in float32 is slightly more than 1."""
    codes, logits = np.full((25, 20), -1), np.linspace(0, 1, 500, dtype=np.float32).reshape(25, 20)
    loss, training = settings("ll_r", large_loss_rate=0.002), TrainingLabels(codes, "negative")
    run = compiled(loss, training)
    for epoch in (1, 2, 7):
        gradient = run(logits, batch_of(codes), epoch)[1]
        assert (np.asarray(gradient) == 0).sum() == epoch == math.ceil(epoch * 500 * 0.002 - 1e-9)
