from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.bench import drawn_model
from helpers.drawn import drawn
from helpers.name_vectors import drawn_vectors
from helpers.query_heads import decoder_settings
from PIL import Image
from scipy import special
from scipy.special import logsumexp

from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.adapters.group_prompts import prompt_groups, prompt_mask
from mlmoe_jax.models.build import gather_quarters, image_and_quarters
from mlmoe_jax.models.heads.cosine import CosineHead
from mlmoe_jax.models.heads.csra import CSRAHead
from mlmoe_jax.models.heads.dr_moe import GroupTokenDecoder, label_prompt_mask
from mlmoe_jax.models.heads.group_experts import GroupExpertsHead, GroupLinearHead, combine_sides
from mlmoe_jax.models.heads.linear import POOLS, LinearHead
from mlmoe_jax.models.heads.patching import PatchingHead
from mlmoe_jax.models.macs import forward_macs
from mlmoe_jax.models.outputs import PATCHES, PROMPTS, Features
from mlmoe_jax.models.params import ModelDef

D, G, M, K = 12, 3, 2, 5
CO, DC = [0, 1, 2, 0, 1], [2, 2, 1, 0, 0]
SIDES = {"co": CO, "dc": DC}
TOKENS = np.random.default_rng(5).normal(size=(4, 2 * G * M, D)).astype(np.float32)


def make_head(sides=SIDES, **options):
    return drawn(lambda: GroupExpertsHead(D, sides, groups=G, per_group=M, rngs=nnx.Rngs(0), **options), 0.3)


@jax.jit
def predict(head, tokens=TOKENS):
    return head(Features(None, tokens, None, (1, 1)))


def head_by_loops(head, tokens, sides):
    """Return the logits by the equations of ML-VPT, one label and one expert at a time, in numpy."""
    z = np.asarray(tokens, np.float64)
    up, down = head.bank.up, head.bank.down
    logits = {}
    for s, (side, group_of) in enumerate(sides.items()):
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
            classifier = part.classifier
            logits[side, k] = feature @ np.asarray(classifier.kernel)[k] + np.asarray(classifier.bias)[k]
            logits[f"{side}_gate", k] = (weight * gate).sum(1)
    return {name: np.stack([logits[name, k] for k in range(K)], 1) for name in (*sides, *(f"{s}_gate" for s in sides))}


@pytest.mark.variants("gate_bias", "sides")
@pytest.mark.parametrize("gate_bias", ["used", "unused"])
@pytest.mark.parametrize("sides", [SIDES, {"dc": DC}], ids=["both sides", "one side"])
def test_head_is_its_equations(gate_bias, sides):
    head = make_head(sides, activation="relu", gate_bias=gate_bias)
    tokens = TOKENS[:, : len(sides) * G * M]
    prediction = predict(head, tokens)
    expected = head_by_loops(head, tokens, sides)
    assert set(prediction.terms) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(prediction.terms[name], values, rtol=2e-5, atol=2e-6, err_msg=name)
    for gates in prediction.gates.values():
        assert gates.shape == (4, K, M)
        np.testing.assert_allclose(gates.sum(-1), 1, rtol=1e-6)


def test_combinations():
    code, paper = predict(make_head()), predict(make_head(combine="mean_probability"))
    np.testing.assert_allclose(code.logits, (code.terms["co"] + code.terms["dc"]) / 2, rtol=1e-6)
    ours, co, dc = map(special.expit, (paper.logits, paper.terms["co"], paper.terms["dc"]))
    np.testing.assert_allclose(ours, (co + dc) / 2, rtol=1e-5)
    sides = list(np.float32([[[200, -200, 200]], [[180, -190, -200]]]))
    extreme = jax.jit(lambda: combine_sides(sides, "mean_probability"))()
    assert np.isfinite(extreme).all()
    np.testing.assert_allclose(extreme[0, 2], 0, atol=1e-4)


