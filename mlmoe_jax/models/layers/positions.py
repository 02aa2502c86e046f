"""Position tables resampled to another grid, by explicit weight matrices.

`jax.image.resize` uses other kernels and borders than the libraries that resample the published tables. The two axes
are independent, so a grid needs two small matrices.
"""

import jax
import jax.numpy as jnp
import numpy as np

# The kernel parameters of torch's bicubic interpolation without and with antialiasing (as in Pillow).
PLAIN, ANTIALIASED = -0.75, -0.5
CUBIC, LINEAR = "cubic", "linear"  # kernels of torch's bicubic and bilinear interpolation


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Return Keys' cubic convolution kernel with parameter a."""
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _kernel(name: str, distance: np.ndarray, a: float) -> np.ndarray:
    """Return the weights of taps at a distance. `name` is CUBIC, with the parameter a, or LINEAR."""
    return _cubic(distance, a) if name == CUBIC else np.maximum(1 - np.abs(distance), 0)


def resampling_weights(
    source: int, target: int, *, scale: float | None = None, antialias: bool = False, kernel: str = CUBIC
) -> np.ndarray:
    """Return f64[target,source], the weights of torch's bicubic or bilinear interpolation (align_corners=False).

    Output i samples the source at (i + 0.5)/scale − 0.5. Without antialiasing there are four taps, and taps beyond the
    border repeat the border. With antialiasing, the kernel is widened if the grid shrinks, taps beyond the border are
    dropped, and all other taps are rescaled to sum to 1. `scale` is target/source if it is None. Another scale gives
    the result of torch's `interpolate(scale_factor=scale)`. `kernel` is CUBIC or LINEAR.
    """
    scale = scale or target / source
    center = (np.arange(target) + 0.5) / scale - 0.5
    if antialias:
        distance = np.arange(source) - center[:, None]
        weights = _kernel(kernel, distance * min(scale, 1.0), ANTIALIASED)
        return weights / weights.sum(axis=1, keepdims=True)
    first = np.floor(center).astype(int) - 1
    weights = np.zeros((target, source))
    for tap in range(4):
        column = np.clip(first + tap, 0, source - 1)
        np.add.at(weights, (np.arange(target), column), _kernel(kernel, center - (first + tap), PLAIN))
    return weights


def sine_positions(side: int, width: int, temperature: float = 10_000.0, *, endpoint: bool = True) -> np.ndarray:
    """Return the sine positions of a square grid, f32[1,side·side,width].

    The channels are sin(column), cos(column), sin(row) and cos(row), each at width/4 frequencies from 1 to
    1/temperature, as in the fixed table of Beyer et al., "Better plain ViT baselines" (2022). Without `endpoint`, the
    last frequency is left out, as in the table of MAE. MoCo v3 has the table of MAE with rows and columns exchanged.
    `width` is a multiple of 4.
    """
    frequency = temperature ** -np.linspace(0, 1, width // 4, endpoint=endpoint)
    row, column = (axis.reshape(-1, 1) * frequency for axis in np.mgrid[:side, :side])
    table = np.concatenate([np.sin(column), np.cos(column), np.sin(row), np.cos(row)], axis=1)
    return table[None].astype(np.float32)


def sequence_positions(length: int, width: int, temperature: float = 10_000.0) -> np.ndarray:
    """Return the sine positions of a sequence, f32[length,width], as in tensor2tensor; `width` is even.

    They are sin and cos, each at width/2 frequencies that fall from 1 to 1/temperature.
    """
    angles = np.arange(length)[:, None] * temperature ** -np.linspace(0, 1, width // 2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def rotary_angles(grid: tuple[int, int], width: int, base: float) -> np.ndarray:
    """Return f32[N,width/2] for `grid` = (rows, columns), row-major: the angles of DINOv3's rotary positions.

    For any size of the grid, each axis spans −1 … 1, and the position of a patch is its center. The first half of the
    angles belongs to the row, the second half to the column. The angle at a position for frequency j = 0 … width/4 − 1
    is 2π·position·base^(−4j/width) (DINOv3, sec. 3.2; numbers from the authors' code). `width` is the width of an
    attention head, a multiple of 4.
    """
    frequency = 2 * np.pi * base ** -np.arange(0, 1, 4 / width)
    row, column = (axis.reshape(-1, 1) * frequency for axis in np.meshgrid(*map(_centers, grid), indexing="ij"))
    return np.concatenate([row, column], axis=1).astype(np.float32)


def _centers(count: int) -> np.ndarray:
    """Return the centers of `count` equal parts of −1 … 1."""
    return (2 * np.arange(count) + 1) / count - 1


def detr_positions(grid: tuple[int, int], width: int, temperature: float = 10_000.0) -> np.ndarray:
    """Return f32[1,N,width] for `grid` = (rows, columns), row-major: the normalized sines of DETR, as used by Q2L.

    The first half of the channels encodes the row, the second the column, each counted from 1 and scaled so that the
    last is 2π. Channels alternate between sine and cosine. Pair j of the n/2 pairs in a half of n = width/2 channels
    has the frequency temperature^(−2j/n) (Carion et al., ECCV 2020). `width` is a multiple of 4.
    """
    half = width // 2
    frequency = temperature ** (-2 * (np.arange(half) // 2) / half)
    # The authors' 1e-6 avoids a division by zero, which cannot occur here; it stays for equal values.
    angles = [2 * np.pi * (1 + np.arange(size)[:, None]) / (size + 1e-6) * frequency for size in grid]
    even = np.arange(half) % 2 == 0
    rows, columns = (np.where(even, np.sin(angle), np.cos(angle)) for angle in angles)
    shape = (*grid, half)
    table = np.concatenate([np.broadcast_to(rows[:, None], shape), np.broadcast_to(columns[None], shape)], axis=-1)
    return table.reshape(1, -1, width).astype(np.float32)


def resample_positions(
    table: jax.Array, grid: tuple[int, int], *, offset: float = 0.0, antialias: bool = False, kernel: str = CUBIC
) -> jax.Array:
    """Return a square position table [1,S·S,D], resampled to `grid` = (rows, columns): f32[1,rows·columns,D].

    The computation is in float32 for every type of the table. If `grid` is (S, S), the table is returned unchanged, for
    all values of `offset`, `antialias` and `kernel`.

    Args:
      offset: added to the grid size when the scale is computed. DINOv2 without registers was trained and is evaluated
        with 0.1, which shifts the sampling positions by up to a quarter of a cell. 0 is plain resampling.
      antialias: see `resampling_weights`; for DINOv2 with registers, and TIPSv2.
      kernel: CUBIC, or LINEAR for TIPSv2.
    """
    side = round(table.shape[1] ** 0.5)
    if grid == (side, side):
        return table
    settings = {"antialias": antialias, "kernel": kernel}
    rows, columns = (
        jnp.asarray(resampling_weights(side, size, scale=(size + offset) / side, **settings), jnp.float32)
        for size in grid
    )
    square = table.reshape(side, side, -1).astype(jnp.float32)
    result = jnp.einsum("rs,ct,std->rcd", rows, columns, square, precision=jax.lax.Precision.HIGHEST)
    return result.reshape(1, grid[0] * grid[1], -1)
