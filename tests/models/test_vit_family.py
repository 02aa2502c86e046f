"""The ViT family against its twins in PyTorch (tools/parity/vit.py), and the effects of its options."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.paths import PARITY
from helpers.twins import error, write_weights

from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.load import load_weights
from tools.parity import vit as twins

TOLERANCE = 2e-5
ONE_OF_EACH = ("dinov2_registers", "dinov2_giant", "dinov3_plus", "siglip2", "clip", "vit_mae", "tipsv2_giant")


# ----------------------------------------------------------------------------------------------------------- twins
class Twin:
    def __init__(self, name: str, folder: Path):
        self.name, self.arrays = name, np.load(PARITY / f"vit_{name}.npz")
        file = write_weights(folder / f"{name}.safetensors", self.arrays)
        self.shape = ViTShape(**twins.SHAPES[name])
        self.vit = nnx.eval_shape(lambda: ViT(self.shape, rngs=nnx.Rngs(0)))
        self.report = load_weights(self.vit, file)


@pytest.fixture(scope="module", params=twins.SHAPES)
def twin(request, tmp_path_factory):
    with jax.default_matmul_precision("highest"):
        yield Twin(request.param, tmp_path_factory.mktemp("twins"))


LAYOUTS = {
    **{name: f"hugging_face_{name}" for name in ("dinov3", "clip", "vit")},
    "dinov2": "hugging_face_vit",
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


@pytest.mark.variants("size", twin=ONE_OF_EACH)
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
        return after, twin.vit(image, read=("cls", "patches"))

    after, features = run(twins.image(*size))
    for ours, theirs in zip(after, blocks, strict=True):
        assert error(ours, theirs) < TOLERANCE
    assert features.grid == size[1:]
    assert error(features.patches, last[:, twin.shape.leading :]) < TOLERANCE
    cls = last[:, 0] if twin.shape.class_token else twin.arrays[f"{place}/pooled"]
    assert error(features.cls, cls) < TOLERANCE


# ---------------------------------------------------------------------------------------------------------- options
TINY = ViTShape(width=16, depth=3, heads=2, patch=4, native=16, layer_scale=0.5)


def tiny_vit(**options) -> ViT:
    """Return a ViT with random values, so that every parameter has an effect."""
    return drawn(lambda: ViT(TINY, rngs=nnx.Rngs(0), **options), 0.2, ones=True)


def test_recomputing_blocks_stores_fewer_values():
    """Counts the values stored for the backward pass, for 32 images with 17 tokens of width 16."""

    def kept(remat):
        definition, params, _ = ModelDef.split(tiny_vit(remat=remat))
        images = jax.ShapeDtypeStruct((32, 16, 16, 3), np.float32)
        residuals = jax.eval_shape(lambda x: jax.vjp(lambda x: definition.merge(params)(x).cls, x)[1], images)
        return sum(leaf.size for leaf in jax.tree.leaves(residuals))

    every_input, weights = 3 * 32 * 17 * 16, sum(x.size for x in ModelDef.split(tiny_vit())[1].values())
    assert kept(remat=True) < 1.1 * (every_input + weights) < 0.2 * kept(remat=False)
