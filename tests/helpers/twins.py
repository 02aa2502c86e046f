"""Models of other packages whose inputs, weights and outputs are stored in `tests/parity`."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LARGEST: dict[str, float] = {}  # the largest error per test


def error(ours, theirs) -> float:
    """Return the largest difference relative to the largest reference entry."""
    assert ours.shape == theirs.shape
    found = float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    LARGEST[test] = max(found, LARGEST.get(test, 0.0))
    return found


def parameters(shapes: Mapping[str, tuple[int, ...]], depth: int) -> int:
    """Return the number of parameters of a transformer of `depth` blocks, from the shapes of one with one block."""
    return sum(math.prod(shape) * (depth if path.startswith("blocks/") else 1) for path, shape in shapes.items())


def below(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}


def write_weights(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """Write the weights of a twin to a safetensors file under the names of its source, and return its path."""
    save_file({name: np.ascontiguousarray(value) for name, value in below(arrays, "weights/").items()}, path)
    return path
