import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.adapters.groups import prompt_groups, prompt_mask
from mlmoe_jax.models.build import build_model
from mlmoe_jax.models.contracts import Features
from mlmoe_jax.models.experts import BottleneckExpert, apply_bank, make_bank
from mlmoe_jax.models.heads.group_experts import GroupExpertsHead, combine_sides
from mlmoe_jax.models.heads.group_linear import GroupLinearHead
from mlmoe_jax.models.params import ModelDef, split_trainable

D, G, M, K = 12, 3, 2, 5
CO, DC = [0, 1, 2, 0, 1], [2, 2, 1, 0, 0]


def make_head(**options):
    return GroupExpertsHead(D, {"co": CO, "dc": DC}, groups=G, per_group=M, rngs=nnx.Rngs(0), **options)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.normal(jax.random.key(5), (4, 2 * G * M, D))


def head_by_loops(head, tokens):
    """Return the logits by the equations of ML-VPT, one label and one expert at a time, in numpy."""
    z = np.asarray(tokens, np.float64)
    up, down = head.bank.up, head.bank.down
    logits = {}
    for s, (side, group_of) in enumerate((("co", CO), ("dc", DC))):
        part = getattr(head, side)
        for k in range(K):
            rows = [s * G * M + e * G + group_of[k] for e in range(M)]
            gate = np.stack([z[:, r] @ np.asarray(part.gate.kernel)[e, k] for e, r in enumerate(rows)], axis=1)
            if part.gate.adds_bias:
                gate += np.asarray(part.gate.bias)[:, k]
            weight = np.exp(gate) / np.exp(gate).sum(1, keepdims=True)
            worked = []
            for r in rows:
                hidden = z[:, r] @ np.asarray(up.kernel)[r] + np.asarray(up.bias)[r]
                hidden = np.maximum(hidden, 0)
                worked.append(z[:, r] + hidden @ np.asarray(down.kernel)[r] + np.asarray(down.bias)[r])
            feature = sum(weight[:, e : e + 1] * worked[e] for e in range(M))
            classifier = part.classifier or head.classifier
            logits[side, k] = feature @ np.asarray(classifier.kernel)[k] + np.asarray(classifier.bias)[k]
            logits[f"{side}_gate", k] = (weight * gate).sum(1)
    return {name: np.stack([logits[name, k] for k in range(K)], 1) for name in ("co", "dc", "co_gate", "dc_gate")}


@pytest.mark.parametrize("gate_bias", ["used", "unused"])
@pytest.mark.parametrize("shared", [False, True])
def test_head_is_its_equations(tokens, gate_bias, shared):
    head = make_head(activation="relu", gate_bias=gate_bias, shared_classifier=shared)
    prediction = head(Features(None, tokens, None, (1, 1)))
    expected = head_by_loops(head, tokens)
    assert set(prediction.terms) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(prediction.terms[name], values, rtol=2e-5, atol=2e-6, err_msg=name)
    for gates in prediction.gates.values():
        assert gates.shape == (4, K, M)
        np.testing.assert_allclose(gates.sum(-1), 1, rtol=1e-6)


def test_combinations(tokens):
    features = Features(None, tokens, None, (1, 1))
    code, paper = make_head()(features), make_head(combine="mean_probability")(features)
    np.testing.assert_allclose(code.logits, (code.terms["co"] + code.terms["dc"]) / 2, rtol=1e-6)
    sigmoid = jax.nn.sigmoid
    mean = (sigmoid(paper.terms["co"]) + sigmoid(paper.terms["dc"])) / 2
    np.testing.assert_allclose(sigmoid(paper.logits), mean, rtol=1e-5)
    extreme = combine_sides(
        [jnp.array([[200.0, -200.0, 200.0]]), jnp.array([[180.0, -190.0, -200.0]])], "mean_probability"
    )
    assert np.isfinite(extreme).all()
    np.testing.assert_allclose(extreme[0, 2], 0, atol=1e-4)


def test_one_gate_per_group_equals_a_gate_shared_by_its_labels(tokens):
    features = Features(None, tokens, None, (1, 1))
    for bias in ("used", "unused"):
        by_group, by_label = make_head(gates_of="group", gate_bias=bias), make_head(gate_bias=bias)
        assert by_group.co.gate.kernel.shape == (M, G, D)
        for name, group_of in (("co", CO), ("dc", DC)):
            shared, own = getattr(by_group, name), getattr(by_label, name)
            own.gate.kernel[...] = shared.gate.kernel[...][:, np.array(group_of)]
            own.gate.bias[...] = shared.gate.bias[...][:, np.array(group_of)]
            own.classifier.kernel[...], own.classifier.bias[...] = (
                shared.classifier.kernel[...],
                shared.classifier.bias[...],
            )
        nnx.update(by_label.bank, nnx.state(by_group.bank))
        ours, theirs = by_group(features), by_label(features)
        for name, expected in {"logits": theirs.logits, **theirs.terms}.items():
            np.testing.assert_allclose({"logits": ours.logits, **ours.terms}[name], expected, rtol=1e-5, atol=1e-6)


def test_one_side_is_that_side_of_both(tokens):
    both, alone = make_head(), GroupExpertsHead(D, {"dc": DC}, groups=G, per_group=M, rngs=nnx.Rngs(3))
    nnx.update(alone.bank, jax.tree.map(lambda x: x[G * M :], nnx.state(both.bank)))
    nnx.update(alone.dc, nnx.state(both.dc))
    prediction = alone(Features(None, tokens[:, G * M :], None, (1, 1)))
    np.testing.assert_allclose(prediction.logits, both(Features(None, tokens, None, (1, 1))).terms["dc"], rtol=1e-5)
    assert set(prediction.terms) == {"dc", "dc_gate"}


