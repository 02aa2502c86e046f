"""Winograd's convolution and its gradients, against XLA's in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mlmoe_jax.models.layers.conv.maps import Convolution
from mlmoe_jax.models.layers.conv.winograd import LARGE_TILES, SMALL_TILES, convolve_tiles
from mlmoe_jax.models.layers.dispatch import CHANNELS, convolve

LAYOUT = ("NHWC", "HWIO", "NHWC")
PADDED = Convolution(pads=((1, 1), (1, 1)))


def drawn(rows, columns, inputs, outputs, batch=2):
    draw = np.random.default_rng(0)
    # As after ReLU.
    x = np.maximum(draw.normal(size=(batch, rows, columns, inputs)), 0)
    return x.astype(np.float32), (draw.normal(size=(3, 3, inputs, outputs)) / np.sqrt(9 * inputs)).astype(np.float32)


def run(form, x, kernel, slope):
    """Return the values of a convolution and its gradients."""
    values, back = jax.vjp(form, x, kernel)
    return values, *back(slope(values))


def differences(transforms, pads, x, kernel):
    """Return the root mean square of the errors of values and gradients, relative to exact ones."""

    def slope(values):
        return np.random.default_rng(1).normal(size=values.shape).astype(values.dtype)

    ours = run(
        jax.jit(lambda x, kernel: convolve_tiles(x, kernel, Convolution(pads=pads), transforms)), x, kernel, slope
    )
    with jax.enable_x64(True):
        wide = jnp.asarray(x, jnp.float64), jnp.asarray(kernel, jnp.float64)
        exact = run(
            lambda x, kernel: lax.conv_general_dilated(x, kernel, (1, 1), pads, dimension_numbers=LAYOUT), *wide, slope
        )
        exact = [np.asarray(part) for part in exact]
    return [np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) for a, b in zip(map(np.float64, ours), exact, strict=True)]


@pytest.mark.variants(transforms=(LARGE_TILES,), side=((9, 14),))
@pytest.mark.parametrize("transforms", [SMALL_TILES, LARGE_TILES], ids=["small", "large"])
@pytest.mark.parametrize("side", [(8, 8), (9, 14), (3, 5)])
@pytest.mark.parametrize("pads", [((1, 1), (1, 1)), ((0, 0), (0, 0)), ((0, 2), (2, 1))])
def test_values_and_gradients_equal_those_of_the_general_convolution(transforms, side, pads):
    assert max(differences(transforms, pads, *drawn(*side, 5, 6))) < 2e-6


@pytest.mark.parametrize(("transforms", "limit"), [(SMALL_TILES, 6e-7), (LARGE_TILES, 1.6e-6)], ids=["small", "large"])
def test_many_channels_lose_few_digits(transforms, limit):
    """The usual points 0, ±1 and ±2 of large tiles have an error of 2.7e-6."""
    assert max(differences(transforms, ((1, 1), (1, 1)), *drawn(24, 24, 256, 64))) < limit


def test_kernels_are_transformed_one_after_another():
    x = jnp.ones((1, 28, 28, CHANNELS))

    def temporaries(layers):
        def run(x, kernels):
            for kernel in kernels:
                x = jax.nn.relu(convolve_tiles(x, kernel, PADDED, LARGE_TILES))
            return x

        kernels = [jnp.ones((3, 3, CHANNELS, CHANNELS))] * layers
        return jax.jit(run).lower(x, kernels).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8) < 1.3 * temporaries(2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_spoils_no_other_image(value):
    x, kernel = drawn(8, 8, 4, 4)
    good = convolve_tiles(x, kernel, PADDED, SMALL_TILES)
    x[0, 0, 0, 0] = value
    bad = convolve_tiles(x, kernel, PADDED, SMALL_TILES)
    assert not np.isfinite(bad[0]).all()
    np.testing.assert_array_equal(bad[1], good[1])


@pytest.mark.parametrize(("side", "products"), [(28, 36), (14, 16)])
def test_a_convolution_of_a_layer_uses_it(side, products):
    x, kernel = drawn(side, side, CHANNELS, CHANNELS, 1)
    options = {"lhs_dilation": (1, 1), "rhs_dilation": (1, 1), "dimension_numbers": LAYOUT}
    program = jax.jit(lambda x, kernel: convolve(x, kernel, (1, 1), "SAME", **options))
    np.testing.assert_allclose(
        program(x, kernel), lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=LAYOUT), atol=2e-5
    )
    text = program.trace(x, kernel).lower(lowering_platforms=("cpu",)).as_text()
    assert f"tensor<{products}x" in text
    assert "stablehlo.convolution" not in text