def test_one_gate_per_group_equals_a_gate_shared_by_its_labels():
    for bias in ("used", "unused"):
        by_group, by_label = make_head(gates_of="group", gate_bias=bias), make_head(gate_bias=bias)
        assert by_group.co.gate.kernel.shape == (M, G, D)
        for name, group_of in SIDES.items():
            shared, own = getattr(by_group, name), getattr(by_label, name)
            own.gate.kernel[...] = shared.gate.kernel[...][:, np.array(group_of)]
            own.gate.bias[...] = shared.gate.bias[...][:, np.array(group_of)]
            nnx.update(own.classifier, nnx.state(shared.classifier))
        nnx.update(by_label.bank, nnx.state(by_group.bank))
        ours, theirs = predict(by_group), predict(by_label)
        for name, expected in {"logits": theirs.logits, **theirs.terms}.items():
            np.testing.assert_allclose({"logits": ours.logits, **ours.terms}[name], expected, rtol=1e-5, atol=1e-6)


def test_group_prompts_without_experts_are_averaged_and_classified():
    head = drawn(lambda: GroupLinearHead(D, SIDES, groups=G, per_group=M, rngs=nnx.Rngs(0)), 0.3)
    prediction = predict(head)
    for s, (name, group_of) in enumerate(SIDES.items()):
        classifier = getattr(head, name)
        for k in range(K):
            mean = np.mean([TOKENS[:, s * G * M + e * G + group_of[k]] for e in range(M)], axis=0)
            expected = mean @ np.asarray(classifier.kernel)[k] + np.asarray(classifier.bias)[k]
            np.testing.assert_allclose(prediction.terms[name][:, k], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(prediction.logits, sum(prediction.terms.values()) / 2, rtol=1e-6)
    assert not prediction.gates


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


# ------------------------------------------------------------------------------------------------------- linear heads
def linear(layer, x):
    return np.asarray(x, np.float64) @ np.asarray(layer.kernel) + np.asarray(layer.bias)


@pytest.mark.parametrize("pool", POOLS)
def test_linear_classifiers_of_each_pool(pool):
    """Patches are pooled by a smooth maximum; with two classifiers, the mean of their logits is reported."""
    draw = np.random.default_rng(0)
    cls, mean, patches = (draw.normal(size=shape).astype(np.float32) for shape in ((3, D), (3, D), (3, 4, D)))
    head = drawn(lambda: LinearHead(D, K, pool=pool, rngs=nnx.Rngs(0)), 0.3)
    given = {"cls": cls, "patches": patches, "mean": mean}
    read = {name: value if name in head.read else None for name, value in given.items()}
    features = Features(read["cls"], None, read["patches"], (2, 2), mean=read["mean"])
    prediction = jax.jit(lambda: head(features))()
    expected = {}
    if "cls" in head.read:
        expected["cls"] = linear(head.classifier, cls)
    if pool in ("patches", "both"):
        expected["patches"] = logsumexp(linear(head.patch_classifier, patches), axis=1) - np.log(4)
    assert prediction.terms.keys() == expected.keys()
    for name, logits in expected.items():
        np.testing.assert_allclose(prediction.terms[name], logits, rtol=1e-5, atol=1e-5)
    pooled = None if expected else linear(head.classifier, mean if pool == "mean" else patches.max(axis=1))
    logits = sum(expected.values()) / len(expected) if expected else pooled
    np.testing.assert_allclose(prediction.logits, logits, rtol=1e-5, atol=1e-5)
    config = default_config()
    config.model.head.pool = pool
    assert LinearHead.terms(config) == ("logits", *expected)
    assert forward_macs(head, features)[0] == 3 * D * K * {"patches": 4, "both": 5}.get(pool, 1)


# -------------------------------------------------------------------------------------------------------------- MLMoE
GROUPS = {"co": [0, 1, 1], "dc": [1, 1, 0]}


def mlmoe_decoder():
    sizes = {"width": 8, "heads": 2, "hidden": 16, "encoder_layers": 0, "decoder_layers": 1}
    settings = decoder_settings(style="independent", **sizes)
    return drawn(lambda: GroupTokenDecoder(8, GROUPS, settings, groups=2, per_group=2, rngs=nnx.Rngs(0)), 0.3)


def test_a_label_owns_the_prompts_of_its_groups_on_both_sides():
    mask = label_prompt_mask(GROUPS, 2, 2)
    of = prompt_groups(2, 2, 2)
    for k in range(3):
        assert mask[k].tolist() == [group in (GROUPS["co"][k], 2 + GROUPS["dc"][k]) for group in of]
    assert label_prompt_mask({"dc": GROUPS["dc"]}, 2, 2)[2].tolist() == [True, False, True, False]


def test_a_label_query_attends_to_all_patches_and_only_its_prompts():
    draw = np.random.default_rng(0)
    patches, prompts = (jnp.asarray(draw.normal(size=(2, n, 8)), jnp.float32) for n in (4, 8))
    model = mlmoe_decoder()
    assert model.read == (PROMPTS, PATCHES)

    @jax.jit
    def changed(by_patches, by_prompts):
        """Return by how much each label's feature changes with the tokens."""
        before, after = (
            model(Features(None, prompts + up, patches + other, (2, 2)))
            for up, other in ((0, 0), (by_prompts, by_patches))
        )
        return jnp.abs(after - before).max(axis=(0, 2))

    mask, one = label_prompt_mask(GROUPS, 2, 2), np.eye(8, dtype=np.float32)[:, :, None]
    for p in range(8):
        assert ((changed(0 * one[0, :4], one[p]) > 1e-5) == mask[:, p]).all()
    assert (changed(one[3, :4], 0 * one[0]) > 1e-5).all()


# ------------------------------------------------------------------------------------------------- residual attention
def csra_by_loops(kernel, patches, temperatures, weight):
    """The logits of CSRA, one head, image and label at a time; the temperature 99 is the maximum, as in its code."""
    logits = np.zeros((len(patches), kernel.shape[2]))
    for v, temperature in zip(kernel, temperatures, strict=True):
        for b, k in np.ndindex(*logits.shape):
            score = patches[b] @ v[:, k] / np.sqrt((v[:, k] ** 2).sum())
            share = np.exp(temperature * score - logsumexp(temperature * score))
            attended = score.max() if temperature == 99 else (share * score).sum()
            logits[b, k] += score.mean() + weight * attended
    return logits


@pytest.mark.parametrize("temperatures", [(1,), (1, 99), (1, 2, 4, 99), (1, 2, 3, 4, 5, 99), (1, 2, 3, 4, 5, 6, 7, 99)])
def test_csra_is_its_equations(temperatures):
    """Values, and the gradient of a weighted sum along a direction, as a central difference in float64."""
    heads, draw = len(temperatures), np.random.default_rng(0)
    kernel, toward = draw.normal(size=(2, heads, D, K))
    patches, mix = draw.normal(size=(3, 6, D)), draw.normal(size=(3, K))

    @jax.jit
    def logits(kernel):
        head = nnx.eval_shape(lambda: CSRAHead(D, K, heads=heads, weight=0.5, rngs=nnx.Rngs(0)))
        head.kernel.set_value(jnp.asarray(kernel, jnp.float32))
        return head(Features(None, None, jnp.asarray(patches, jnp.float32), (2, 3))).logits

    def exact(kernel):
        return csra_by_loops(kernel, patches, temperatures, 0.5)

    np.testing.assert_allclose(logits(kernel), exact(kernel), rtol=2e-5, atol=2e-5)
    _, slope = jax.jvp(lambda x: (logits(x) * mix).sum(), (jnp.asarray(kernel),), (jnp.asarray(toward),))
    difference = (mix * (exact(kernel + 1e-6 * toward) - exact(kernel - 1e-6 * toward))).sum() / 2e-6
    np.testing.assert_allclose(slope, difference, rtol=1e-3)


# ----------------------------------------------------------------------------------------------------------- patching
def test_quarters_are_resized_as_pillow_does_and_gathered_by_image():
    images = np.random.default_rng(0).normal(size=(2, 13, 10, 3)).astype(np.float32)  # the last row has no quarter
    found = jax.jit(image_and_quarters)(images)
    for b in range(2):
        np.testing.assert_array_equal(found[5 * b], images[b])
        for q, (top, left) in enumerate(((0, 0), (0, 5), (6, 0), (6, 5))):
            for c in range(3):
                part = Image.fromarray(images[b, top : top + 6, left : left + 5, c])
                resized = part.resize((10, 13), Image.Resampling.BILINEAR)
                np.testing.assert_allclose(found[5 * b + 1 + q, :, :, c], resized, atol=2e-5)
    attention = {"cls": jnp.arange(10.0).reshape(10, 1, 1)}
    features = gather_quarters(Features(jnp.arange(20.0).reshape(10, 2), None, None, (1, 1), attention), 2)
    np.testing.assert_array_equal(features.cls, [[0, 1], [10, 11]])
    np.testing.assert_array_equal(features.quarters[1], [[12, 13], [14, 15], [16, 17], [18, 19]])
    np.testing.assert_array_equal(features.attention["cls"], [[[0]], [[5]]])


def test_a_model_with_this_head_encodes_each_image_and_its_quarters(tiny_vit):
    config = default_config()
    config.model.backbone.name, config.model.head.kind = "vit_digits", "pat"
    model = drawn_model(config, synthetic_label_space(10, 4))
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 64, 3)), jnp.float32)

    features = jax.jit(lambda x: model.encode(x))(images)
    assert (features.cls.shape, features.quarters.shape) == ((2, 16), (2, 4, 16))
    model.head.read = ("cls",)
    alone = jax.jit(lambda x: model.encode(image_and_quarters(x)).cls)(images).reshape(2, 5, 16)
    np.testing.assert_allclose(features.cls, alone[:, 0], atol=2e-5)
    np.testing.assert_allclose(features.quarters, alone[:, 1:], atol=2e-5)


