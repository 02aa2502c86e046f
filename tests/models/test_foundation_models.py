"""ViTs with prompts, by the exact fast path, against all tokens in all blocks."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.paths import PARITY
from helpers.twins import error, parameters

from mlmoe_jax.models.adapters.prompts import NoPrompts
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.layers import dispatch, softmax_attention
from mlmoe_jax.models.layers.attention import apply_rotary
from mlmoe_jax.models.outputs import Prompts
from mlmoe_jax.pretrained.load import apply_rules, recognize
from tools.parity import vit as twins

NAMES = ("dinov2_small", "dinov3_plus", "siglip2", "clip")
SHAPES = {name: ViTShape(**twins.SHAPES[name] | {"depth": 2}) for name in NAMES}
GRID, P, BATCH = (3, 2), 4, 2
EVERY = ("cls", "prompts", "patches", "mean")
TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=NAMES)
def vit(request):
    """A twin of a family with random values in every parameter."""
    with jax.default_matmul_precision("highest"):
        yield drawn(lambda: ViT(SHAPES[request.param], rngs=nnx.Rngs(0)), 0.4)


@pytest.fixture(scope="module")
def image():
    return twins.image(BATCH, *GRID)


# --------------------------------------------------------------------------------------------------- the reference
# Norms, projections, rotary angles, MLPs and the pool are those of the model, which test_vit_family.py compares with
# PyTorch; the attention among all tokens and prompts is written out.
def block(layer, x, shape, mask, angles, further, temperature):
    """A pre-norm block on all tokens, and its attention weights; mask bool[T,T]; further f32[1 or 2, m, D] or None."""
    parts = jnp.split(layer.attn.qkv(layer.norm1(x)), 3, -1)
    query, key, value = (part.reshape(*x.shape[:2], shape.heads, -1) for part in parts)
    if angles is not None:
        query, key = apply_rotary(query, angles), apply_rotary(key, angles)
    if further is not None:
        more = [jnp.broadcast_to(part, (len(x), *part.shape)) for part in (further[0], further[-1])]
        more = [part.reshape(*part.shape[:2], shape.heads, -1) for part in more]
        key, value = jnp.concatenate([key, more[0]], 1), jnp.concatenate([value, more[1]], 1)
        mask = np.pad(mask, ((0, 0), (0, further.shape[1])), constant_values=True)
    scores = jnp.einsum("bqhd,bthd->bhqt", query, key) / np.sqrt(shape.width / shape.heads) / temperature
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
    mixed = layer.attn.proj(jnp.einsum("bhqt,bthd->bqhd", weights, value).reshape(x.shape))
    x = x + (layer.ls1(mixed) if layer.scaled else mixed)
    mixed = layer.mlp(layer.norm2(x))
    return x + (layer.ls2(mixed) if layer.scaled else mixed), weights


def pool_weights(layer, patches, shape):
    """The weights f32[B,1,N] of the attention pool, as a mean over the heads."""
    query, key = layer.attn.qkv(layer.query[...])[..., : shape.width], layer.attn.qkv(patches)
    query, key = (
        part.reshape(*part.shape[:2], shape.heads, -1) for part in (query, key[..., shape.width :][..., : shape.width])
    )
    scores = jnp.einsum("bqhd,bthd->bhqt", jnp.broadcast_to(query, (len(key), *query.shape[1:])), key)
    return jax.nn.softmax(scores / np.sqrt(shape.width / shape.heads), -1).mean(1)


def naive(vit, image, prompts):
    """Run all tokens through all blocks, in the order leading tokens, prompts, patches; return what heads may read."""
    shape, (x, grid) = vit.shape, vit.embed(image)
    first, count, angles = shape.leading, prompts.tokens.shape[2], vit.rotary(grid)
    if angles is not None:  # a prompt has no place in the grid
        angles = jnp.concatenate([angles[:first], jnp.zeros((count, angles.shape[1])), angles[first:]])
    mask = np.ones((x.shape[1] + count,) * 2, bool)
    if prompts.mask is not None:
        mask[first : first + count, first : first + count] = prompts.mask
    entering = jnp.broadcast_to(prompts.tokens[0], (len(x), count, shape.width))
    for index, layer in enumerate(vit.blocks):
        further = None if prompts.key_value is None else prompts.key_value[index]
        temperature = 1.0 if prompts.temperature is None else prompts.temperature[index]
        both = jnp.concatenate([x[:, :first], entering, x[:, first:]], 1)
        both, weights = block(layer, both, shape, mask, angles, further, temperature)
        leaving = both[:, first : first + count]
        x = jnp.concatenate([both[:, :first], both[:, first + count :]], 1)
        if index < shape.depth - 1 and prompts.carry is not None:
            kept = prompts.carry[index]
            entering = kept * leaving + (1 - kept) * entering
        elif index < shape.depth - 1:
            entering = jnp.broadcast_to(prompts.tokens[index + 1], entering.shape)
    mean = vit.norm(jnp.concatenate([leaving, x[:, first:]], 1).mean(1))
    x, leaving = vit.norm(x), vit.norm(leaving)
    patches = x[:, first:]
    weights = weights.mean(1)[..., first + count : first + count + patches.shape[1]]
    attention = {"cls": weights[:, :1], "prompts": weights[:, first : first + count]}
    cls = x[:, 0]
    if not shape.class_token:
        cls, attention["cls"] = vit.pool(patches), pool_weights(vit.pool, patches, shape)
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


@pytest.fixture
def queries_of_cudnn(monkeypatch):
    """Let `attend_by_cudnn` compute attention, with XLA in place of cuDNN; return its numbers of queries."""
    numbers, by_cudnn, library = [], softmax_attention.attend_by_cudnn, jax.nn.dot_product_attention

    def attend(query, key, value, mask):
        numbers.append(query.shape[1])
        return by_cudnn(query, key, value, mask)

    def attend_by_xla(query, key, value, implementation, **lengths):
        assert implementation == "cudnn"
        assert query.shape[1] % 2 == key.shape[1] % 2 == 0
        return library(query, key, value, implementation="xla", **lengths)

    monkeypatch.setattr(softmax_attention, "attend_by_cudnn", attend)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend_by_xla)
    row = dispatch.Kernel("attend", dispatch.EVERY, attend, "attention", lambda *_, mask: mask is None)
    monkeypatch.setattr(dispatch, "TABLE", (row, *dispatch.TABLE))
    return numbers


@pytest.mark.variants(vit=("dinov3_plus",), kind=("deep", "carried"))
@pytest.mark.parametrize("kind", ["deep", "carried", "of each image", "half absent", "none"])
def test_a_token_for_even_queries_changes_neither_features_nor_gradients(vit, image, kind, request):
    def results():
        @jax.jit
        @partial(jax.grad, argnums=(0, 1), has_aux=True)
        def run(tokens, image):
            prompts = None if kind == "none" else replace(made(vit.shape, kind), tokens=tokens)
            found = vit(image, prompts, read=EVERY if prompts else ("cls", "patches", "mean"))
            values = {name: getattr(found, name) for name in EVERY if getattr(found, name) is not None}
            return sum(jnp.sum(jnp.sin(value)) for value in values.values()), values

        (by_prompts, by_image), values = run(made(vit.shape, kind).tokens, image)
        return [by_image, *values.values(), *([] if kind == "none" else [by_prompts])]

    theirs = results()
    queries = request.getfixturevalue("queries_of_cudnn")
    ours = results()
    if kind != "half absent":  # masks are not for cuDNN
        assert len(queries) >= vit.shape.depth - 1
        assert not any(number % 2 for number in queries[: vit.shape.depth - 1])
    for our, their in zip(ours, theirs, strict=True):
        assert error(our, their) < TOLERANCE


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


def test_a_published_side_that_is_no_multiple_of_the_patch_ends_with_pixels_that_are_not_read():
    """SigLIP 2 So400m at 384 pixels, by a convolution without padding."""
    assert catalog.entry("siglip2_so400m14_384").shape.fits(384)
    shape = replace(
        catalog.entry("siglip2_so400m14_384").shape, width=16, heads=2, depth=1, patch=7, native=28, published=30
    )
    assert [side for side in range(27, 36) if shape.fits(side)] == [28, 30, 35]
    vit = shape.build(rngs=nnx.Rngs(0))
    image = jax.random.normal(jax.random.key(0), (2, 30, 30, 3))
    outer, inner = vit(image, read=("cls", "patches")), vit(image[:, :28, :28], read=("cls", "patches"))
    assert outer.grid == (4, 4)
    np.testing.assert_array_equal(outer.cls, inner.cls)


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
    layers, products, patches = entry.shape.published_macs(source["side"], NoPrompts)
    normed = (2 * entry.shape.depth + 1 + entry.shape.pre_norm) * (entry.shape.leading + patches)
    normed += not entry.shape.class_token
    assert layers - 4 * entry.shape.width * normed + products == source["multiply_adds"]
