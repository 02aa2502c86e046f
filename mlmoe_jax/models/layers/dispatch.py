"""Which implementation computes an operation: the table of kernels, and the operations that choose from it.

The first row of TABLE that fits computes an operation on a platform. If no row fits, or with `model.kernels=xla`, XLA's
own operation computes it. `python -m benchmarks.run --suite=kernels` compares each row with XLA on this machine.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mlmoe_jax.models.layers import recompute, softmax_attention, sums
from mlmoe_jax.models.layers.conv import depthwise, matmul_gradient, pointwise, pooling
from mlmoe_jax.models.layers.conv.maps import NO_PADS, Convolution, Pads
from mlmoe_jax.models.layers.conv.winograd import LARGE_TILES, SMALL_TILES, convolve_tiles
from mlmoe_jax.models.layers.manual_axes import vary_alike
from mlmoe_jax.models.layers.softmax_attention import Mask, attention_weights

# `with use_kernels(config.model.kernels):` decides for what is traced inside; it is a part of the keys of jit's caches.
use_kernels = jax.make_user_context("auto")
_recorded: ContextVar[list[jax.Array] | None] = ContextVar("recorded", default=None)  # see `record_attention`

CPU, EVERY = ("cpu",), ("default",)  # platforms of `lax.platform_dependent`
CHANNELS = 128  # the fewest with which the matmuls of Winograd's algorithm outweigh its transforms


# ------------------------------------------------------------------------------------------------------ the conditions
def fits_tiles(positions: int, x: jax.Array, kernel: jax.Array, how: Convolution) -> bool:
    """Return whether Winograd's algorithm is faster; `positions` is the least size H·W of maps for which it is.

    For smaller maps, the transform of the kernel outweighs the matmuls. Types other than float32 would lose digits.
    """
    is_3x3 = kernel.shape[:2] == (3, 3) and how.strides == (1, 1) and how.groups == 1
    is_large = min(kernel.shape[2:]) >= CHANNELS and math.prod(x.shape[1:3]) >= positions
    return is_3x3 and is_large and x.dtype == kernel.dtype == jnp.float32


def fits_cudnn(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask | None) -> bool:
    """Return whether cuDNN's fused attention takes the arguments, queries [B,Q,h,d], and JAX's default device has it.

    It takes 16-bit numbers, heads of a width that is a multiple of 8 and at most 128, and no mask. There is a mask only
    in the last block, or with pruned prompts in all blocks.
    """
    takes = mask is None and query.dtype in (jnp.bfloat16, jnp.float16)
    return takes and query.shape[-1] in range(8, 129, 8) and compute_capability() >= (8, 0)


def compute_capability() -> tuple[int, ...]:
    """Return the compute capability of JAX's default device, such as (9, 0); () if it is not an NVIDIA GPU."""
    device = jax.config.jax_default_device
    if isinstance(device, str):
        device = jax.devices(device)[0]
    device = device or jax.devices()[0]
    number = getattr(device, "compute_capability", "") if device.platform == "gpu" else ""
    parts = number.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()  # AMD has names such as gfx942


# ----------------------------------------------------------------------------------------------------------- the table
class Kernel(NamedTuple):
    """An implementation of an operation."""

    operation: str  # a function of this module
    platforms: Sequence[str]  # where the implementation is used
    run: Callable[..., jax.Array]
    case: str  # the case of `--suite=kernels` that shows its gain
    # Whether it computes the operation for these arguments. It is called while a program is traced.
    fits: Callable[..., bool] = lambda *_, **__: True


TABLE = (
    Kernel(
        "convolve",
        CPU,
        depthwise.convolve_depthwise,
        "depthwise",
        lambda x, kernel, how: how.groups == x.shape[-1] == kernel.shape[-1],
    ),
    Kernel(
        "convolve",
        CPU,
        pointwise.convolve_pointwise,
        "pointwise",
        lambda x, kernel, how: kernel.shape[:2] == (1, 1) and how.groups == 1 and how.pads == NO_PADS,
    ),
    Kernel("convolve", CPU, partial(convolve_tiles, transforms=LARGE_TILES), "large-tiles", partial(fits_tiles, 400)),
    Kernel("convolve", CPU, partial(convolve_tiles, transforms=SMALL_TILES), "small-tiles", partial(fits_tiles, 144)),
    Kernel(
        "convolve", CPU, matmul_gradient.convolve_with_matmul_gradient, "dense", lambda x, kernel, how: how.groups == 1
    ),
    Kernel("dot_general", CPU, pointwise.multiply_maps, "matmul"),
    Kernel("max_pool", ("cpu", "cuda"), pooling.pool_by_position, "pooling"),
    Kernel("attend", EVERY, softmax_attention.attend_by_cudnn, "attention", fits_cudnn),
    Kernel("attend", EVERY, softmax_attention.attend_by_matmuls, "attention"),
    Kernel("rectify", EVERY, recompute.rectify_by_result, "rectify"),
    # Several devices may share the first dimension.
    Kernel(
        "sum_of_squares", CPU, sums.square_sum_by_parts, "squares", lambda x: x.ndim > 2 and jax.device_count() == 1
    ),
)