def test_patching_is_its_equations():
    """Values, and the gradients of both terms by the quarters, as central differences in float64."""
    head, draw = drawn(lambda: PatchingHead(D, K, rngs=nnx.Rngs(0)), 0.3), np.random.default_rng(0)
    whole, quarters, toward = draw.normal(size=(3, D)), draw.normal(size=(3, 4, D)), draw.normal(size=(3, 4, D))
    (u, a), (v, b), (w, c) = (
        (np.asarray(layer.kernel[...], np.float64), np.asarray(layer.bias[...], np.float64))
        for layer in (head.classifier, head.weights, head.quarters)
    )

    def exact(quarters):
        shares = np.exp(quarters @ v + b)
        return (shares * (quarters @ w + c)).sum(1) / shares.sum(1)

    @jax.jit
    def ours(quarters):
        return head(Features(jnp.asarray(whole, jnp.float32), None, None, (1, 1), quarters=quarters))

    prediction = ours(jnp.asarray(quarters, jnp.float32))
    np.testing.assert_allclose(prediction.terms["cls"], whole @ u + a, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(prediction.terms["quarters"], exact(quarters), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(prediction.logits, (whole @ u + a + exact(quarters)) / 2, rtol=2e-5, atol=2e-6)
    given = [jnp.asarray(x, jnp.float32) for x in (quarters, toward)]
    _, slope = jax.jvp(lambda x: ours(x).terms["quarters"], given[:1], given[1:])
    difference = (exact(quarters + 1e-6 * toward) - exact(quarters - 1e-6 * toward)) / 2e-6
    np.testing.assert_allclose(slope, difference, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("projects", [False, True])
def test_the_cosine_head_gives_the_scores_of_an_image_text_model(projects):
    inner = 7 if projects else D
    vectors = drawn_vectors("abcde", inner, projects_from=D * projects, scale=30.0, bias=-2.0)
    vectors.background[0] = 0.5
    space = replace(synthetic_label_space(K, 1), names=vectors.names, name_vectors=vectors)
    head = CosineHead.from_config(default_config(), D, space, dtype=None, rngs=nnx.Rngs(0))
    cls = np.random.default_rng(2).normal(size=(4, D)).astype(np.float32)
    v = cls @ vectors.projection if projects else cls
    u = v / np.linalg.norm(v, axis=1, keepdims=True)
    prediction = head(Features(cls, None, None, (1, 1)))
    expected = 30 * u @ (vectors.vectors - vectors.background).T - 2
    np.testing.assert_allclose(prediction.logits, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(head.image_vectors(Features(cls, None, None, (1, 1))), u, rtol=2e-5, atol=1e-6)
    one = Features(cls[:1], None, None, (1, 1))
    assert forward_macs(head, one)[0] == inner * K + D * inner * projects
    paths = ModelDef.split(head)[1]
    assert ("projection/kernel" in paths) == projects
    assert {"classifier/kernel", "classifier/bias"} <= set(paths)
