"""For each case in the table of models/layers/dispatch.py, a function and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mlmoe_jax.models.layers import dispatch

# A function, the shapes of its arrays per image, and the shapes of its kernels.
Case = tuple[Callable[..., jax.Array], list[tuple[int, ...]], list[tuple[int, ...]]]

_LAYOUT = {"lhs_dilation": (1, 1), "rhs_dilation": (1, 1), "dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def _convolution(side: int, channels: int, results: int, size: int, stride: int = 1, groups: int = 1) -> Case:
    function = partial(
        dispatch.convolve, strides=(stride, stride), padding="SAME", feature_group_count=groups, **_LAYOUT
    )
    return function, [(side, side, channels)], [(size, size, channels // groups, results)]


def _matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return dispatch.dot_general(x, kernel, (((3,), (0,)), ((), ())))


def _pool(x: jax.Array) -> jax.Array:
    return dispatch.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))


def _blocks(x: jax.Array) -> jax.Array:
    """Return the result of eight residual blocks without convolutions."""
    for _ in range(8):
        x = dispatch.rectify(x + jnp.sin(x))
    return x


def _gradient_norm(features: jax.Array, slopes: jax.Array) -> jax.Array:
    """Return the sum of the squares of the gradient of a bank of experts."""
    gradient = jax.grad(lambda bank: jnp.sum(jnp.einsum("bkd,kdh->bkh", features, bank) * slopes))
    norm = dispatch.sum_of_squares(gradient(jnp.zeros((*features.shape[1:], slopes.shape[-1]), features.dtype)))
    return jax.lax.stop_gradient(norm)


def cases_at(side: int) -> dict[str, Case]:
    """Return the cases with the maps and tokens that networks have for images of `side` pixels."""
    tokens = ((side // 14) ** 2 + 1, 12, 64)
    return {
        "depthwise": _convolution(side // 4, 96, 96, 7, groups=96),
        "pointwise": _convolution(side // 4, 256, 64, 1),
        "large-tiles": _convolution(side // 8, 256, 256, 3),
        "small-tiles": _convolution(side // 16, 512, 512, 3),
        "dense": _convolution(side // 4, 256, 256, 3, 2),
        "matmul": (_matmul, [(side // 4, side // 4, 96)], [(96, 384)]),
        "pooling": (_pool, [(side // 2, side // 2, 64)], []),
        "attention": (dispatch.attend, [tokens] * 3, []),
        "rectify": (_blocks, [(side // 8, side // 8, 1024)], []),
        "squares": (_gradient_norm, [(80, 512), (80, 256)], []),
    }


def kernel_cases() -> dict[str, list[str]]:
    """Return the cases in the order of the table."""
    return {"cases": list(dict.fromkeys(row.case for row in dispatch.TABLE))}


def compile_case(case: dict[str, Any]) -> tuple[jax.stages.Compiled, list[jax.Array]]:
    """Return the compiled function of a case with its gradients, and its arrays."""
    function, per_image, kernels = cases_at(case["resolution"])[case["part"]]
    shapes = [*((case["batch"], *shape) for shape in per_image), *kernels]
    arrays = [jax.random.normal(jax.random.key(seed), shape, case["dtype"]) for seed, shape in enumerate(shapes)]

    def differentiated(*arrays: jax.Array) -> tuple:
        result, back = jax.vjp(function, *arrays)
        return result, back(result)

    with dispatch.use_kernels(case["kernels"]):
        return jax.jit(differentiated).lower(*arrays).compile(), arrays
