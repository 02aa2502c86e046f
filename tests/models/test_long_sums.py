"""Every kind of product, sum and gradient of the models beside float64, with more rows than known errors of XLA need.

JAX 0.10.2 computes the sum over the columns of some products wrongly from row 32,768 on, and all versions until
0.12.0.1 a sum over a batched product with a constant operand: both in a fusion of YNNPACK, which `jax.disable_jit`
avoids.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import log_softmax, sigmoid, softmax, softplus

from mlmoe_jax.models.layers import batch_norm, dispatch, recompute
from mlmoe_jax.models.losses import asymmetric_loss, binary_cross_entropy

ROWS = 33_000
IMAGE = (1, 182, 182)  # 33,124 positions
LAYOUT = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def attention(query, key, value):
    weights = softmax(jnp.einsum("bqhd,bthd->bhqt", query, key) / np.sqrt(query.shape[-1]))
    return jnp.einsum("bhqt,bthd->bqhd", weights, value)


def normalized(x, scale, bias, axes=(-1,)):
    centered = x - x.mean(axes, keepdims=True)
    return centered / jnp.sqrt((centered**2).mean(axes, keepdims=True) + 1e-6) * scale + bias


def convolution(x, kernel, **settings):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **LAYOUT, **settings)


def dispatched(x, kernel, **settings):
    dilation = {"lhs_dilation": (1, 1), "rhs_dilation": (1, 1)}
    return dispatch.convolve(x, kernel, (1, 1), "SAME", **LAYOUT, **dilation, **settings)


def linear(x, kernel, bias):
    return jnp.dot(x, kernel) + bias


def experts(x, first, second):
    """Experts of labels, as heads have them: a small product per label, and the sum over its few columns."""
    hidden = jax.vmap(lambda rows, kernel: jnp.tanh(rows @ kernel), (1, 0), 1)(x, first)
    return jnp.sum(hidden * second, axis=-1)


def gated(x, gates):
    return jnp.einsum("nkd,kde->nke", x, gates) * softmax(x @ gates[0])[..., :3]


def nodes(x, adjacency, kernel):
    """A graph over labels."""
    return jnp.max(jnp.einsum("kl,nld->nkd", adjacency, x) @ kernel, axis=-1)


# Name -> (function of the package, or of its kind, the same in plain operations, shapes of the arguments).
KINDS = {
    "attention": (dispatch.attend, attention, [(500, 17, 4, 8)] * 3),
    "attention to prompts": (dispatch.attend, attention, [(3000, 3, 4, 3), (3000, 2, 4, 3), (3000, 2, 4, 3)]),
    "linear": (linear, linear, [(ROWS, 16), (16, 3), (3,)]),
    "narrow": (linear, linear, [(ROWS, 2), (2, 3), (3,)]),
    "per row": (
        lambda x, m: jax.vmap(lambda row: jnp.sum((m @ row) ** 2))(x),
        lambda x, m: ((x @ m.T) ** 2).sum(1),
        [(ROWS, 4), (3, 4)],
    ),
    "experts": (experts, experts, [(ROWS, 3, 4), (3, 4, 2), (3, 2)]),
    "gates": (gated, gated, [(ROWS, 3, 4), (3, 4, 3)]),
    "graph": (nodes, nodes, [(ROWS, 3, 4), (3, 3), (4, 2)]),
    "LayerNorm": (lambda *a: recompute._normalize(*a, 1e-6), normalized, [(ROWS, 12), (12,), (12,)]),
    "BatchNorm": (
        lambda *a: batch_norm._normalize_by_batch(*a, 1e-6)[0],
        lambda *a: normalized(*a, axes=(0, 1, 2)),
        [(*IMAGE, 4), (4,), (4,)],
    ),
    "pointwise": (dispatched, convolution, [(*IMAGE, 3), (1, 1, 3, 4)]),
    "3 x 3": (dispatched, convolution, [(*IMAGE, 3), (3, 3, 3, 2)]),
    "depthwise": (
        lambda x, k: dispatched(x, k, feature_group_count=4),
        lambda x, k: convolution(x, k, feature_group_count=4),
        [(*IMAGE, 4), (3, 3, 1, 4)],
    ),
    "log-softmax": (log_softmax, lambda x: x - jnp.log(jnp.exp(x).sum(-1, keepdims=True)), [(ROWS, 3)]),
    "GELU": (recompute.gelu, lambda x: jax.nn.gelu(x, approximate=False), [(ROWS, 3)]),
    "norm": (dispatch.sum_of_squares, lambda x: (x**2).sum(), [(ROWS, 3)]),
    "BCE": (
        lambda x: binary_cross_entropy(x, (x > 0.3).astype(x.dtype)).sum(-1),
        lambda x: (softplus(x) - x * (x > 0.3)).sum(-1),
        [(ROWS, 3)],
    ),
    "ASL": (
        lambda x: asymmetric_loss(x, jnp.ones_like(x), gamma_neg=4, gamma_pos=1, clip=0.05, detach=True).sum(-1),
        lambda x: (jax.lax.stop_gradient(1 - sigmoid(x)) * softplus(-x)).sum(-1),
        [(ROWS, 3)],
    ),
}


def measured(function, arguments, weights):
    """Return the results and gradients of a function: of its sum, and of its weighted sum."""

    def total(*given):
        result = function(*given)
        return (result * weights(result)).sum()

    which = tuple(range(len(arguments)))
    return (
        function(*arguments),
        jax.grad(lambda *a: function(*a).sum(), which)(*arguments),
        jax.grad(total, which)(*arguments),
    )


@pytest.mark.budget(20)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_many_rows_are_those_of_float64(kind):
    function, plain, shapes = KINDS[kind]
    random = np.random.default_rng(0)
    given = [random.normal(size=shape) for shape in shapes]

    def weights(result):
        return jnp.cos(jnp.arange(result.size, dtype=result.dtype)).reshape(result.shape)

    narrow = [jnp.asarray(array, jnp.float32) for array in given]
    actual = jax.jit(lambda *a: measured(function, a, weights))(*narrow)
    with jax.enable_x64(True), jax.disable_jit():
        expected = measured(plain, [jnp.asarray(array, jnp.float64) for array in given], weights)
    for group, references in zip(actual, expected, strict=True):
        largest = max(np.abs(np.asarray(one)).max() for one in jax.tree.leaves(references))  # some gradients are 0
        for one, other in zip(jax.tree.leaves(group), jax.tree.leaves(references), strict=True):
            assert other.dtype == np.float64
            assert np.abs(np.asarray(one, np.float64) - np.asarray(other)).max() < 1e-4 * largest