@pytest.mark.parametrize("sides", [{"co": CO, "dc": DC}, {"dc": DC}])
def test_group_prompts_without_experts_are_averaged_and_classified(tokens, sides):
    head = GroupLinearHead(D, sides, groups=G, per_group=M, rngs=nnx.Rngs(0))
    tokens = tokens[:, : len(sides) * G * M]
    prediction = head(Features(None, tokens, None, (1, 1)))
    for s, (name, group_of) in enumerate(sides.items()):
        classifier = getattr(head, name)
        for k in range(K):
            mean = np.mean([tokens[:, s * G * M + e * G + group_of[k]] for e in range(M)], axis=0)
            expected = mean @ np.asarray(classifier.kernel)[k] + np.asarray(classifier.bias)[k]
            np.testing.assert_allclose(prediction.terms[name][:, k], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(prediction.logits, sum(prediction.terms.values()) / len(sides), rtol=1e-6)
    assert not prediction.gates


def test_permuting_labels_permutes_logits(tokens):
    order = np.array([3, 0, 4, 1, 2])
    head = make_head()
    groups = {"co": np.take(CO, order), "dc": np.take(DC, order)}
    permuted = GroupExpertsHead(D, groups, groups=G, per_group=M, rngs=nnx.Rngs(1))
    params = ModelDef.split(head)[1]
    label_axis = {"gate": 1, "classifier": 0}
    moved = {
        path: jnp.take(value, order, axis=label_axis[path.split("/")[1]]) if "bank" not in path else value
        for path, value in params.items()
    }
    permuted = ModelDef.split(permuted)[0].merge(moved)
    features = Features(None, tokens, None, (1, 1))
    np.testing.assert_allclose(permuted(features).logits, head(features).logits[:, order], rtol=1e-5, atol=1e-6)


def test_a_bank_equals_its_experts(tokens):
    bank = make_bank(lambda rngs: BottleneckExpert(D, 3, rngs=rngs), 2 * G * M, nnx.Rngs(7))
    together = apply_bank(bank, tokens)
    graphdef, state = nnx.split(bank)
    for p in range(2 * G * M):
        one = nnx.merge(graphdef, jax.tree.map(lambda x, p=p: x[p], state))
        np.testing.assert_allclose(together[:, p], one(tokens[:, p]), rtol=1e-5, atol=1e-6)
    kernels = np.asarray(bank.up.kernel)
    assert len(np.unique(kernels[:, 0, 0])) == 2 * G * M, "experts have different initial values"


def test_prompt_layout_and_masks():
    group_of = prompt_groups(2, 2, 3)
    assert group_of.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert prompt_mask("none", group_of) is None
    np.testing.assert_array_equal(prompt_mask("all_prompts", group_of), np.eye(12, dtype=bool))
    cross = prompt_mask("cross_group", group_of)
    assert cross[0, 2]
    assert not cross[0, 1]
    assert not cross[0, 6]
    assert cross.sum() == 36
    with pytest.raises(ValueError, match="unknown prompt mask"):
        prompt_mask("some", group_of)


def mlvpt_config(backbone, groups=5):
    config = default_config()
    config.model.backbone.name = backbone
    config.model.prompts.kind, config.model.prompts.num_groups = "group", groups
    config.model.head.kind = "group_experts"
    return config


@pytest.mark.parametrize(
    ("backbone", "labels", "trainable", "total"),
    [
        ("dinov2_vitb14", 80, 1_022_230, 87_602_710),
        ("dinov2_vitb14", 20, 653_110, 87_233_590),
        ("dinov2_vits14", 80, 511_510, 22_568_086),
    ],
)
def test_published_parameter_counts(backbone, labels, trainable, total):
    config, space = mlvpt_config(backbone), synthetic_label_space(labels, 5)
    model = nnx.eval_shape(lambda: build_model(config, space, rngs=nnx.Rngs(0)))
    params = {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    learned, frozen = split_trainable(params, config.trainable)
    assert sum(np.prod(v.shape) for v in learned.values()) == trainable
    assert sum(np.prod(v.shape) for v in params.values()) == total
    assert all(path.startswith("backbone/") for path in frozen)


def test_initial_values_are_those_of_the_authors_code():
    config, space = mlvpt_config("vit_digits", groups=4), synthetic_label_space(10, 4)
    _, params, _ = ModelDef.split(build_model(config, space, rngs=nnx.Rngs(0)))
    bounds = {
        "prompts/deep": np.sqrt(6 / (3 * 8 * 8 + 128)),
        "head/bank/up/kernel": 1 / np.sqrt(128),
        "head/bank/up/bias": 1 / np.sqrt(128),
        "head/bank/down/kernel": 1 / np.sqrt(5),
        "head/bank/down/bias": 1 / np.sqrt(5),
        "head/co/gate/kernel": 1 / np.sqrt(128),
        "head/dc/classifier/kernel": 1 / np.sqrt(128),
    }
    for path, bound in bounds.items():
        values = np.asarray(params[path])
        assert 0.9 * bound < np.abs(values).max() <= bound, path
        assert abs(values.mean()) < 0.15 * bound, path
