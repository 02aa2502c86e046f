"""Losses for missing labels: the authors' numbers, formulas in float64, extreme logits, unknown labels, batches."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.data.labels.counts import TrainingLabels
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.models.registries import LOSSES
from mlmoe_jax.training.objective import Objective

GOLDEN = REPOSITORY.parent / "shared" / "golden"
KINDS = [kind for kind in LOSSES if kind not in ("asymmetric", "bce", "focal", "softmax")]
WITH_GAMMA = ("hill", "focal_margin", "splc", "distribution_balanced")
ESTIMATES, CORRECTED = "loss/estimates", "loss/corrected"


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


def frequencies(counts, images):
    """Training labels with a number of positives per label."""
    return TrainingLabels((np.arange(images)[:, None] < np.asarray(counts)).astype(np.int8), "negative")


def evaluate(loss, logits, batch, training, *, step=0, values=None):
    """The loss, and its gradient by the logits and by the estimates of ROLE."""
    objective, values = Objective(loss, training), dict(values or {})
    fixed = {path: jnp.asarray(table) for path, table in values.items() if path != ESTIMATES}

    def value(logits, estimates):
        tables = fixed | ({} if estimates is None else {ESTIMATES: estimates})
        return objective(Prediction(logits), batch, step=step, values=tables)[0]

    estimates = values.get(ESTIMATES)
    if estimates is None:
        total, gradient = jax.value_and_grad(value)(jnp.asarray(logits), None)
        return total, gradient, None
    total, gradients = jax.value_and_grad(value, argnums=(0, 1))(jnp.asarray(logits), jnp.asarray(estimates))
    return total, *gradients


def initial(loss, training):
    objective = Objective(loss, training)
    assert objective.learned_paths() == [*objective.learned()]
    return {**objective.learned(), **objective.noted()}


# ----------------------------------------------------------------------------------------------- the authors' numbers
ARGUMENTS = {"delta_rel": "large_loss_rate", "gamma": "gamma", "expected_positives": "expected_positives"}
ARGUMENTS |= {f"gamma_{name}": f"gamma_{name}" for name in ("pos", "neg", "unann")} | {"clip": "clip"}
ARGUMENTS |= {f"alpha_{name}": f"alpha_{name}" for name in ("pos", "neg", "unann")}
ARGUMENTS |= {"topk": "likelihood_topk", "prior_threshold": "prior_threshold"}
MODES = ("negative", "ignore", "ignore_normalize", "selective")  # of CSL
# The constants of the losses: the authors' names, and ours if they differ.
CONSTANTS = {"lambda": "peak", "tau": "min_probability", "change_epoch": "first_epoch"}
CONSTANTS |= {"neg_scale": "negative_scale", "kappa": "bias"}


@pytest.fixture(scope="module")
def golden():
    if not (GOLDEN / "missing_labels.npz").is_file():
        pytest.skip("the numbers of the authors' code, ../shared/golden, are not part of the repository and not here")
    cases = json.loads((GOLDEN / "missing_labels.json").read_text())
    return {case["name"]: case for case in cases["cases"]}, np.load(GOLDEN / "missing_labels.npz"), cases


@pytest.mark.parametrize("number", [*(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2)), 3])
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind != "csl"), *(f"csl_{mode}" for mode in MODES)])
def test_value_and_gradient_of_the_authors_code(golden, kind, number, monkeypatch):
    cases, arrays, _ = golden
    name = f"{kind.replace('distribution_balanced', 'db')}_{number}"
    case, args = cases[name], cases[name]["args"]
    read = {key: arrays[f"{name}/{key}"] for key in ("logits", "y", "grad_f64", *case["arrays"])}
    kind, _, mode = kind.partition("_") if kind.startswith("csl") else (kind, "", "auto")
    reduce = args.get("reduction", "sum" if kind == "csl" else "mean")
    loss = settings(kind, reduce=reduce, unknown=mode.replace("ignore_normalize", "normalize"))
    for key in set(args) & set(ARGUMENTS):
        loss[ARGUMENTS[key]] = type(loss[ARGUMENTS[key]])(args[key])
    for key, value in args.items():
        if key not in ARGUMENTS and hasattr(LOSSES[loss.kind], constant := CONSTANTS.get(key, key)):
            monkeypatch.setattr(LOSSES[loss.kind], constant, value)
    loss.gamma = loss.gamma if args.get("focal", True) else 0.0
    training = (
        frequencies(read["class_freq"], args["images"])
        if kind == "distribution_balanced"
        else TrainingLabels(read["y"], "negative", prior=read.get("prior"))
    )
    values = {ESTIMATES: read["estimate_logits"]} if kind == "role" else initial(loss, training)
    step = args.get("epoch", 0) - kind.startswith("ll_")
    result = evaluate(loss, read["logits"], batch_of(read["y"]), training, step=step, values=values)
    np.testing.assert_allclose(result[0], case["value_f64"], rtol=1e-6)
    for gradient, key in zip(result[1:], ("grad_f64", "grad_estimate_f64"), strict=True):
        if gradient is not None:
            exact = arrays[f"{name}/{key}"]
            np.testing.assert_allclose(gradient, exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_ll_cp_stores_the_labels_that_the_authors_code_stores(golden, number):
    cases, arrays, _ = golden
    name = f"ll_cp_{number}"
    y, args = arrays[f"{name}/y"], cases[name]["args"]
    loss = settings("ll_cp", large_loss_rate=args["delta_rel"])
    objective = Objective(loss, TrainingLabels(y, "negative"))
    prediction = Prediction(jnp.asarray(arrays[f"{name}/logits"]))
    noted = objective.note(prediction, batch_of(y), args["epoch"] - 1, {CORRECTED: jnp.zeros(y.shape, jnp.int8)})
    np.testing.assert_array_equal(np.where(noted[CORRECTED] == 1, 1, y), arrays[f"{name}/y_after"])


# ---------------------------------------------------------------------------------------------- formulas in float64
def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


def focal(x, t):
    return np.where(t, sigmoid(-x) ** 2 * softplus(-x), sigmoid(x) ** 2 * softplus(x))


def n(x):
    return -np.log(x + 1e-5)


def penalty(p):
    return (p.sum(1).mean() - 1.5) ** 2 / p.shape[1] ** 2


def large(z, y, changed):
    """The loss of LL if the two largest losses of unknown labels, which are not tied, are `changed`."""
    entries = softplus(np.where(y == 1, -z, z))
    unknown = np.where(y == -1, entries, 0)
    return np.where(unknown >= np.sort(unknown, axis=None)[-2], changed(z), entries).mean()


def balanced(z, y, counts, images):
    inverse = 1 / counts
    with np.errstate(divide="ignore"):
        r = inverse / (y @ inverse)[:, None]
    w, s = 0.1 + sigmoid(10 * (r - 0.2)), z + 0.025 * np.log(counts / (images - counts))
    b = np.where(y, softplus(-s), softplus(2 * s))
    return (2 * (1 - np.exp(-b)) ** 2 * b * np.where(y, w, w / 2)).mean()


COUNTS = np.array([3.0, 1.0, 17.0])
FORMULAS = {
    "hill": lambda z, y: np.where(
        y == 1, sigmoid(1 - z) ** 2 * softplus(1 - z), (1.5 - sigmoid(z)) * sigmoid(z) ** 2
    ).mean(),
    "focal_margin": lambda z, y: focal(z - (y == 1), y == 1).mean(),
    "splc": lambda z, y: focal(z - (y == 1), (y == 1) | (sigmoid(z) > 0.6)).mean(),
    "ll_r": lambda z, y: large(z, y, np.zeros_like),
    "ll_ct": lambda z, y: large(z, y, lambda x: softplus(-x)),
    "ll_cp": lambda z, y: large(z, y, lambda x: softplus(-x)),
    "an": lambda z, y: np.where(y == 1, n(sigmoid(z)), n(sigmoid(-z))).mean(),
    "iu": lambda z, y: np.where(y == 1, n(sigmoid(z)), np.where(y == 0, n(sigmoid(-z)), 0)).mean(),
    "wan": lambda z, y: np.where(y == 1, n(sigmoid(z)), n(sigmoid(-z)) / 2).mean(),
    "an_ls": lambda z, y: (
        0.9 * np.where(y == 1, n(sigmoid(z)), n(sigmoid(-z))) + 0.1 * np.where(y == 1, n(sigmoid(-z)), n(sigmoid(z)))
    ).mean(),
    "epr": lambda z, y: np.where(y == 1, n(sigmoid(z)), 0).mean() + penalty(sigmoid(z)),
    "distribution_balanced": lambda z, y: balanced(z, y == 1, COUNTS, 20),
}
LOGITS = np.array([[0.5, -1.2, 2.1], [-0.3, 0.9, 1.4], [-2.2, 0.1, -0.7], [3.0, -0.4, 0.2]])
CODES = np.array([[1, -1, -1], [-1, 1, -1], [-1, -1, -1], [1, -1, 0]])


@pytest.mark.parametrize("kind", FORMULAS)
def test_value_and_gradient_of_the_formula(kind):
    """The gradient is a central difference in float64."""
    training = frequencies(COUNTS, 20) if kind == "distribution_balanced" else TrainingLabels(CODES, "negative")
    loss = settings(kind, large_loss_rate=0.15)
    result = evaluate(
        loss, LOGITS.astype(np.float32), batch_of(CODES), training, step=1, values=initial(loss, training)
    )
    np.testing.assert_allclose(result[0], FORMULAS[kind](LOGITS, CODES), rtol=1e-6)
    for place in np.ndindex(LOGITS.shape):
        by = np.zeros_like(LOGITS)
        by[place] = 1e-5
        slope = (FORMULAS[kind](LOGITS + by, CODES) - FORMULAS[kind](LOGITS - by, CODES)) / 2e-5
        np.testing.assert_allclose(result[1][place], slope, rtol=1e-5, atol=1e-7, err_msg=str(place))


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("negative", np.ones((4, 3))),
        ("ignore", CODES != -1),
        ("normalize", (CODES != -1) * (1 + 1 / np.array([[2], [2], [1], [3]]))),
        # The four largest logits of unknown labels are dropped, one per image, and the first label, which is frequent.
        ("selective", [[1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]),
    ],
)
def test_partial_asymmetric_loss(mode, weights):
    alphas, gammas = {"pos": 1.5, "neg": 0.5, "unann": 0.25}, {"pos": 1.0, "neg": 3.0, "unann": 4.0}
    keys = {f"alpha_{name}": value for name, value in alphas.items()}
    keys |= {f"gamma_{name}": value for name, value in gammas.items()}
    keys |= {"likelihood_topk": 1, "prior_threshold": 0.5, "clip": 0.05, "reduce": "sum", "unknown": mode}
    training = TrainingLabels(CODES, "negative", prior=np.array([0.6, 0.5, 0.4], np.float32))
    result = evaluate(settings("csl", **keys), LOGITS.astype(np.float32), batch_of(CODES), training)
    p = sigmoid(LOGITS)
    missed = np.maximum(p - 0.05, 0)
    scale = weights * np.where(CODES == 0, 0.5 * missed**3, 0.25 * missed**4)
    scale = np.where(CODES == 1, weights * (1.5 * (1 - p)), scale)
    chances = np.where(CODES == 1, p, np.minimum(1 - p + 0.05, 1))
    slope = np.where(CODES == 1, p - 1, p * (1 - p) / chances) * ((CODES == 1) | (p > 0.05))
    np.testing.assert_allclose(result[0], (scale * -np.log(chances)).sum(), rtol=1e-6)
    np.testing.assert_allclose(result[1], scale * slope, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_role_with_equal_logits_and_estimates_by_hand():
    """p = q = 1/2 everywhere: half of y 2 n + 4 (n / 2) = 3 n and n without y, where n = −log(1/2 + 1e-5)."""
    half, zeros = n(0.5), np.zeros((2, 3), np.float32)
    training = TrainingLabels(np.array([[1, -1, -1], [-1, -1, -1]], np.int8), "negative")
    result = evaluate(settings("role"), zeros, batch_of(training.codes), training, values={ESTIMATES: zeros})
    np.testing.assert_allclose(result[0], (2 * half + 5 * half) / 6, rtol=1e-6)
    for gradient in result[1:]:
        np.testing.assert_allclose(gradient, [[-0.25 / 0.50001 / 12, 0, 0], [0, 0, 0]], atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "gamma"),
    [*((kind, 2.0) for kind in KINDS), *((kind, gamma) for kind in WITH_GAMMA for gamma in (0.0, 0.5))],
)
def test_extreme_logits_have_finite_values_and_gradients(kind, gamma):
    codes, loss = np.array([[1, -1, -1], [1, -1, -1], [-1, 1, 1]]), settings(kind, gamma=gamma)
    training = frequencies([5, 0, 20], 20) if kind == "distribution_balanced" else TrainingLabels(codes, "negative")
    logits = np.array([[100, -100, 100], [-100, 100, 0], [100, 0, -100]], np.float32)
    result = evaluate(loss, logits, batch_of(codes), training, step=1, values=initial(loss, training))
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
    (default,) = (name for name, kinds in UNKNOWN.items() if kind in kinds)
    if default == "learned from":
        config = load_config("linear_probe:dataset=digits", [("loss.kind", kind), ("loss.unknown", "ignore")])
        assert f"loss.kind={kind} learns from unknown labels: set loss.unknown=auto" in LOSSES[kind].mistakes(config)
        return
    training = frequencies(COUNTS, 20) if kind == "distribution_balanced" else TrainingLabels(CODES, "negative")
    unknown, batch, logits = CODES == -1, batch_of(CODES), LOGITS.astype(np.float32)

    def loss(mode, logits=logits, batch=batch):
        return evaluate(settings(kind, unknown=mode), logits, batch, training, step=2)[:2]

    auto, ignored, absent = map(loss, ("auto", "ignore", "negative"))
    np.testing.assert_array_equal(absent[1], loss("negative", batch=batch_of(np.maximum(CODES, 0)))[1])
    for found, expected in zip(auto, ignored if default == "left out" else absent, strict=True):
        np.testing.assert_array_equal(found, expected)
    present = {**batch, "label": np.where(unknown, 1, batch["label"]).astype(np.float32)}
    for what, changed in (("batch", present), ("logits", np.where(unknown, logits + 2, logits))):
        if TOGETHER.get(kind) != what:
            for found, expected in zip(loss("ignore", **{what: changed}), ignored, strict=True):
                np.testing.assert_array_equal(found, expected)
    assert kind == "softmax" or np.all((np.asarray(ignored[1]) == 0) == unknown)
    assert ignored[0] != absent[0]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_has_no_effect(kind):
    training = frequencies(COUNTS, 20) if kind == "distribution_balanced" else TrainingLabels(CODES, "negative")
    mode = "selective" if kind == "csl" else "auto"
    loss, logits, batch = settings(kind, unknown=mode, likelihood_topk=1), LOGITS.astype(np.float32), batch_of(CODES)
    values = initial(loss, training)
    batch["mask"][1] = 0
    padded = evaluate(loss, logits, batch, training, step=2, values=values)
    assert not np.any(padded[1][1])
    rest = {name: value[[0, 2, 3]] for name, value in batch.items()}
    without = evaluate(loss, logits[[0, 2, 3]], rest, training, step=2, values=values)
    np.testing.assert_allclose(padded[0], without[0], rtol=1e-6)
    np.testing.assert_allclose(padded[1][np.array([0, 2, 3])], without[1], rtol=1e-6, atol=1e-9)


def test_known_negatives_are_never_changed_by_large_losses():
    codes, logits = np.array([[0, -1, 1, -1]]), np.array([[9.0, 1.0, -9.0, 0.5]], np.float32)
    result = evaluate(
        settings("ll_r", large_loss_rate=0.25), logits, batch_of(codes), TrainingLabels(codes, "negative"), step=1
    )
    np.testing.assert_array_equal(np.asarray(result[1])[0] == 0, [False, True, False, False])


def test_epochs_are_functions_of_the_step():
    training = TrainingLabels(CODES, "negative", steps_per_epoch=3)
    values = [float(evaluate(settings("ll_r"), LOGITS, batch_of(CODES), training, step=step)[0]) for step in range(9)]
    assert len(set(values)) == 3
    assert values[0] == values[2] > values[3] == values[5] > values[6] == values[8]


def test_corrections_stay_and_accumulate():
    """One of two ranked labels is stored per step (> instead of ≥), and is then a positive that is not ranked."""
    codes, logits = np.full((2, 5), -1, np.int8), np.arange(10, dtype=np.float32).reshape(2, 5) / 10
    codes[0, 0] = 1
    loss, training = settings("ll_cp", large_loss_rate=0.2), TrainingLabels(codes, "negative")
    objective, batch, tables = Objective(loss, training), batch_of(codes), initial(settings("ll_cp"), training)
    tables = {path: jnp.asarray(table) for path, table in tables.items()}
    for step, stored in enumerate([[], [9], [8, 9], [7, 8, 9]]):
        tables = objective.note(Prediction(jnp.asarray(logits)), batch, step, tables)
        assert np.flatnonzero(tables[CORRECTED]).tolist() == stored
    value = evaluate(loss, logits, batch, training, values=tables)[0]
    positives = np.isin(np.arange(10), [0, 7, 8, 9]).reshape(2, 5)
    np.testing.assert_allclose(value, softplus(np.where(positives, -logits, logits)).mean(), rtol=1e-6)


def test_an_image_that_is_padding_or_twice_in_a_batch_keeps_its_corrections():
    codes, training = np.full((3, 4), -1), TrainingLabels(np.full((3, 4), -1, np.int8), "negative")
    batch = batch_of(codes)
    batch["id"], batch["mask"] = np.array([2, 2, -1], np.int32), np.array([1.0, 1.0, 0.0], np.float32)
    logits = jnp.asarray([[3.0, 0, 0, 0], [0, 2.0, 0, 1.0], [9.0, 9, 9, 9]])
    objective = Objective(settings("ll_cp", large_loss_rate=0.3), training)
    noted = objective.note(Prediction(logits), batch, 1, {CORRECTED: jnp.zeros((3, 4), jnp.int8)})
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
    for epoch in (1, 2, 7):
        gradient = evaluate(loss, logits, batch_of(codes), training, step=epoch)[1]
        assert (np.asarray(gradient) == 0).sum() == epoch == math.ceil(epoch * 500 * 0.002 - 1e-9)
