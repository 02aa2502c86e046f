"""ViTs with prompts, by the exact fast path, against a textbook transformer that runs all tokens through all blocks."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.paths import PARITY
from helpers.twins import error

from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.layers.attention import FusedProjection, apply_rotary
from mlmoe_jax.models.layers.positions import rotary_angles
from mlmoe_jax.models.outputs import Prompts
from mlmoe_jax.pretrained.load import apply_rules, recognize
from tools.parity import vit as twins

NAMES = ("dinov2_small", "dinov3", "siglip2", "clip")
SHAPES = {name: ViTShape(**twins.SHAPES[name] | {"depth": 2}) for name in NAMES}
PLAIN = SHAPES["dinov2_small"]
GRID, P, BATCH = (3, 2), 4, 2
EVERY = ("cls", "prompts", "patches", "mean")
TOLERANCE = 2e-5
ACTIVATION = {
    "gelu": lambda x: x * 0.5 * (1 + jax.scipy.special.erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + jnp.exp(-1.702 * x)),
}


@pytest.fixture(scope="module", params=NAMES)
def vit(request):
    """A twin of a family with random values in every parameter."""
    with jax.default_matmul_precision("highest"):
        yield made_vit(SHAPES[request.param])


def made_vit(shape: ViTShape, **options) -> ViT:
    return drawn(lambda: ViT(shape, rngs=nnx.Rngs(0), **options), 0.4)


@pytest.fixture(scope="module")
def image():
    return twins.image(BATCH, *GRID)


# --------------------------------------------------------------------------------------------------- the reference
def normalized(layer, x, eps):
    centered = x - x.mean(-1, keepdims=True)
    return centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + eps) * layer.scale[...] + layer.bias[...]


def linear(layer, x):
    return x @ layer.kernel[...] + layer.bias[...]


def mlp(layer, x, kind):
    if kind != "swiglu":
        return linear(layer.fc2, ACTIVATION[kind](linear(layer.fc1, x)))
    gate, value = jnp.split(linear(layer.fc1, x), 2, -1)
    return linear(layer.fc2, gate / (1 + jnp.exp(-gate)) * value)


def turn(x, shape):
    """Multiply the N last of x [B,T,h,d], as complex numbers, by e^(iφ); φ from loops over the patches."""
    half = x.shape[-1] // 2
    phase = np.ones((x.shape[1], half), complex)
    for row in range(GRID[0]):
        for column in range(GRID[1]):
            place = (2 * (row + 0.5) / GRID[0] - 1, 2 * (column + 0.5) / GRID[1] - 1)
            for channel in range(half):
                axis, j = divmod(channel, half // 2)
                angle = 2 * np.pi * place[axis] / shape.rotary_base ** (2 * j / half)
                phase[x.shape[1] - GRID[0] * GRID[1] + row * GRID[1] + column, channel] = np.exp(1j * angle)
    turned = (x[..., :half] + 1j * x[..., half:]) * phase[:, None]
    return jnp.concatenate([turned.real, turned.imag], -1)


def block(layer, x, shape, mask, further):
    """One pre-norm block on all tokens; mask bool[T,T]; further f32[1 or 2, m, D] or None."""
    y, heads = normalized(layer.norm1, x, shape.eps), shape.heads
    bias = layer.attn.qkv.bias[...]
    if not shape.key_bias:
        bias = jnp.concatenate([bias[: shape.width], jnp.zeros(shape.width), bias[shape.width :]])
    qkv = y @ layer.attn.qkv.kernel[...] + bias
    query, key, value = (part.reshape(*x.shape[:2], heads, -1) for part in jnp.split(qkv, 3, -1))
    if shape.rotary_base is not None:
        query, key = turn(query, shape), turn(key, shape)
    if further is not None:
        more = [jnp.broadcast_to(part, (len(x), *part.shape)) for part in (further[0], further[-1])]
        more = [part.reshape(*part.shape[:2], heads, -1) for part in more]
        key, value = jnp.concatenate([key, more[0]], 1), jnp.concatenate([value, more[1]], 1)
        mask = np.pad(mask, ((0, 0), (0, further.shape[1])), constant_values=True)
    scores = jnp.einsum("bqhd,bthd->bhqt", query, key) / np.sqrt(shape.width / heads)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
    mixed = linear(layer.attn.proj, jnp.einsum("bhqt,bthd->bqhd", weights, value).reshape(x.shape))
    x = x + (mixed if shape.layer_scale is None else layer.ls1.gamma[...] * mixed)
    mixed = mlp(layer.mlp, normalized(layer.norm2, x, shape.eps), shape.mlp)
    return x + (mixed if shape.layer_scale is None else layer.ls2.gamma[...] * mixed)


def pool(layer, patches, shape):
    """The output f32[B,D] and the weights f32[B,N] of the attention pool, one head at a time."""
    part = [slice(i * shape.width, (i + 1) * shape.width) for i in range(3)]
    kernel, bias = layer.attn.qkv.kernel[...], layer.attn.qkv.bias[...]
    query = layer.query[0, 0] @ kernel[:, part[0]] + bias[part[0]]
    key, value = (patches @ kernel[:, part[i]] + bias[part[i]] for i in (1, 2))
    size, mixed, weights = shape.width // shape.heads, [], []
    for head in range(shape.heads):
        own = slice(head * size, (head + 1) * size)
        weights.append(jax.nn.softmax(key[..., own] @ query[own] / np.sqrt(size), -1))
        mixed.append(jnp.einsum("bn,bnd->bd", weights[-1], value[..., own]))
    mixed = linear(layer.attn.proj, jnp.concatenate(mixed, -1))
    return mixed + mlp(layer.mlp, normalized(layer.norm, mixed, shape.eps), shape.mlp), sum(weights) / shape.heads


def naive(vit, image, prompts):
    """Run all tokens through all blocks, in the order leading tokens, prompts, patches; return what heads may read."""
    shape, (x, _) = vit.shape, vit.embed(image)
    first, count = shape.leading, prompts.tokens.shape[2]
    mask = np.ones((x.shape[1] + count,) * 2, bool)
    if prompts.mask is not None:
        mask[first : first + count, first : first + count] = prompts.mask
    entering = jnp.broadcast_to(prompts.tokens[0], (len(x), count, shape.width))
    for index, layer in enumerate(vit.blocks):
        further = None if prompts.key_value is None else prompts.key_value[index]
        both = block(layer, jnp.concatenate([x[:, :first], entering, x[:, first:]], 1), shape, mask, further)
        leaving = both[:, first : first + count]
        x = jnp.concatenate([both[:, :first], both[:, first + count :]], 1)
        if index < shape.depth - 1 and prompts.carry is not None:
            kept = prompts.carry[index]
            entering = kept * leaving + (1 - kept) * entering
        elif index < shape.depth - 1:
            entering = jnp.broadcast_to(prompts.tokens[index + 1], entering.shape)
    mean = normalized(vit.norm, jnp.concatenate([leaving, x[:, first:]], 1).mean(1), shape.eps)
    x, leaving = (normalized(vit.norm, part, shape.eps) for part in (x, leaving))
    patches = x[:, first:]
    cls = x[:, 0] if shape.class_token else pool(vit.pool, patches, shape)[0]
    return {"cls": cls, "prompts": leaving, "patches": patches, "mean": mean}


# ---------------------------------------------------------------------------------------------------------- prompts
def made(shape: ViTShape, kind: str) -> Prompts:
    draw = np.random.default_rng(1)
    deep = jnp.asarray(draw.normal(size=(shape.depth, 1, P, shape.width)), jnp.float32)
    if kind == "carried":
        return Prompts(deep[:1], carry=jnp.linspace(0.3, 0.9, shape.depth - 1))
    if kind == "alone":
        return Prompts(deep, np.eye(P, dtype=bool))
    groups = np.kron(np.eye(2, dtype=bool), np.ones((P // 2, P // 2), bool))
    return Prompts(deep, groups, key_value=jnp.asarray(draw.normal(size=(shape.depth, 2, 3, shape.width)), jnp.float32))


@pytest.mark.variants("kind", vit=("dinov3",))
@pytest.mark.parametrize("kind", ["deep", "alone", "carried"])
def test_the_fast_path_equals_all_tokens_through_all_blocks(vit, image, kind):
    """Deep prompts with a mask and further keys and values, or each alone, and carried prompts."""
    prompts = made(vit.shape, kind)
    reads = (EVERY, ("prompts",), ("cls",), ("patches",), ("mean",), ("cls", "mean"))

    @jax.jit
    def run(vit):
        return naive(vit, image, prompts), [vit(image, prompts, read=read) for read in reads]

    theirs, found = run(vit)
    for read, ours in zip(reads, found, strict=True):
        assert ours.grid == GRID
        for name in EVERY:
            if name in read:
                assert error(getattr(ours, name), theirs[name]) < TOLERANCE, (read, name)
            else:
                assert getattr(ours, name) is None


@pytest.mark.slow
@pytest.mark.variants(vit=("dinov3",))
@pytest.mark.parametrize(
    "vit", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("siglip2", "clip"))) for n in NAMES], indirect=True
)
def test_gradients_of_prompts_equal_those_of_the_reference(vit, image):
    prompts = made(vit.shape, "deep")
    target = jax.random.normal(jax.random.key(4), (BATCH, P, vit.shape.width))

    def loss(encode):
        def run(tokens):
            found = encode(Prompts(tokens, prompts.mask))
            return jnp.mean((found["prompts"] - target) ** 2) + jnp.mean(found["cls"] ** 3)

        return jax.jit(jax.grad(run))(prompts.tokens)

    theirs = loss(lambda prompts: naive(vit, image, prompts))
    ours = loss(lambda prompts: vars(vit(image, prompts, read=("prompts", "cls"))))
    assert all(jnp.abs(theirs[index]).max() > 1e-5 for index in range(vit.shape.depth))
    assert error(ours, theirs) < 1e-4


@pytest.fixture(scope="module")
def plain():
    with jax.default_matmul_precision("highest"):
        yield made_vit(PLAIN)


@pytest.mark.slow
def test_prompts_that_differ_per_image_take_the_same_path(plain, image):
    """With prompt dropout, prompts differ per image: the second axis is B."""
    own = made(PLAIN, "deep").tokens * jnp.array([1.0, 0.5])[None, :, None, None]
    read = jax.jit(lambda image, tokens: plain(image, Prompts(tokens), read=("prompts",)).prompts)
    together = read(image, own)
    for row in range(BATCH):
        alone = read(image[row : row + 1], own[:, row : row + 1])
        assert error(together[row : row + 1], alone) < TOLERANCE


@pytest.mark.slow
def test_without_prompts_is_the_plain_vit(plain, image):
    none = Prompts(jnp.zeros((PLAIN.depth, 1, 0, PLAIN.width)))
    empty, without = (plain(image, given, read=("cls", "patches", "mean")) for given in (none, None))
    for name in ("cls", "patches", "mean"):
        assert error(getattr(empty, name), getattr(without, name)) < TOLERANCE
    before_the_norm = plain(image, read=("patches",), norm=False).patches.mean(1)
    assert error(without.mean, normalized(plain.norm, before_the_norm, PLAIN.eps)) < TOLERANCE


@pytest.mark.slow
def test_prompts_that_are_absent_do_not_count_in_the_mean(plain, image):
    tokens, present = made(PLAIN, "deep").tokens, jnp.array([True, False] * (P // 2))
    fewer = plain(image, Prompts(tokens[:, :, ::2]), read=("mean",)).mean
    assert error(plain(image, Prompts(tokens, present=present), read=("mean",)).mean, fewer) < TOLERANCE


@pytest.mark.slow
def test_a_mean_alone_has_no_attention_maps(plain, image):
    prompts = Prompts(made(PLAIN, "deep").tokens)
    none, both, alone = (
        plain(image, prompts, read=read, return_attention=True).attention
        for read in (("mean",), ("cls", "mean"), ("cls",))
    )
    assert none == {}
    assert both.keys() == alone.keys() == {"cls"}
    assert error(both["cls"], alone["cls"]) < TOLERANCE


@pytest.mark.slow
def test_the_fast_path_needs_fewer_operations(plain, image):
    def flops(function):
        return jax.jit(function).lower(made(PLAIN, "deep").tokens).compile().cost_analysis()["flops"]

    fast = flops(lambda tokens: plain(image, Prompts(tokens), read=("prompts",)).prompts)
    assert fast < 0.75 * flops(lambda tokens: naive(plain, image, Prompts(tokens))["prompts"])


# ------------------------------------------------------------------------------------------------- the parts alone
@pytest.mark.slow
def test_without_a_class_token_cls_is_the_attention_pool_over_normed_patches(image):
    vit, prompts = made_vit(SHAPES["siglip2"]), made(SHAPES["siglip2"], "deep")

    @jax.jit
    def run(vit):
        every = [
            vit(image, prompts, read=("cls", "prompts"), norm=norm, return_attention=True) for norm in (True, False)
        ]
        return every, pool(vit.pool, vit(image, prompts, read=("patches",)).patches, vit.shape)

    every, (cls, weights) = run(vit)
    for features in every:
        assert error(features.cls, cls) < TOLERANCE
        assert error(features.attention["cls"][:, 0], weights) < TOLERANCE
        np.testing.assert_allclose(features.attention["cls"].sum(-1), 1, atol=1e-5)
        assert features.attention["prompts"].shape == (BATCH, P, 6)
        assert features.patches is None


def test_rotations_depend_on_differences_of_positions():
    """⟨R(a)q, R(b)k⟩ is a function of b − a, and the angle 0 changes nothing."""
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 12))

    def product(first, second):
        angles = [jnp.full((1, 6), angle) for angle in (first, second)]
        return jnp.sum(apply_rotary(query, angles[0]) * apply_rotary(key, angles[1]), -1)

    np.testing.assert_allclose(product(0.3, 1.1), product(2.0, 2.8), rtol=1e-4, atol=1e-5)
    assert np.abs(product(0.3, 1.1) - product(0.3, 1.6)).max() > 1e-2
    np.testing.assert_array_equal(apply_rotary(query, jnp.zeros((1, 6))), query)
    assert apply_rotary(query.astype(jnp.bfloat16), jnp.ones((1, 6))).dtype == jnp.bfloat16


def test_angles_are_symmetric_and_independent_of_the_number_of_patches():
    angles = rotary_angles((2, 4), 16, 100.0)
    assert angles.shape == (8, 8)
    np.testing.assert_allclose(angles, -angles[::-1], atol=1e-6)
    np.testing.assert_allclose(angles[0, :4], 2 * np.pi * -0.5 / 100 ** np.array([0, 0.25, 0.5, 0.75]), rtol=1e-6)
    np.testing.assert_allclose(angles[0, 4:], 1.5 * angles[0, :4], rtol=1e-6)  # centers −1/2 and −3/4


def test_keys_without_a_bias():
    layer = FusedProjection(4, key_bias=False, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(8.0)
    zero = jnp.zeros((1, 1, 4))
    np.testing.assert_array_equal(layer(zero)[0, 0], [0, 1, 2, 3, 0, 0, 0, 0, 4, 5, 6, 7])
    np.testing.assert_array_equal(layer.key_value(zero)[0, 0], [0, 0, 0, 0, 4, 5, 6, 7])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dinov3", "siglip2"])
def test_bfloat16_computes_matrices_only(image, name):
    prompts = made(SHAPES[name], "deep")
    run = jax.jit(lambda vit: vit(image, prompts, read=EVERY))
    ours, theirs = (run(made_vit(SHAPES[name], dtype=dtype)) for dtype in (jnp.bfloat16, None))
    for part in EVERY:
        assert getattr(ours, part).dtype == np.float32
        assert 1e-4 < error(getattr(ours, part), getattr(theirs, part)) < 0.06


# ----------------------------------------------------------------------------------------------------------- counts
COUNTS = json.loads((PARITY / "foundation_models.json").read_text())
SMALL = ("dinov3_vits16", "clip_vitb16")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SMALL else pytest.mark.slow) for n in COUNTS])
def test_names_parameters_and_multiply_adds_are_those_of_the_source(name):
    """The model of transformers has the same tensors, and torch counts as many products in it."""
    entry, source = catalog.entry(name), COUNTS[name]
    vit = nnx.eval_shape(lambda: ViT(entry.shape, rngs=nnx.Rngs(0)))
    ours = {"/".join(map(str, path)): value.shape for path, value in nnx.to_flat_state(nnx.state(vit, nnx.Param))}
    assert sum(map(math.prod, ours.values())) == source["parameters"]
    tensors = {
        key.replace("*", str(index)): np.broadcast_to(np.float32(0), shape)
        for key, shape in source["tensors"].items()
        for index in range(entry.shape.depth if "*" in key else 1)
    }
    layout = recognize(tensors)
    mapped = apply_rules(Path(name), tensors, layout)
    assert {path: value.shape for path, value in mapped.values.items()} == ours
    assert all(any(re.fullmatch(pattern, key) for pattern in layout.ignored) for key in mapped.unused)
    layers, products, patches = entry.shape.published_macs(source["side"], None)
    normed = (2 * entry.shape.depth + 1 + entry.shape.pre_norm) * (entry.shape.leading + patches)
    normed += not entry.shape.class_token
    assert layers - 4 * entry.shape.width * normed + products == source["multiply_adds"]
