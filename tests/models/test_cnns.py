"""ResNet, ConvNeXt and EfficientNet-Lite against small random torch twins, and the published weights of the last.

The numbers are from `tools/parity/cnn.py` and `efficientnet.py` (float32, CPU).
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.layouts import load_as
from helpers.paths import PARITY
from helpers.twins import below, error, write_weights
from sklearn.datasets import load_sample_image

from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.errors import UserError
from mlmoe_jax.models import rules
from mlmoe_jax.models.adapters.prompts import NoPrompts
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.convnext import ConvNeXtShape
from mlmoe_jax.models.backbones.efficientnet import EfficientNetLiteShape, _conv_norm
from mlmoe_jax.models.backbones.resnet import Bottleneck, ResNetShape
from mlmoe_jax.models.layers.batch_norm import BatchNorm, fold_batch_norms
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.load import apply_rules, load_weights, read_tensors
from mlmoe_jax.pretrained.locate import backbone_file
from mlmoe_jax.pretrained.rules.cnn_names import EFFICIENTNET, TORCHVISION_CONVNEXT, TORCHVISION_RESNET

TOLERANCE = 2e-5
SHAPES = {
    "resnet": ResNetShape((1, 2, 1, 1), stem=4),
    "convnext": ConvNeXtShape((1, 2, 1, 1), (8, 12, 16, 24)),
    "efficientnet": EfficientNetLiteShape((1, 2, 2, 1, 1, 1, 1), (16, 8, 8, 8, 16, 8, 16), stem=8, width=320),
}
SOURCES = {"resnet": TORCHVISION_RESNET, "convnext": TORCHVISION_CONVNEXT, "efficientnet": EFFICIENTNET}
FILES = {"resnet": "cnn_resnet", "convnext": "cnn_convnext", "efficientnet": "efficientnet"}
ARRAYS = {name: dict(np.load(PARITY / f"{file}.npz")) for name, file in FILES.items()}
GRIDS = {
    "resnet": {"64x64": (2, 2), "33x39": (2, 2), "45x66": (2, 3)},
    "convnext": {"64x64": (2, 2), "33x39": (1, 1), "45x66": (1, 2)},
    "efficientnet": {"33x39": (2, 2), "45x66": (2, 3)},
}
# Of the batch normalizations of a family: the rule that freezes them, and their number in the shape.
NORMS = {
    "resnet": (ResNetShape.batch_norm_rule, ResNetShape((1, 1, 11, 1)), 47),
    "efficientnet": (EfficientNetLiteShape.batch_norm_rule, SHAPES["efficientnet"], 28),
}


def network_input(name: str, image: np.ndarray) -> jax.Array:
    return jnp.asarray(
        (image.astype(np.float32) - 127) / 128 if name == "efficientnet" else image / np.float32(127.5) - 1
    )


def stored(name: str, prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays below `prefix` under our paths."""
    return apply_rules(Path(name), below(ARRAYS[name], prefix), SOURCES[name]).values


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function that returns a backbone with the weights of its twin."""
    folder = tmp_path_factory.mktemp("twins")

    def call(name: str, batch_norm: str = "frozen", **options) -> nnx.Module:
        path = folder / f"{name}.safetensors"
        if not path.exists():
            write_weights(path, ARRAYS[name])
        made = nnx.eval_shape(lambda: SHAPES[name].build(batch_norm=batch_norm, rngs=nnx.Rngs(0), **options))
        load_as(SOURCES[name], made, path)
        return made

    return call


@pytest.fixture(autouse=True)
def _precise():
    with jax.default_matmul_precision("highest"):
        yield


def outputs(module: nnx.Module, image: jax.Array, norms=(True,)):
    """Return features, for each of `norms` with or without the last norm, and maps if there are any."""
    definition, params, stats = ModelDef.split(module)

    @jax.jit
    def forward(params, stats, image):
        merged = definition.merge(params, stats)
        found = [merged(image, read=("cls", "patches"), norm=norm) for norm in norms]
        return *found, merged.maps(image) if hasattr(merged, "maps") else []

    return forward(params, stats, image)


# ------------------------------------------------------------------------------------------------------------ parity
@pytest.mark.variants(size=("33x39",))
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, grids in GRIDS.items() for size in grids])
def test_maps_and_features_equal_those_of_torch(make, name, size):
    module, arrays = make(name), ARRAYS[name]
    norms = (True, False) if name == "convnext" else (True,)
    normalized, *plain, maps = outputs(module, network_input(name, arrays[f"image/{size}"]), norms)
    assert len(maps) == (0 if name == "efficientnet" else 5)
    for index, ours in enumerate(maps):
        assert error(ours, arrays[f"map{index}/{size}"]) < TOLERANCE, index
    last = arrays[f"map/{size}" if name == "efficientnet" else f"map4/{size}"]
    cells = last.reshape(len(last), -1, SHAPES[name].width)
    assert normalized.grid == last.shape[1:3] == GRIDS[name][size]
    for features in plain:
        assert error(features.patches, cells) < TOLERANCE
        assert error(features.cls, last.mean((1, 2))) < TOLERANCE
    assert error(normalized.cls, arrays[f"cls/{size}"]) < TOLERANCE
    expected = module.norm(cells) if name == "convnext" else cells
    assert error(normalized.patches, expected) < TOLERANCE
    assert normalized.prompts is None


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_a_folded_backbone_computes_the_same_without_batch_norms(make, name):
    module = make(name)
    image = network_input(name, ARRAYS[name]["image/45x66"])
    expected, *_ = outputs(module, image)
    fold_batch_norms(module)
    assert not [path for path in ModelDef.split(module)[0].shapes() if "norm" in path]
    found, *_ = outputs(module, image)
    assert error(found.patches, expected.patches) < TOLERANCE
    assert error(found.cls, expected.cls) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("variant", [0, 1, 2])
def test_published_weights_give_the_references_logits_on_photographs(variant):
    name, photograph = f"efficientnet_lite{variant}", ("flower.jpg", "china.jpg", "flower.jpg")[variant]
    entry = catalog.entry(name)
    try:
        path = backbone_file(name)
    except UserError as missing:
        pytest.skip(str(missing))
    backbone = nnx.eval_shape(lambda: entry.shape.build(rngs=nnx.Rngs(0)))
    report = load_weights(backbone, path)
    left = {name for name in report.unused if not name.endswith("num_batches_tracked")}
    assert (left, report.missing) == ({"_fc.weight", "_fc.bias"}, ())
    side, pixels = entry.image_size, load_sample_image(photograph)
    top, start = ((size - side) // 2 for size in pixels.shape[:2])
    photograph = jnp.asarray(pixels[None, top : top + side, start : start + side])
    image = Preprocess(side, entry.mean, entry.std)(photograph)
    reference, tensors = below(ARRAYS["efficientnet"], f"lite{variant}/"), read_tensors(path)
    features, _ = outputs(backbone, image)
    logits = np.asarray(features.cls) @ tensors["_fc.weight"].T + tensors["_fc.bias"]
    assert error(features.cls, reference["cls"]) < TOLERANCE
    assert error(logits, reference["logits"]) < TOLERANCE
    if "map" in reference:
        assert error(features.patches, reference["map"].reshape(features.patches.shape)) < TOLERANCE


def in_training(name: str, module: nnx.Module, *, train: bool = True):
    """Return (params, stats, compiled function of both and an image -> ((loss, (cls, stats)), gradients))."""
    definition, params, stats = ModelDef.split(module)

    def loss(params, stats, image):
        model = definition.merge(params, stats)
        if train:
            model.train()
        cls = model(image).cls
        return (cls * ARRAYS[name]["train/target"]).sum(), (cls, definition.read_stats(model))

    return params, stats, jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.variants("name")
@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", NORMS)
def test_training_updates_the_statistics_as_torch_does(make, name, remat):
    params, stats, step = in_training(name, make(name, "trainable", remat=remat))
    for index, batch in enumerate(ARRAYS[name]["train/image"]):
        (_, (cls, stats)), gradient = step(params, stats, network_input(name, batch))
        assert error(cls, ARRAYS[name]["train/cls"][index]) < TOLERANCE, index
        if index == 0:
            first = gradient
    after = stored(name, "after/")
    assert set(after) == set(stats)
    for path, theirs in after.items():
        assert error(stats[path], theirs) < TOLERANCE, path
    for path, theirs in stored(name, "gradient/train/" if name == "resnet" else "gradient/").items():
        assert error(first[path], theirs) < 1e-4, path


def test_the_statistics_of_a_batch_are_exact_with_large_means_and_with_equal_values():
    x = np.random.default_rng(0).standard_normal((4, 6, 7, 3)) * [1, 1, 0] + [1e2, 1e4, 123456.7]
    x = x.astype(np.float32)
    norm = BatchNorm(3, mode="trainable")
    norm.train()
    y, exact = norm(x), x.astype(np.float64)
    expected = (exact - exact.mean((0, 1, 2))) / np.sqrt(exact.var((0, 1, 2)) + norm.epsilon)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * exact.var((0, 1, 2), ddof=1), rtol=1e-5)


@pytest.mark.slow
def test_gradients_through_running_statistics_equal_torchs(make):
    image, gradients = network_input("resnet", ARRAYS["resnet"]["train/image"][0]), {}
    for mode in ("running", "frozen"):
        params, stats, step = in_training("resnet", make("resnet", mode))
        (_, (_, after)), gradients[mode] = step(params, stats, image)
        assert all(np.array_equal(after[path], stats[path]) for path in stats)
    for path, theirs in stored("resnet", "gradient/eval/").items():
        assert error(gradients["running"][path], theirs) < TOLERANCE, path
    for path, gradient in gradients["frozen"].items():
        if path.endswith("kernel"):
            expected = gradients["running"][path]
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6 * np.abs(gradient).max())
        else:
            assert not np.any(gradient), path


def test_the_gradient_of_a_bottleneck_does_not_recompute_the_earlier_ones():
    def bytes_accessed(count):
        blocks = nnx.List(Bottleneck(16, 4, 1, dtype=None, batch_norm="frozen", rngs=nnx.Rngs(0)) for _ in range(count))
        graphdef, state = nnx.split(blocks)

        def loss(x):
            for block in nnx.merge(graphdef, state):
                x = block(x)
            return x.sum()

        return jax.jit(jax.grad(loss)).lower(jnp.ones((2, 16, 16, 16))).compile().cost_analysis()["bytes accessed"]

    # Recomputation makes it 2.3 times.
    assert bytes_accessed(4) < 2.2 * bytes_accessed(2)


def test_a_bottleneck_does_not_hide_nan():
    block = Bottleneck(16, 4, 1, dtype=None, batch_norm="frozen", rngs=nnx.Rngs(0))
    assert jnp.isnan(block(jnp.full((1, 2, 2, 16), jnp.nan))).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "convnext"])
def test_half_precision_is_used_for_products_and_not_for_parameters(make, name):
    module = make(name, dtype=jnp.bfloat16)
    assert all(value.dtype == jnp.float32 for value in ModelDef.split(module)[1].values())
    features, _ = outputs(module, network_input(name, ARRAYS[name]["image/64x64"]))
    assert features.cls.dtype == jnp.float32
    assert 1e-4 < error(features.cls, ARRAYS[name]["cls/64x64"]) < 0.05


# ------------------------------------------------------------------------------------------------------ architecture
# of every family
COUNTS = {
    "resnet50": 23_508_032,
    "resnet101": 42_500_160,
    "convnext_tiny": 27_820_128,
    "convnext_small": 49_454_688,
    "convnext_base": 87_566_464,
    "convnext_large": 196_230_336,
    # without the ImageNet classifier of 1,281,000
    "efficientnet_lite0": 3_371_008,
    "efficientnet_lite1": 4_135_680,
    "efficientnet_lite2": 4_811_072,
    "dinov2_vits14": 22_056_576,
    "dinov2_vitb14": 86_580_480,
    "dinov2_vitb14_reg": 86_580_480 + 4 * 768,
    "dinov2_vitl14": 304_368_640,
    "dinov2_vitg14": 1_136_480_768,
    "vit_b16_in21k": 85_798_656,
}


def parameters(shape) -> dict[str, jax.ShapeDtypeStruct]:
    return ModelDef.split(nnx.eval_shape(lambda: shape.build(rngs=nnx.Rngs(0))))[1]


@pytest.mark.variants(name=("resnet50", "resnet101", "efficientnet_lite0", "dinov2_vits14"))
@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    entry = catalog.entry(name)
    assert sum(value.size for value in parameters(entry.shape).values()) == COUNTS[name]
    assert entry.shape.patch == (16 if name.startswith("vit") else 14 if name.startswith("dino") else 32)
    if name.startswith("efficientnet"):
        count, macs = ARRAYS["efficientnet"][f"lite{name[-1]}/counts"].tolist()
        assert count == COUNTS[name]
        assert entry.shape.published_macs(entry.image_size, NoPrompts) == (
            macs,
            0,
            ((entry.image_size + 31) // 32) ** 2,
        )


@pytest.mark.parametrize("name", NORMS)
def test_the_rule_for_frozen_batch_norm_matches_exactly_its_parameters(name):
    rule, shape, count = NORMS[name]
    assert shape.frozen_rules("frozen") == (rule,)
    assert shape.frozen_rules("running") == shape.frozen_rules("trainable") == ()
    paths = [f"backbone/{path}" for path in parameters(shape)]
    others = ["backbone/blocks/3/norm1/scale", "head/norm/bias", "head/blocks/0/expand/norm/scale"]
    chosen = rules.assign((rule, (r"", True)), [*paths, *others])
    frozen = {path for path, learns in chosen.items() if not learns}
    assert frozen == {path for path in paths if path.endswith(("/scale", "/bias"))}
    assert len(frozen) == 2 * count


@pytest.mark.parametrize("mode", ["running", "trainable"])
def test_every_batch_normalization_is_of_the_requested_mode(mode):
    module = nnx.eval_shape(lambda: SHAPES["efficientnet"].build(batch_norm=mode, rngs=nnx.Rngs(0)))
    norms = [part for _, part in nnx.iter_modules(module) if isinstance(part, BatchNorm)]
    assert (len(norms), {norm.mode for norm in norms}) == (28, {mode})


@pytest.mark.parametrize(("depthwise", "fan"), [(True, 25), (False, 25 * 64)])
def test_random_kernels_of_efficientnet_have_the_authors_scale(depthwise, fan):
    options = {"dtype": None, "batch_norm": "frozen", "rngs": nnx.Rngs(0)}
    kernel = _conv_norm(64, 64, 5, depthwise=depthwise, **options).conv.kernel[...]
    assert float(kernel.std()) == pytest.approx((2 / fan) ** 0.5, rel=0.05)
