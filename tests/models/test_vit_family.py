"""The ViT family against its twins in PyTorch (tools/parity/vit.py), and the effects of its options."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.paths import PARITY
from helpers.twins import error, write_weights

from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.outputs import Prompts
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.load import load_weights
from tools.parity import vit as twins

TOLERANCE = 2e-5


def random_vit(shape: ViTShape, seed: int = 0, **options) -> ViT:
    """Return a ViT with random values, so that every parameter has an effect."""
    return drawn(lambda: ViT(shape, rngs=nnx.Rngs(0), **options), 0.2, seed, ones=True)


# ----------------------------------------------------------------------------------------------------------- twins
class Twin:
    def __init__(self, name: str, folder: Path):
        self.name, self.arrays = name, np.load(PARITY / f"vit_{name}.npz")
        file = write_weights(folder / f"{name}.safetensors", self.arrays)
        self.shape = ViTShape(**twins.SHAPES[name])
        self.vit = ViT(self.shape, rngs=nnx.Rngs(0))
        self.report = load_weights(self.vit, file)


@pytest.fixture(scope="module", params=twins.SHAPES)
def twin(request, tmp_path_factory):
    with jax.default_matmul_precision("highest"):
        yield Twin(request.param, tmp_path_factory.mktemp("twins"))


LAYOUTS = {
    **{name: f"hugging_face_{name}" for name in ("dinov2", "dinov3", "clip", "vit")},
    **{"siglip2": "hugging_face_siglip", "tipsv2": "timm"},
}
BESIDE = (
    *("pooler.", "decoder.", "text_model.", "logit_", "text_projection.", "visual_projection."),
    *("text_encoder.", "temperature"),
)


@pytest.mark.variants("twin")
def test_every_tensor_of_the_published_file_is_accounted_for(twin):
    assert twin.report.layout == LAYOUTS[twin.name.partition("_")[0]]
    assert twin.report.missing == ()
    assert all(name.startswith(BESIDE) for name in twin.report.unused)


@pytest.mark.variants("size")
@pytest.mark.parametrize("size", twins.SIZES, ids=str)
def test_equals_pytorch_block_by_block(twin, size):
    place = f"{size[1]}x{size[2]}"
    blocks, last = twin.arrays[f"{place}/blocks"], twin.arrays[f"{place}/last"]

    @jax.jit
    def run(image):
        tokens, grid = twin.vit.embed(image)
        after = [tokens]
        for block in twin.vit.blocks:
            after.append(block(after[-1], rotary=twin.vit.rotary(grid)))
        return after, [twin.vit(image, read=("cls", "patches"), norm=norm) for norm in (False, True)]

    after, ends = run(twins.image(*size))
    errors = [error(ours, theirs) for ours, theirs in zip(after, blocks, strict=True)]
    for features, reference in zip(ends, (blocks[-1], last), strict=True):
        assert features.grid == size[1:]
        assert features.patches.shape[1] == size[1] * size[2]
        errors.append(error(features.patches, reference[:, twin.shape.leading :]))
        cls = reference[:, 0] if twin.shape.class_token else twin.arrays[f"{place}/pooled"]
        errors.append(error(features.cls, cls))
    print(twin.name, place, " ".join(f"{value:.1e}" for value in errors))
    assert max(errors) < TOLERANCE


# ---------------------------------------------------------------------------------------------------------- options
TINY = ViTShape(width=16, depth=3, heads=2, patch=4, native=16, layer_scale=0.5)
REGISTERS = ViTShape(width=16, depth=3, heads=2, patch=4, native=16, layer_scale=0.5, registers=3)


@pytest.fixture(scope="module")
def image():
    return jax.random.normal(jax.random.key(0), (2, 16, 16, 3))


@pytest.fixture(scope="module")
def prompts():
    mask = np.eye(5, dtype=bool)
    return Prompts(jax.random.normal(jax.random.key(1), (3, 1, 5, 16)), mask)


def test_swiglu_by_hand():
    vit = random_vit(ViTShape(width=16, depth=1, heads=2, patch=4, native=16, mlp="swiglu"))
    mlp = vit.blocks[0].mlp
    assert mlp.fc1.kernel.shape == (16, 96)  # 64 · 2/3 = 42.7, up to 48, twice
    x = jax.random.normal(jax.random.key(2), (2, 5, 16))
    both = x @ mlp.fc1.kernel[...] + mlp.fc1.bias[...]
    hidden = both[..., :48] / (1 + jnp.exp(-both[..., :48])) * both[..., 48:]
    np.testing.assert_allclose(mlp(x), hidden @ mlp.fc2.kernel[...] + mlp.fc2.bias[...], atol=1e-5)


@pytest.mark.slow
def test_recomputing_blocks_changes_no_value(image, prompts):
    def run(remat):
        definition, params, _ = ModelDef.split(random_vit(REGISTERS, remat=remat))

        def loss(params, tokens):
            features = definition.merge(params)(image, Prompts(tokens, prompts.mask), read=("prompts", "cls"))
            return jnp.sum(features.prompts**2) + jnp.sum(features.cls**3)

        text = str(jax.make_jaxpr(jax.grad(loss, argnums=1))(params, prompts.tokens))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, prompts.tokens), text

    (value, gradients), text = run(remat=True)
    (expected, references), plain = run(remat=False)
    assert text.count("checkpoint[") + text.count("remat2[") >= 3 > plain.count("checkpoint[") + plain.count("remat2[")
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(references), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max() + 1e-12)


def test_recomputing_blocks_stores_fewer_values(image):
    """Counts the values stored for the backward pass, for 32 images with 17 tokens of width 16."""

    def kept(remat):
        definition, params, _ = ModelDef.split(random_vit(TINY, remat=remat))
        images = jax.ShapeDtypeStruct((32, 16, 16, 3), np.float32)
        residuals = jax.eval_shape(lambda x: jax.vjp(lambda x: definition.merge(params)(x).cls, x)[1], images)
        return sum(leaf.size for leaf in jax.tree.leaves(residuals))

    every_input, weights = 3 * 32 * 17 * 16, sum(x.size for x in ModelDef.split(random_vit(TINY))[1].values())
    assert kept(remat=True) < 1.1 * (every_input + weights) < 0.2 * kept(remat=False)


@pytest.mark.slow
def test_kernels_stored_in_bfloat16_equal_cast_kernels(image, prompts):
    definition, params, _ = ModelDef.split(random_vit(REGISTERS, dtype=jnp.bfloat16))
    stored = {path: x.astype(jnp.bfloat16) if path.endswith("/kernel") else x for path, x in params.items()}
    outputs = [definition.merge(values)(image, prompts, read=("cls",)).cls for values in (params, stored)]
    np.testing.assert_array_equal(*outputs)
    definition, _, _ = ModelDef.split(random_vit(REGISTERS))
    rounded = {path: x.astype(np.float32) for path, x in stored.items()}
    outputs = [definition.merge(values)(image, prompts, read=("cls",)).cls for values in (rounded, stored)]
    assert outputs[1].dtype == np.float32
    np.testing.assert_allclose(*outputs, atol=1e-6)


@pytest.mark.slow
def test_a_table_may_be_smaller_or_larger_than_the_image():
    vit = random_vit(REGISTERS)
    for rows, columns in ((4, 4), (1, 3), (8, 5)):
        image = jax.ShapeDtypeStruct((1, 4 * rows, 4 * columns, 3), np.float32)
        features = jax.eval_shape(lambda x: vit(x, read=("patches",)), image)
        assert features.grid == (rows, columns)
        assert features.patches.shape == (1, rows * columns, 16)