def choose(operation: str, *arrays: jax.Array, **settings) -> dict[str, Kernel]:
    """Return the rows that compute an operation, by platform; XLA's own operation computes it on all others."""
    chosen: dict[str, Kernel] = {}
    for row in TABLE if use_kernels.value == "auto" else ():
        if "default" not in chosen and row.operation == operation and row.fits(*arrays, **settings):
            chosen = dict.fromkeys(row.platforms, row) | chosen
    return chosen


def _compute(operation: str, general: Callable, *arrays: jax.Array, **settings) -> jax.Array:
    rows = choose(operation, *arrays, **settings)
    arrays = vary_alike(*arrays)
    # Platforms with one row share one function, so that it is traced once.
    runs = {row: partial(row.run, **settings) for row in rows.values()}
    forms = {"default": partial(general, **settings)} | {platform: runs[row] for platform, row in rows.items()}
    return forms["default"](*arrays) if len(forms) == 1 else lax.platform_dependent(*arrays, **forms)


# ------------------------------------------------------------------------------------------------------ the operations
def convolve(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[Sequence[int]],
    *,
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_group_count: int = 1,
    **options,
) -> jax.Array:
    """Return the convolution of `x` [B,H,W,C] with `kernel` [h,w,C/groups,D], for `nnx.Conv(conv_general_dilated=…)`.

    Other arguments are as in `jax.lax.conv_general_dilated`. Raises ValueError for a dilation.
    """
    if set(lhs_dilation) | set(rhs_dilation) != {1}:
        raise ValueError(f"a convolution has no dilation here, not {lhs_dilation} and {rhs_dilation}")
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    strides, pads = tuple(strides), tuple(map(tuple, padding))
    general = partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding=pads,
        feature_group_count=feature_group_count,
        **options,
    )
    how = Convolution(strides, pads, feature_group_count, options.get("precision"), general)
    return _compute("convolve", lambda x, kernel, how: general(x, kernel), x, kernel, how=how)


def dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers, *, precision=None, **options) -> jax.Array:
    """Return `x` […,C] times `kernel` [C,D], for `nnx.Linear(dot_general=…)` on maps; see `jax.lax.dot_general`."""
    general = partial(lax.dot_general, dimension_numbers=dimension_numbers, **options)
    return _compute("dot_general", general, x, kernel, precision=precision)


def max_pool(x: jax.Array, window: tuple[int, int], strides: tuple[int, int], pads: Pads) -> jax.Array:
    """Return the largest value of each window of `x` [B,H,W,C]; its gradient goes to the first of equal values."""
    return _compute("max_pool", nnx.max_pool, x, window_shape=window, strides=strides, padding=pads)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask | None = None) -> jax.Array:
    """Return softmax(QKᵀ/√d)·V [B,Q,h,d] for queries [b,Q,h,d], keys and values [b,T,h,d], where each b is B or 1.

    The result has the type of the arguments. `mask` is True if a query may attend to a key; None = all True. Only
    reverse-mode differentiation is possible.
    """
    if (recorded := _recorded.get()) is not None:
        recorded.append(attention_weights(query, key, mask))
    parts = softmax_attention.broadcast_batch(query, key, value)
    return _compute("attend", softmax_attention.attend_by_xla, *parts, mask=mask)


@contextlib.contextmanager
def record_attention() -> Iterator[list[jax.Array]]:
    """Yield a list to which each call of `attend` in the block appends its weights f32[B,h,Q,T]."""
    recorded: list[jax.Array] = []
    token = _recorded.set(recorded)
    try:
        yield recorded
    finally:
        _recorded.reset(token)


def missing_tokens(count: int, width: int, dtype: jnp.dtype) -> int:
    """Return 1 if cuDNN would compute the attention of an odd number `count` of queries without a mask, otherwise 0.

    A model then adds one token before its first block, so that `attend_by_cudnn` does not pad the queries and cut the
    result in each block. `width` is the width of a head.
    """
    part = jax.ShapeDtypeStruct((1, count, 1, width), dtype)
    row = choose("attend", part, part, part, mask=None).get("default")
    return count % 2 if row is not None and row.run is softmax_attention.attend_by_cudnn else 0


def rectify(x: jax.Array) -> jax.Array:
    """Return ReLU of the sum at the end of a residual block."""
    return _compute("rectify", jax.nn.relu, x)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Return the sum of the squares of all values, []."""
    return _compute("sum_of_squares", sums.square_sum, x)
