"""Make positions.npz: a position table resampled by torch's bicubic interpolation (needs torch).

python tests/parity/make_positions.py
"""

from pathlib import Path

import numpy as np
import torch

# Larger, smaller and the table's own; the last but one shrinks one axis far enough to widen the antialiased kernel.
GRIDS = ((3, 4), (8, 7), (16, 16), (2, 9), (5, 5))
SIDE, WIDTH = 5, 3


def positions() -> dict[str, np.ndarray]:
    """Return the table and what torch makes of it, {kind}_{rows}x{columns}."""
    table = np.random.RandomState(0).randn(SIDE, SIDE, WIDTH).astype(np.float32)
    image = torch.from_numpy(table).permute(2, 0, 1)[None]
    arrays = {"table": table.reshape(1, SIDE * SIDE, WIDTH)}
    for grid in GRIDS:
        plain = torch.nn.functional.interpolate(image, size=grid, mode="bicubic")
        scale = tuple((size + 0.1) / SIDE for size in grid)
        offset = torch.nn.functional.interpolate(image, scale_factor=scale, mode="bicubic")
        assert offset.shape == plain.shape
        antialias = torch.nn.functional.interpolate(image, size=grid, mode="bicubic", antialias=True)
        for name, result in (("size", plain), ("offset", offset), ("size_antialias", antialias)):
            arrays[f"{name}_{grid[0]}x{grid[1]}"] = result[0].permute(1, 2, 0).reshape(1, -1, WIDTH).numpy()
    return arrays


if __name__ == "__main__":
    np.savez_compressed(Path(__file__).with_name("positions.npz"), **positions())
