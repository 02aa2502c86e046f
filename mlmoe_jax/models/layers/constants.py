"""Arrays that belong to a model's structure: known when it is built, never learned, not counted as parameters."""

from __future__ import annotations

import numpy as np


class Constant:
    """A read-only array that hashes and compares by content, as the static parts of a module must."""

    def __init__(self, array: np.ndarray):
        self.value = np.array(array, order="C")
        self.value.setflags(write=False)

    def __hash__(self) -> int:
        return hash((self.value.shape, self.value.dtype.str, self.value.tobytes()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return NotImplemented
        mine, theirs = self.value, other.value
        return mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes()

    def __repr__(self) -> str:
        return f"Constant({self.value.dtype}{list(self.value.shape)})"
