"""Arrays that are part of the structure of a model: fixed when it is built, not learned, not counted as parameters."""

from __future__ import annotations

import numpy as np


class Constant:
    """A read-only array that is hashed and compared by content, as required of the static parts of a module."""

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
