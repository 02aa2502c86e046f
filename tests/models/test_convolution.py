"""Convolutions, max pooling and their gradients, against XLA's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from mlmoe_jax.models.layers.conv.depthwise import convolve_depthwise
from mlmoe_jax.models.layers.conv.maps import Convolution
from mlmoe_jax.models.layers.dispatch import convolve, dot_general, max_pool
from mlmoe_jax.models.macs import count_macs

ONE = {"lhs_dilation": (1, 1), "rhs_dilation": (1, 1)}
LAYOUT = {**ONE, "dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 4}


def drawn(size, height, width, dtype=np.float32):
    draw = np.random.default_rng(size)
    return draw.normal(size=(2, height, width, 4)).astype(dtype), draw.normal(size=(size, size, 1, 4)).astype(dtype)


def assert_general(x, kernel, stride, padding, layout):
    """Assert that outputs and gradients are those of XLA's convolution."""

    @partial(jax.jit, static_argnums=0)
    def run(form, x, kernel):
        values, back = jax.vjp(lambda x, kernel: form(x, kernel, (stride, stride), padding, **layout), x, kernel)
        return values, *back(np.random.default_rng(0).normal(size=values.shape).astype(np.float32))

    (theirs, *their_slopes), (ours, *our_slopes) = (run(f, x, kernel) for f in (lax.conv_general_dilated, convolve))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for ours, theirs in zip(our_slopes, their_slopes, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.variants(size=(3, 5), stride=(2,))
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [(7, 7), (8, 5), (3, 70), (14, 20)])
def test_a_depthwise_one_equals_the_grouped_convolution_and_so_do_its_gradients(size, stride, side):
    assert_general(*drawn(size, *side), stride, "SAME", LAYOUT)


@pytest.mark.parametrize("padding", ["VALID", ((2, 0), (1, 3))])
@pytest.mark.parametrize("side", [(7, 9), (8, 6), (7, 70)])
@pytest.mark.parametrize("stride", [1, 2])
def test_so_do_those_of_other_paddings_on_odd_and_even_sides(stride, side, padding):
    assert_general(*drawn(3, *side), stride, padding, LAYOUT)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("size", "padding"),
    [(1, "SAME"), (1, "VALID"), (1, ((0, 0), (0, 0))), (1, ((1, 1), (1, 1))), (3, ((1, 1), (1, 1))), (7, "SAME")],
)
def test_a_dense_one_equals_the_general_convolution_and_so_do_its_gradients(stride, size, padding):
    draw = np.random.default_rng(stride)
    x = draw.normal(size=(2, 7, 4, 6)).astype(np.float32)
    kernel = draw.normal(size=(size, size, 6, 5)).astype(np.float32)
    assert_general(x, kernel, stride, padding, {**LAYOUT, "feature_group_count": 1})


@pytest.mark.parametrize(("size", "groups"), [(1, 1), (3, 1), (3, 4)])
def test_rows_and_columns_have_their_own_strides(size, groups):
    draw = np.random.default_rng(size)
    x = draw.normal(size=(2, 9, 8, 4)).astype(np.float32)
    kernel = draw.normal(size=(size, size, 4 // groups, 4)).astype(np.float32)

    def run(form):
        return form(x, kernel, (1, 2), "SAME", **{**LAYOUT, "feature_group_count": groups})

    np.testing.assert_allclose(run(convolve), run(lax.conv_general_dilated), atol=1e-5)


@pytest.mark.parametrize("widths", [(5, 6), (6, 5)])
def test_a_matmul_of_a_map_equals_the_general_one_and_so_do_its_gradients(widths):
    draw = np.random.default_rng(0)
    x, kernel, slope = (
        draw.normal(size=size).astype(np.float32) for size in ((2, 3, 4, widths[0]), widths, (2, 3, 4, widths[1]))
    )

    def run(form, x, kernel):
        values, back = jax.vjp(lambda x, kernel: form(x, kernel, (((3,), (0,)), ((), ()))), x, kernel)
        return values, *back(slope)

    for ours, theirs in zip(run(dot_general, x, kernel), run(lax.dot_general, x, kernel), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    with jax.default_device("cpu"):
        program = jax.jit(partial(run, dot_general)).lower(x, kernel)
    assert f"tensor<24x{widths[0]}xf32>" in program.as_text()  # not transposed
    # The gradient by the kernel is computed with more columns than rows.
    assert "f32[5,6]{1,0} dot(" in program.compile().as_text()


def test_narrow_numbers_are_summed_in_float32():
    x, kernel = drawn(5, 6, 6)
    how = Convolution(pads=((2, 2), (2, 2)))
    narrow = convolve_depthwise(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), how)
    assert narrow.dtype == jnp.bfloat16
    wide = (v.astype(jnp.bfloat16).astype(np.float32) for v in (x, kernel))
    exact = convolve_depthwise(*wide, how)
    np.testing.assert_array_equal(narrow, exact.astype(jnp.bfloat16))


def test_its_multiply_adds_are_those_of_the_convolution():
    x, kernel = drawn(3, 8, 8)
    traced = jax.make_jaxpr(lambda x, k: convolve(x, k, (2, 2), "SAME", **LAYOUT))(x, kernel)
    assert count_macs(traced.jaxpr) == 2 * 4 * 4 * 4 * 9


@pytest.mark.parametrize(("side", "channels"), [(11, 192), (32, 192)])
def test_what_the_gradient_reads_is_not_kept_from_the_forward_pass(side, channels):
    x, kernel = jnp.ones((2, side, side, channels)), jnp.ones((3, 3, channels, channels))
    layout = {**LAYOUT, "feature_group_count": 1}

    def loss(x, kernel, form):
        for _ in range(8):
            x = jax.nn.relu(form(x, kernel, (1, 1), "SAME", **layout))
        return x.sum()

    def temporaries(form):
        step = jax.jit(jax.grad(lambda kernel: loss(x, kernel, form)))
        return step.lower(kernel).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(convolve) < 1.5 * temporaries(lax.conv_general_dilated)


@pytest.mark.parametrize("shape", [((3, 3), (2, 2), ((1, 1), (1, 1))), ((2, 3), (1, 2), ((0, 0), (1, 0)))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_max_pooling_goes_to_the_first_of_equal_values(shape, dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 3, (2, 9, 8, 4)), dtype)

    @partial(jax.jit, static_argnums=0)
    def run(form, x):
        values, back = jax.vjp(lambda x: form(x, *shape), x)
        return values, *back(jnp.arange(values.size, dtype=dtype).reshape(values.shape))

    for ours, theirs in zip(run(max_pool, x), run(nnx.max_pool, x), strict=True):
        np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=1e-2 if dtype == "bfloat16" else 1e-6)
