"""ConvNeXt against the numbers of a small torch twin with random weights (float32, CPU)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY
from helpers.twins import error, write_weights

from mlmoe_jax.models.backbones.convnext import ConvNeXt, ConvNeXtShape
from mlmoe_jax.models.contracts import Prompts
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.pretrained.rules.cnn import TORCHVISION_CONVNEXT

ARRAYS = dict(np.load(PARITY / "cnn_convnext.npz"))
SHAPE = ConvNeXtShape((1, 2, 1, 1), (8, 12, 16, 24))
TOLERANCE = 2e-5
GRIDS = {"64x64": (2, 2), "33x39": (1, 1), "45x66": (1, 2)}


def network_input(image: np.ndarray) -> jax.Array:
    return jnp.asarray(image.astype(np.float32) / 127.5 - 1)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function that returns our ConvNeXt with the weights of the twin."""
    path = tmp_path_factory.mktemp("convnext") / "convnext.safetensors"
    write_weights(path, ARRAYS)

    def call(**options) -> ConvNeXt:
        made = nnx.eval_shape(lambda: ConvNeXt(SHAPE, rngs=nnx.Rngs(0), **options))
        load_weights(made, path, source=TORCHVISION_CONVNEXT)
        return made

    return call


@pytest.fixture(autouse=True)
def _precise():
    with jax.default_matmul_precision("highest"):
        yield


def maps_and_features(module: ConvNeXt, image: jax.Array):
    """Return the maps and the features of a module, with and without norm; compiled, with its values as arguments."""
    definition, params, stats = ModelDef.split(module)
    assert stats == {}

    def forward(params, image):
        merged = definition.merge(params)
        read = ("cls", "patches")
        return merged.maps(image), merged(image, read=read), merged(image, read=read, norm=False)

    return jax.jit(forward)(params, image)


def layer_norm(module: ConvNeXt, x: np.ndarray) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * np.asarray(module.norm.scale[...]) + np.asarray(module.norm.bias[...])


@pytest.mark.parametrize("size", GRIDS)
def test_every_map_equals_torch(make, size):
    module = make()
    maps, normalized, plain = maps_and_features(module, network_input(ARRAYS[f"image/{size}"]))
    assert len(maps) == 5
    for index, ours in enumerate(maps):
        assert error(ours, ARRAYS[f"map{index}/{size}"]) < TOLERANCE, index
    last = ARRAYS[f"map4/{size}"]
    assert normalized.grid == plain.grid == last.shape[1:3] == GRIDS[size]
    assert error(normalized.cls, ARRAYS[f"cls/{size}"]) < TOLERANCE
    assert error(plain.cls, last.mean((1, 2))) < TOLERANCE
    cells = last.reshape(len(last), -1, SHAPE.width)
    assert error(plain.patches, cells) < TOLERANCE
    assert error(normalized.patches, layer_norm(module, cells)) < TOLERANCE


@pytest.mark.slow
def test_gradients_are_the_same_with_remat():
    image = jax.random.normal(jax.random.key(0), (2, 16, 17, 3))

    def gradient(remat):
        shape = ConvNeXtShape((1, 1), (4, 8), layer_scale=0.5)
        definition, params, _ = ModelDef.split(ConvNeXt(shape, remat=remat, rngs=nnx.Rngs(0)))
        return jax.jit(jax.grad(lambda p: (definition.merge(p)(image).cls ** 3).sum()))(params)

    kept, recomputed = gradient(False), gradient(True)
    for path, value in kept.items():
        assert np.abs(value).max() > 0, path
        np.testing.assert_allclose(recomputed[path], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=path)


def test_half_precision_is_used_for_products_and_not_for_parameters(make):
    module = make(dtype=jnp.bfloat16)
    assert all(value.dtype == jnp.float32 for value in ModelDef.split(module)[1].values())
    _, features, _ = maps_and_features(module, network_input(ARRAYS["image/64x64"]))
    assert features.cls.dtype == jnp.float32
    assert 1e-4 < error(features.cls, ARRAYS["cls/64x64"]) < 0.05


T, S = (3, 3, 9, 3), (3, 3, 27, 3)


@pytest.mark.parametrize(
    ("blocks", "first", "count"),
    [
        pytest.param(T, 96, 27_820_128, id="tiny"),
        pytest.param(S, 96, 49_454_688, id="small", marks=pytest.mark.slow),
        pytest.param(S, 128, 87_566_464, id="base", marks=pytest.mark.slow),
        pytest.param(S, 192, 196_230_336, id="large"),
    ],
)
def test_parameter_counts(blocks, first, count):
    shape = ConvNeXtShape(blocks, tuple(first * 2**i for i in range(4)))
    module = nnx.eval_shape(lambda: ConvNeXt(shape, rngs=nnx.Rngs(0)))
    state = {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(module))}
    assert sum(variable.size for variable in state.values()) == count
    assert (shape.width, shape.patch) == (8 * first, 32)
    assert {"stem/conv/kernel", "stages/2/blocks/5/depthwise/kernel", "stages/1/downsample/norm/scale"} <= set(state)


def test_mistakes_are_refused(make):
    module, image = make(), jnp.zeros((1, 33, 39, 3))
    with pytest.raises(ValueError, match="takes no prompts"):
        module(image, Prompts(jnp.zeros((1, 1, 2, 4))))
    with pytest.raises(ValueError, match="images of 33×31 pixels are smaller than the stride 32"):
        module(image[:, :, :31])
