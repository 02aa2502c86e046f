"""Make positions.npz: a position table resampled by torch's bicubic interpolation (needs torch).

python tests/parity/make_positions.py
"""

from pathlib import Path

import numpy as np
import torch

GRIDS = ((3, 4), (8, 7), (16, 16), (5, 5))
SIDE, WIDTH = 5, 3


def main():
    table = np.random.RandomState(0).randn(SIDE, SIDE, WIDTH).astype(np.float32)
    image = torch.from_numpy(table).permute(2, 0, 1)[None]
    arrays = {"table": table.reshape(1, SIDE * SIDE, WIDTH)}
    for grid in GRIDS:
        plain = torch.nn.functional.interpolate(image, size=grid, mode="bicubic")
        scale = tuple((size + 0.1) / SIDE for size in grid)
        offset = torch.nn.functional.interpolate(image, scale_factor=scale, mode="bicubic")
        assert offset.shape == plain.shape
        for name, result in (("size", plain), ("offset", offset)):
            arrays[f"{name}_{grid[0]}x{grid[1]}"] = result[0].permute(1, 2, 0).reshape(1, -1, WIDTH).numpy()
    np.savez_compressed(Path(__file__).with_name("positions.npz"), **arrays)


if __name__ == "__main__":
    main()
