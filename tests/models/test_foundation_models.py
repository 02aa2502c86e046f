"""ViTs with prompts, by the exact fast path, against a textbook transformer that runs all tokens through all blocks."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.paths import PARITY
from helpers.twins import error, parameters

from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.outputs import Prompts
from mlmoe_jax.pretrained.load import apply_rules, recognize
from tools.parity import vit as twins

NAMES = ("dinov2_small", "dinov3_plus", "siglip2", "clip")
SHAPES = {name: ViTShape(**twins.SHAPES[name] | {"depth": 2}) for name in NAMES}
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
        yield drawn(lambda: ViT(SHAPES[request.param], rngs=nnx.Rngs(0)), 0.4)


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


def block(layer, x, shape, mask, further, temperature):
    """A pre-norm block on all tokens, and its attention weights; mask bool[T,T]; further f32[1 or 2, m, D] or None."""
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
    scores = jnp.einsum("bqhd,bthd->bhqt", query, key) / np.sqrt(shape.width / heads) / temperature
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
    mixed = linear(layer.attn.proj, jnp.einsum("bhqt,bthd->bqhd", weights, value).reshape(x.shape))
    x = x + (mixed if shape.layer_scale is None else layer.ls1.gamma[...] * mixed)
    mixed = mlp(layer.mlp, normalized(layer.norm2, x, shape.eps), shape.mlp)
    return x + (mixed if shape.layer_scale is None else layer.ls2.gamma[...] * mixed), weights


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
        temperature = 1.0 if prompts.temperature is None else prompts.temperature[index]
        both = jnp.concatenate([x[:, :first], entering, x[:, first:]], 1)
        both, weights = block(layer, both, shape, mask, further, temperature)
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
    weights = weights.mean(1)[..., first + count : first + count + patches.shape[1]]
    attention = {"cls": weights[:, :1], "prompts": weights[:, first : first + count]}
    cls = x[:, 0]
    if not shape.class_token:
        cls, weights = pool(vit.pool, patches, shape)
        attention["cls"] = weights[:, None]
    return {"cls": cls, "prompts": leaving, "patches": patches, "mean": mean}, attention


# ---------------------------------------------------------------------------------------------------------- prompts
def made(shape: ViTShape, kind: str) -> Prompts:
    draw = np.random.default_rng(1)
    deep = jnp.asarray(draw.normal(size=(shape.depth, 1, P, shape.width)), jnp.float32)
    if kind == "carried":
        temperature = jnp.linspace(0.7, 1.7, shape.depth)
        return Prompts(deep[:1], carry=jnp.linspace(0.3, 0.9, shape.depth - 1), temperature=temperature)
    if kind == "alone":
        return Prompts(deep, np.eye(P, dtype=bool))
    if kind == "of each image":  # as with dropout
        return Prompts(deep * jnp.array([1.0, 0.5])[None, :, None, None])
    if kind == "half absent":
        return Prompts(deep, present=jnp.array([True, False] * (P // 2)))
    groups = np.kron(np.eye(2, dtype=bool), np.ones((P // 2, P // 2), bool))
    return Prompts(deep, groups, key_value=jnp.asarray(draw.normal(size=(shape.depth, 2, 3, shape.width)), jnp.float32))


@pytest.mark.variants(vit=("dinov3_plus",), kind=("deep", "carried", "half absent"))
@pytest.mark.parametrize("kind", ["deep", "alone", "carried", "of each image", "half absent", "none"])
def test_the_fast_path_equals_all_tokens_through_all_blocks(vit, image, kind):
    """Features and attention maps, of deep prompts with a mask and further keys and values, and of others."""
    prompts, reads = made(vit.shape, kind), [EVERY, ("prompts",), ("cls",)]
    if kind == "deep":
        reads += [("patches",), ("mean",), ("cls", "mean")]
    counted = prompts
    if kind in ("half absent", "none"):
        counted = Prompts(prompts.tokens[:, :, ::2] if kind == "half absent" else prompts.tokens[:, :, :0])
        reads = [tuple(name for name in read if name != "prompts") for read in reads if read != ("prompts",)]
    given = None if kind == "none" else prompts

    @jax.jit
    def run(vit):
        return naive(vit, image, counted), [vit(image, given, read=read, return_attention=True) for read in reads]

    (theirs, attention), found = run(vit)
    for read, ours in zip(reads, found, strict=True):
        assert ours.grid == GRID
        for name in EVERY:
            if name in read:
                assert error(getattr(ours, name), theirs[name]) < TOLERANCE, (read, name)
            else:
                assert getattr(ours, name) is None
        assert ours.attention.keys() == {"cls", "prompts"} & set(read), "none of a mean"
        for name, weights in ours.attention.items():
            assert error(weights, attention[name]) < TOLERANCE, (read, name)


@pytest.mark.slow
def test_gradients_of_prompts_equal_those_of_all_tokens(vit, image):
    prompts = made(vit.shape, "deep")
    target = jax.random.normal(jax.random.key(4), (BATCH, P, vit.shape.width))

    def gradient(encode):
        def loss(tokens):
            found = encode(Prompts(tokens, prompts.mask))
            return jnp.mean((found["prompts"] - target) ** 2) + jnp.mean(found["cls"] ** 3)

        return jax.jit(jax.grad(loss))(prompts.tokens)

    theirs = gradient(lambda prompts: naive(vit, image, prompts)[0])
    ours = gradient(lambda prompts: vars(vit(image, prompts, read=("prompts", "cls"))))
    assert all(jnp.abs(theirs[index]).max() > 1e-5 for index in range(vit.shape.depth))
    assert error(ours, theirs) < 1e-4


# ----------------------------------------------------------------------------------------------------------- counts
COUNTS = json.loads((PARITY / "foundation_models.json").read_text())
SMALL = ("dinov3_vits16plus", "clip_vitb16")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SMALL else pytest.mark.slow) for n in COUNTS])
def test_names_parameters_and_multiply_adds_are_those_of_the_source(name):
    """The model of transformers has the same tensors, and torch counts as many products in it."""
    entry, source = catalog.entry(name), COUNTS[name]
    vit = nnx.eval_shape(lambda: ViT(replace(entry.shape, depth=1), rngs=nnx.Rngs(0)))
    ours = {"/".join(map(str, path)): value.shape for path, value in nnx.to_flat_state(nnx.state(vit, nnx.Param))}
    assert parameters(ours, entry.shape.depth) == source["parameters"]
    tensors = {key.replace("*", "0"): np.broadcast_to(np.float32(0), shape) for key, shape in source["tensors"].items()}
    layout = recognize(tensors)
    mapped = apply_rules(Path(name), tensors, layout)
    assert {path: value.shape for path, value in mapped.values.items()} == ours
    assert all(any(re.fullmatch(pattern, key) for pattern in layout.ignored) for key in mapped.unused)
    layers, products, patches = entry.shape.published_macs(source["side"], None)
    normed = (2 * entry.shape.depth + 1 + entry.shape.pre_norm) * (entry.shape.leading + patches)
    normed += not entry.shape.class_token
    assert layers - 4 * entry.shape.width * normed + products == source["multiply_adds"]
