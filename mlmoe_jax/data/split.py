"""What every source gives: one split of a data set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

NEGATIVE, POSITIVE, UNKNOWN, DIFFICULT = 0, 1, -1, 2


class Images(Protocol):
    """Random access to decoded pictures; picklable, so that worker processes can hold one."""

    def __len__(self) -> int:
        """Return the number of pictures, N."""
        ...

    def __getitem__(self, row: int) -> np.ndarray:
        """Return picture `row` as u8[h,w,3], RGB, at its own size."""
        ...


@dataclass(frozen=True)
class Split:
    """One split of a data set with N images and K labels.

    `labels` is i8[N,K] with the values NEGATIVE, POSITIVE, UNKNOWN and DIFFICULT above; what UNKNOWN and DIFFICULT
    mean in training is decided by the pipeline, not by the source. `ids` names each image (a path or a generated
    name); `id` in a batch is the row in this table.
    """

    name: str
    classes: tuple[str, ...]
    labels: np.ndarray
    ids: Sequence[str]
    images: Images

    def __len__(self) -> int:
        return len(self.ids)

    def __post_init__(self):
        if self.labels.shape != (len(self.ids), len(self.classes)) or len(self.images) != len(self.ids):
            raise ValueError(
                f"split {self.name}: {len(self.ids)} ids, {len(self.images)} images, {len(self.classes)} classes "
                f"and labels of shape {self.labels.shape} do not fit together"
            )
