"""Which implementation computes an operation: each row of the table, `model.kernels`, and the programs that follow."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny
from helpers.bench import drawn_model
from helpers.programs import equations
from jax.sharding import Mesh, PartitionSpec

from mlmoe_jax import load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.layers import dispatch, softmax_attention
from mlmoe_jax.models.layers.conv.maps import Convolution
from mlmoe_jax.models.layers.conv.winograd import LARGE_TILES, SMALL_TILES
from mlmoe_jax.models.layers.dispatch import (
    CHANNELS,
    TABLE,
    attend,
    choose,
    convolve,
    dot_general,
    max_pool,
    rectify,
    sum_of_squares,
    use_kernels,
)
from mlmoe_jax.models.layers.recompute import LayerNorm

LAYOUT = {"lhs_dilation": (1, 1), "rhs_dilation": (1, 1), "dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def chosen(*arrays, **settings):
    """Return the cases of the rows that are chosen, by platform."""
    return {platform: row.case for platform, row in choose(*arrays, **settings).items()}


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


# ----------------------------------------------------------------------------------------------------------- the rows
@pytest.mark.parametrize(
    ("side", "channels", "size", "how", "dtype", "case"),
    [
        (28, CHANNELS, 3, Convolution(groups=CHANNELS), jnp.float32, "depthwise"),
        (28, CHANNELS, 1, Convolution(groups=CHANNELS), jnp.float32, "depthwise"),
        (28, CHANNELS, 3, Convolution(groups=2), jnp.float32, None),
        (28, CHANNELS, 1, Convolution(strides=(2, 2)), jnp.bfloat16, "pointwise"),
        (28, CHANNELS, 1, Convolution(pads=((1, 1), (1, 1))), jnp.float32, "dense"),
        (28, CHANNELS, 1, Convolution(groups=2), jnp.float32, None),
        (20, CHANNELS, 3, Convolution(), jnp.float32, "large-tiles"),
        (19, CHANNELS, 3, Convolution(), jnp.float32, "small-tiles"),
        (12, CHANNELS, 3, Convolution(), jnp.float32, "small-tiles"),
        (11, CHANNELS, 3, Convolution(), jnp.float32, "dense"),
        (28, CHANNELS - 1, 3, Convolution(), jnp.float32, "dense"),
        (28, CHANNELS, 3, Convolution(strides=(2, 2)), jnp.float32, "dense"),
        (28, CHANNELS, 5, Convolution(), jnp.float32, "dense"),
        (28, CHANNELS, 3, Convolution(), jnp.bfloat16, "dense"),
    ],
)
def test_a_convolution_is_computed_by_the_first_row_that_fits(side, channels, size, how, dtype, case):
    kernel = shape(size, size, channels // how.groups, channels, dtype=dtype)
    found = chosen("convolve", shape(2, side, side, channels, dtype=dtype), kernel, how=how)
    assert found == ({"cpu": case} if case else {})


@pytest.mark.parametrize("channels", [(CHANNELS - 1, CHANNELS), (CHANNELS, CHANNELS - 1)])
def test_few_channels_before_or_after_a_convolution_have_no_tiles(channels):
    kernel = shape(3, 3, *channels)
    assert chosen("convolve", shape(2, 28, 28, channels[0]), kernel, how=Convolution()) == {"cpu": "dense"}


def test_the_other_operations_are_computed_by_their_rows(monkeypatch):
    parts = [shape(2, 5, 3, 8)] * 3
    assert chosen("dot_general", shape(2, 3, 4, 5), shape(5, 6), precision=None) == {"cpu": "matmul"}
    expected = {"cpu": "pooling", "cuda": "pooling"}
    assert chosen("max_pool", shape(1, 9, 8, 4), window_shape=(3, 3)) == expected
    assert choose("attend", *parts, mask=None)["default"].run is softmax_attention.attend_by_matmuls
    assert chosen("rectify", shape(3)) == {"default": "rectify"}
    assert chosen("sum_of_squares", shape(3, 4)) == {}
    assert chosen("sum_of_squares", shape(3, 4, 5)) == {"cpu": "squares"}
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert chosen("sum_of_squares", shape(3, 4, 5)) == {}
    assert {row.operation for row in TABLE} <= set(vars(dispatch))


def test_a_row_for_every_platform_hides_later_rows(monkeypatch):
    platforms = {"first": ("cuda",), "second": ("cuda", "tpu"), "third": dispatch.EVERY, "fourth": dispatch.CPU}
    rows = [dispatch.Kernel("twice", names, jnp.sin, case) for case, names in platforms.items()]
    monkeypatch.setattr(dispatch, "TABLE", rows)
    assert chosen("twice", shape(1)) == {"default": "third", "cuda": "first", "tpu": "second"}
    assert chosen("another", shape(1)) == {}


def test_the_tiles_are_those_of_their_rows():
    runs = {row.case: getattr(row.run, "keywords", {}) for row in TABLE}
    assert runs["large-tiles"] == {"transforms": LARGE_TILES}
    assert runs["small-tiles"] == {"transforms": SMALL_TILES}


# ------------------------------------------------------------------------------------------------------- the platforms
@pytest.mark.parametrize(("platform", "own"), [("cpu", True), ("cuda", True), ("tpu", False)])
def test_max_pooling_has_its_own_gradient_where_it_is_faster(platform, own):
    gradient = jax.jit(jax.grad(lambda x: max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))).sum()))
    program = gradient.trace(jnp.ones((1, 9, 8, 4))).lower(lowering_platforms=(platform,)).as_text()
    assert ("select_and_scatter" in program) != own


@pytest.mark.parametrize(("platform", "own"), [("cpu", True), ("cuda", False), ("tpu", False)])
def test_a_convolution_is_xlas_own_except_on_a_cpu(platform, own):
    x, kernel = jnp.ones((1, 8, 8, 4)), jnp.ones((3, 3, 1, 4))
    program = jax.jit(lambda x, kernel: convolve(x, kernel, (1, 1), "SAME", feature_group_count=4, **LAYOUT))
    text = program.trace(x, kernel).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.convolution" in text) != own


def test_a_convolution_of_some_groups_is_the_general_one():
    x, kernel = np.ones((1, 6, 6, 4), np.float32), np.ones((3, 3, 2, 4), np.float32)
    traced = jax.make_jaxpr(lambda x, k: convolve(x, k, (1, 1), "SAME", feature_group_count=2, **LAYOUT))(x, kernel)
    assert [equation.primitive.name for equation in traced.eqns] == ["conv_general_dilated"]


@pytest.mark.variants("numbers")
@pytest.mark.parametrize(
    ("capability", "width", "dtype", "mask", "own"),
    [
        ((8, 0), 64, jnp.bfloat16, None, True),
        ((9, 0), 128, jnp.float16, None, True),
        ((9, 0), 64, jnp.float32, None, False),
        ((9, 0), 64, jnp.bfloat16, np.ones((5, 7), bool), False),
        ((9, 0), 12, jnp.bfloat16, None, False),
        ((9, 0), 136, jnp.bfloat16, None, False),
        ((7, 5), 64, jnp.bfloat16, None, False),
        ((), 64, jnp.bfloat16, None, False),
    ],
)
@pytest.mark.parametrize("numbers", [(5, 7), (6, 8)], ids=["odd", "even"])
def test_cudnn_is_called_where_it_applies(monkeypatch, capability, width, dtype, mask, own, numbers):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(dispatch, "compute_capability", lambda: capability)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)  # JAX asks the library while it traces
    mask = None if mask is None else np.ones(numbers, bool)
    parts = [jnp.ones((2, number, 3, width), dtype) for number in (*numbers, numbers[1])]
    step = jax.jit(jax.grad(lambda *parts: attend(*parts, mask).sum().astype(jnp.float32), argnums=(0, 1, 2)))
    text = step.trace(*parts).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("):
        assert (name in text) is own
    if own:
        assert ("PADDING" in text) is (numbers == (5, 7))
        with use_kernels("xla"):
            assert "__cudnn" not in step.trace(*parts).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("count", [287, 1055, 288])
def test_a_token_is_missing_only_for_cudnn(monkeypatch, count):
    assert dispatch.missing_tokens(count, 64, jnp.bfloat16) == 0
    monkeypatch.setattr(dispatch, "compute_capability", lambda: (9, 0))
    assert dispatch.missing_tokens(count, 64, jnp.bfloat16) == count % 2
    assert dispatch.missing_tokens(count, 64, jnp.float32) == 0
    with use_kernels("xla"):
        assert dispatch.missing_tokens(count, 64, jnp.bfloat16) == 0


def test_compute_capability(monkeypatch):
    assert dispatch.compute_capability() == ()

    class Gpu:
        platform, compute_capability = "gpu", "9.0"

    monkeypatch.setattr(jax, "devices", lambda *_: [Gpu])
    assert dispatch.compute_capability() == (9, 0)
    Gpu.compute_capability = "gfx942"
    assert dispatch.compute_capability() == ()
    with jax.default_device("cpu"):
        Gpu.platform = "cpu"
        assert dispatch.compute_capability() == ()


# ------------------------------------------------------------------------------------------------------- model.kernels
def model_of(backbone, kernels, **keys):
    config = load_config("linear_probe", {"model.backbone.name": backbone, "model.kernels": kernels, **keys})
    return nnx.split(drawn_model(config, synthetic_label_space(4, 2), scale=0.1))


@pytest.fixture
def tiny_models(monkeypatch):
    tiny.use(monkeypatch)


@pytest.mark.usefixtures("tiny_models")
@pytest.mark.variants("remat")
@pytest.mark.parametrize(
    ("backbone", "expected"), [("resnet101", {"platform_index", "rectify_by_result"}), ("vit_digits", {"_attend"})]
)
@pytest.mark.parametrize("remat", [True, False])
def test_two_models_in_one_process_compute_by_their_own_kernels(backbone, expected, remat):
    image = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    def logits_and_gradient(structure, state):
        def loss(state):
            logits = nnx.merge(structure, state)(image).logits
            return logits.sum(), logits

        gradient, logits = jax.grad(loss, has_aux=True, allow_int=True)(state)
        return logits, gradient

    results, programs = {}, {}
    for kernels in ("auto", "xla", "auto", "xla"):  # the second round takes programs from the cache
        structure, state = model_of(backbone, kernels, **{"model.remat": remat})
        results.setdefault(kernels, []).append(logits_and_gradient(structure, state))
        programs[kernels] = logits_and_gradient.trace(structure, state)
        forward = jax.make_jaxpr(lambda state: nnx.merge(structure, state)(image).logits)(state)  # noqa: B023
        assert own_operations(forward) == (expected if kernels == "auto" else set())
    texts = {kernels: traced.lower(lowering_platforms=("cpu",)).as_text() for kernels, traced in programs.items()}
    own, theirs = (texts[kernels].count("stablehlo.convolution(") for kernels in ("auto", "xla"))
    assert theirs > own or backbone == "vit_digits"
    assert "select_and_scatter" not in texts["auto"]
    assert ("select_and_scatter" in texts["xla"]) is (backbone == "resnet101")
    for first, second in results.values():
        jax.tree.map(np.testing.assert_array_equal, first, second)
    for ours, theirs in zip(*map(jax.tree.leaves, (results["auto"][0], results["xla"][0])), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(np.abs(theirs).max(), 1e-3))


def own_operations(program) -> set[str]:
    """Return what a program has of the table: choices between platforms, and functions with gradients of their own."""
    every = [*equations(program.jaxpr)]
    calls = [equation.params for equation in every if equation.primitive.name == "custom_vjp_call"]
    functions = {parameters["call_jaxpr"].jaxpr.debug_info.func_name for parameters in calls}
    return {equation.primitive.name for equation in every} & {"platform_index"} | functions & {
        "_attend",
        "rectify_by_result",
    }


def test_the_value_is_a_part_of_the_key_of_a_compiled_function():
    pool = jax.jit(lambda x: max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))))
    x = jnp.ones((1, 9, 8, 4))
    found = []
    for kernels in ("auto", "xla", "auto"):
        with use_kernels(kernels):
            pool(x)
            found.append(len(choose("max_pool", x)))
    assert found == [2, 0, 2]
    assert pool._cache_size() == 2
    assert use_kernels.value == "auto"


@pytest.mark.parametrize(
    "mask", [None, np.tril(np.ones((5, 7), bool)), np.ones((2, 1, 1, 7), bool)], ids=["all", "of queries", "of texts"]
)
def test_attention_by_xla_takes_every_mask(mask):
    query, key, value = (jax.random.normal(jax.random.key(n), (2, n, 3, 8)) for n in (5, 7, 7))
    with use_kernels("xla"):
        theirs = attend(query[:1], key, value, mask)
    np.testing.assert_allclose(attend(query[:1], key, value, mask), theirs, atol=2e-6)


# --------------------------------------------------------------------------------------------------------- shard_map
def drawn(*sizes: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=sizes).astype(np.float32)


def convolved(groups: int = 1):
    return lambda x, kernel: convolve(x, kernel, (1, 1), "SAME", feature_group_count=groups, **LAYOUT)


# operation -> a function of maps, of which each device has some, and of an array that all devices have, and both
SHARED_BY_DEVICES = {
    "depthwise": (convolved(groups=4), drawn(2, 9, 7, 4), drawn(3, 3, 1, 4)),
    "pointwise": (convolved(), drawn(2, 9, 7, 4), drawn(1, 1, 4, 6)),
    "dense": (convolved(), drawn(2, 9, 7, 4), drawn(3, 3, 4, 6)),
    "tiles": (convolved(), drawn(2, 12, 12, CHANNELS), drawn(3, 3, CHANNELS, CHANNELS) / CHANNELS),
    "matmul": (lambda x, w: dot_general(x, w, (((3,), (0,)), ((), ()))), drawn(2, 3, 3, 4), drawn(4, 6)),
    "pooling": (lambda x, w: max_pool(w * x, (3, 3), (2, 2), ((1, 1), (1, 1))), drawn(2, 9, 7, 4), drawn(4)),
    "attention": (lambda x, w: attend(w * x, w * x, x), drawn(2, 9, 3, 8), drawn(8)),
    "rectify": (lambda x, w: rectify(w * x), drawn(2, 9, 7, 4), drawn(4)),
    "squares": (lambda x, w: sum_of_squares(w * x)[None], drawn(2, 9, 7, 4), drawn(4)),
    "norm": (lambda x, w: LayerNorm(4, rngs=nnx.Rngs(0))(w * x), drawn(2, 9, 4), drawn(4)),
}


@pytest.mark.parametrize("name", SHARED_BY_DEVICES)
def test_gradients_pass_the_default_checks_of_shard_map(name):
    operation, x, shared = SHARED_BY_DEVICES[name]

    def gradients(x, shared):
        return jax.grad(lambda x, shared: jnp.sum(jnp.sin(operation(x, shared))), argnums=(0, 1))(x, shared)

    mesh, by_images = Mesh(jax.devices()[:1], ("data",)), PartitionSpec("data")
    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(by_images, PartitionSpec()), out_specs=(by_images, PartitionSpec())
    )
    for ours, theirs in zip(jax.jit(mapped)(x, shared), jax.jit(gradients)(x, shared), strict=True):
        np.testing.assert_array_equal(ours, theirs)
