"""ResNet against the numbers of a small torch twin with random weights and running statistics (float32, CPU)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.devices import run_python
from helpers.paths import PARITY
from helpers.twins import below, error, write_weights

from mlmoe_jax.models import rules
from mlmoe_jax.models.backbones.resnet import FROZEN_BATCH_NORM, ResNet, ResNetShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.contracts import Prompts
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.layers.batch_norm import BatchNorm
from mlmoe_jax.models.macs import count_macs
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.pretrained.rules.cnn import TORCHVISION_RESNET, conv_kernel

ARRAYS = dict(np.load(PARITY / "cnn_resnet.npz"))
SHAPE = ResNetShape((1, 2, 1, 1), stem=4)
TOLERANCE = 2e-5
GRIDS = {"64x64": (2, 2), "33x39": (2, 2), "45x66": (2, 3)}
NORMS = {f"bn{i}": f"norm{i}" for i in (1, 2, 3)} | {"downsample.1": "shortcut/norm"}
CONVS = {f"conv{i}": f"conv{i}" for i in (1, 2, 3)} | {"downsample.0": "shortcut/conv"}
LEAVES = {"running_mean": "mean", "running_var": "var", "bias": "bias"}


def network_input(image: np.ndarray) -> jax.Array:
    return jnp.asarray(image.astype(np.float32) / 127.5 - 1)


def our_path(name: str) -> str:
    """Return our path of the tensor `name` of torchvision, without the rule tables."""
    module, _, leaf = name.rpartition(".")
    if module in ("conv1", "bn1"):
        place, conv = ("stem/conv", True) if module == "conv1" else ("stem/norm", False)
    else:
        stage, block, layer = module.split(".", 2)
        conv = layer in CONVS
        place = f"stages/{int(stage[-1]) - 1}/{block}/{CONVS[layer] if conv else NORMS[layer]}"
    return f"{place}/{LEAVES.get(leaf, 'kernel' if conv else 'scale')}"


def stored(prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays below `prefix` under our paths, kernels in our order of axes."""
    tensors = below(ARRAYS, prefix).items()
    return {our_path(name): conv_kernel(value) if value.ndim == 4 else value for name, value in tensors}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The twin's weights in a file, under torchvision's names."""
    path = tmp_path_factory.mktemp("resnet") / "resnet.safetensors"
    return write_weights(path, ARRAYS)


@pytest.fixture(scope="module")
def make(weights):
    """A function that returns our ResNet with the weights of the twin."""

    def call(batch_norm: str = "frozen", **options) -> ResNet:
        made = nnx.eval_shape(lambda: ResNet(SHAPE, batch_norm=batch_norm, rngs=nnx.Rngs(0), **options))
        load_weights(made, weights, source=TORCHVISION_RESNET)
        return made

    return call


@pytest.fixture(autouse=True)
def _precise():
    with jax.default_matmul_precision("highest"):
        yield


def maps_and_features(module: ResNet, image: jax.Array):
    """Return the maps and the features of a module; compiled, with its values as arguments."""
    definition, params, stats = ModelDef.split(module)

    def forward(params, stats, image):
        merged = definition.merge(params, stats)
        return merged.maps(image), merged(image, read=("cls", "patches"))

    return jax.jit(forward)(params, stats, image)


# ------------------------------------------------------------------------------------------------------------ parity
@pytest.mark.parametrize("size", GRIDS)
def test_every_map_equals_torch(make, size):
    maps, features = maps_and_features(make(), network_input(ARRAYS[f"image/{size}"]))
    assert len(maps) == 5
    for index, ours in enumerate(maps):
        assert error(ours, ARRAYS[f"map{index}/{size}"]) < TOLERANCE, index
    last = ARRAYS[f"map4/{size}"]
    assert features.grid == last.shape[1:3] == GRIDS[size]
    assert error(features.patches, last.reshape(len(last), -1, SHAPE.width)) < TOLERANCE
    assert error(features.cls, ARRAYS[f"cls/{size}"]) < TOLERANCE
    assert features.prompts is None


def in_training(module: ResNet, *, train: bool = True):
    """Return (params, stats, compiled function of both and an image -> ((loss, (cls, stats)), gradients))."""
    definition, params, stats = ModelDef.split(module)

    def loss(params, stats, image):
        model = definition.merge(params, stats)
        if train:
            model.train()
        cls = model(image).cls
        return (cls * ARRAYS["train/target"]).sum(), (cls, definition.stats_of(model))

    return params, stats, jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_training_updates_the_statistics_as_torch_does(make, remat):
    params, stats, step = in_training(make("trainable", remat=remat))
    for index, batch in enumerate(ARRAYS["train/image"]):
        (_, (cls, stats)), gradient = step(params, stats, network_input(batch))
        assert error(cls, ARRAYS["train/cls"][index]) < TOLERANCE, index
        if index == 0:
            first = gradient
    after = stored("after/")
    assert set(after) == set(stats)
    for path, theirs in after.items():
        assert error(stats[path], theirs) < TOLERANCE, path
    for path, theirs in stored("gradient/train/").items():
        assert error(first[path], theirs) < 1e-4, path


def test_gradients_through_running_statistics_equal_torchs(make):
    reference, image = stored("gradient/eval/"), network_input(ARRAYS["train/image"][0])
    params, stats, step = in_training(make("running"))
    (_, (_, after)), running = step(params, stats, image)
    assert all(np.array_equal(after[path], stats[path]) for path in stats)
    params, stats, step = in_training(make("frozen"))
    (_, (_, after)), frozen = step(params, stats, image)
    assert all(np.array_equal(after[path], stats[path]) for path in stats)
    for path, theirs in reference.items():
        assert error(running[path], theirs) < TOLERANCE, path
    for path, gradient in frozen.items():
        if path.endswith("kernel"):
            np.testing.assert_allclose(gradient, running[path], rtol=1e-4, atol=1e-6 * np.abs(gradient).max())
        else:
            assert not np.any(gradient), path


def test_train_and_eval_switch_a_whole_model(make):
    model = Classifier(
        make("trainable"), None, LinearHead(SHAPE.width, 5, pool="both", rngs=nnx.Rngs(0)), final_norm=True
    )
    definition, params, stats = ModelDef.split(model)
    image = network_input(ARRAYS["train/image"][0])

    def passes(params, stats):
        model = definition.merge(params, stats)
        before = model(image).logits
        untouched = definition.stats_of(model)
        model.train()
        training = model(image).logits
        moved = definition.stats_of(model)
        model = definition.merge(params, stats)
        model.train()
        model.eval()
        return before, untouched, training, moved, model(image).logits

    before, untouched, training, moved, again = jax.jit(passes)(params, stats)
    assert all(np.array_equal(untouched[path], stats[path]) for path in stats)
    assert not any(np.array_equal(moved[path], stats[path]) for path in stats)
    assert np.abs(training - before).max() > 0.1
    np.testing.assert_allclose(before, again, rtol=1e-6, atol=1e-6)


def test_half_precision_is_used_for_products_and_not_for_parameters(make):
    module = make(dtype=jnp.bfloat16)
    assert all(value.dtype == jnp.float32 for value in ModelDef.split(module)[1].values())
    maps, features = maps_and_features(module, network_input(ARRAYS["image/64x64"]))
    assert {m.dtype for m in maps} == {jnp.dtype("bfloat16")}
    assert features.cls.dtype == jnp.float32
    assert 1e-4 < error(features.cls, ARRAYS["cls/64x64"]) < 0.05


# ------------------------------------------------------------------------------------------------------ architecture
def shapes_of(shape: ResNetShape) -> tuple[nnx.Module, dict[str, tuple[int, ...]]]:
    module = nnx.eval_shape(lambda: ResNet(shape, rngs=nnx.Rngs(0)))
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return module, {"/".join(map(str, path)): variable.shape for path, variable in state}


def size(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) for shape in shapes.values())


@pytest.mark.parametrize(("blocks", "count"), [((3, 4, 6, 3), 23_508_032), ((3, 4, 23, 3), 42_500_160)])
def test_parameter_counts(blocks, count):
    shape = ResNetShape(blocks)
    _, shapes = shapes_of(shape)
    assert size(shapes) == count
    assert (shape.width, shape.patch) == (2048, 32)
    # frozen in Q2L, and the convolutions that it trains
    first = {path: value for path, value in shapes.items() if path.startswith(("stem/", "stages/0/"))}
    assert size(first) == 225_344
    if blocks == (3, 4, 23, 3):
        rest = {path: value for path, value in shapes.items() if path.endswith("kernel") and path not in first}
        assert size(rest) == 42_172_416
        assert {"stem/conv/kernel", "stages/2/5/conv1/kernel", "stages/2/5/norm1/scale"} <= set(shapes)
        assert {"stages/3/0/shortcut/conv/kernel", "stages/2/22/norm3/bias"} <= set(shapes)


def test_the_rule_for_frozen_batch_norm_matches_exactly_its_parameters():
    _, shapes = shapes_of(ResNetShape((3, 4, 23, 3)))
    chosen = rules.assign((FROZEN_BATCH_NORM, (r"", True)), [f"backbone/{path}" for path in shapes])
    frozen = {path for path, learns in chosen.items() if not learns}
    assert frozen == {path for path in chosen if path.endswith(("/scale", "/bias"))}
    assert len(frozen) == 2 * 104
    assert rules.assign((FROZEN_BATCH_NORM, (r"", True)), ["backbone/blocks/3/norm1/scale", "head/norm/bias"]) == {
        "backbone/blocks/3/norm1/scale": True,
        "head/norm/bias": True,
    }


@pytest.mark.parametrize(("side", "count"), [(224, 7_799_357_440), (448, 31_197_429_760)])
def test_multiplications_of_resnet_101(side, count):
    graphdef, state = nnx.split(shapes_of(ResNetShape((3, 4, 23, 3)))[0])
    image = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda state, image: nnx.merge(graphdef, state)(image).cls)(state, image)
    assert count_macs(jaxpr.jaxpr) == count


def test_mistakes_are_refused(make):
    module, image = make(), jnp.zeros((1, 33, 39, 3))
    with pytest.raises(ValueError, match="takes no prompts"):
        module(image, Prompts(jnp.zeros((1, 1, 2, 4))))
    for read in (("cls", "prompts"), ("pixels",), ()):
        with pytest.raises(ValueError, match="has cls, patches and mean; cannot read"):
            module(image, read=read)
    norm = BatchNorm(4, mode="trainable")
    norm.train()
    with pytest.raises(ValueError, match="more than one value per channel"):
        norm(jnp.ones((1, 1, 1, 4)))


def test_features_that_are_not_read_are_none(make):
    module, image = make(), network_input(ARRAYS["image/33x39"])
    assert jax.eval_shape(module, image).patches is None
    assert jax.eval_shape(lambda x: module(x, read=("patches",)), image).cls is None


# ------------------------------------------------------------------------------------------------------------ others
DEVICES = """
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from mlmoe_jax.models.layers.batch_norm import BatchNorm
from mlmoe_jax.models.params import ModelDef

definition, params, stats = ModelDef.split(BatchNorm(3, mode="trainable"))
x = np.random.default_rng(0).normal(3, 2, (8, 2, 2, 3)).astype(np.float32) * np.arange(1, 9)[:, None, None, None]


def forward(x):
    norm = definition.merge(params, stats)
    norm.train()
    return norm(x), definition.stats_of(norm)


mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
assert mesh.size == 4
spread, moved = jax.jit(forward)(jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))))
np.testing.assert_allclose(spread, (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5), atol=1e-5)
np.testing.assert_allclose(moved["mean"], 0.1 * x.mean((0, 1, 2)), rtol=1e-5)
np.testing.assert_allclose(moved["var"], 0.9 + 0.1 * x.var((0, 1, 2), ddof=1), rtol=1e-5)
print("equal")
"""


def test_batch_statistics_are_of_the_global_batch():
    assert run_python(DEVICES, devices=4).strip() == "equal"
