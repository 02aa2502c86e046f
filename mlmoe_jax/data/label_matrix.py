"""The label codes of a split, stored by image: a data set may have 10,000 labels, and an image a few of them.

Shape letters: N images, K labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Int8, Int64, Integer
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, vstack

from mlmoe_jax.data.label_codes import FEW_POSITIVES, NEGATIVE, POSITIVE, UNKNOWN

_BLOCK = 1 << 26  # codes that are expanded at a time


class LabelMatrix:
    """Label codes i8[N,K] that NumPy reads as a dense array, and of which `labels[rows]` are dense rows.

    Attributes:
      stated: sparse i8[N,K], the codes that differ from `others`. A code that is stored may be 0, which is NEGATIVE.
      others: i8[N], the code of all other labels of each image, NEGATIVE or UNKNOWN.
    """

    def __init__(self, stated: csr_array, others: Int8[np.ndarray, " n"]):
        differs = stated.data != np.repeat(others, np.diff(stated.indptr))
        if not differs.all():
            ends = np.append(0, np.cumsum(differs, dtype=stated.indptr.dtype))[stated.indptr]
            stated = csr_array((stated.data[differs], stated.indices[differs], ends), stated.shape)
        stated.sort_indices()
        self.stated, self.others, self.shape = stated, others, stated.shape

    @classmethod
    def of(cls, codes: LabelMatrix | ArrayLike) -> LabelMatrix:
        """Return label codes [N,K] as a LabelMatrix."""
        if isinstance(codes, cls):
            return codes
        dense = np.asarray(codes, np.int8)
        unknown, negative = ((dense == code).sum(axis=1) for code in (UNKNOWN, NEGATIVE))
        others = np.where(unknown > negative, UNKNOWN, NEGATIVE).astype(np.int8)
        rows, columns = (places.astype(np.int32) for places in np.nonzero(dense != others[:, None]))
        return cls(csr_array((dense[rows, columns], (rows, columns)), dense.shape), others)

    @classmethod
    def join(cls, parts: Iterable[LabelMatrix]) -> LabelMatrix:
        """Return the rows of all `parts`, of which there is at least one, in this order."""
        parts = list(parts)
        return cls(vstack([part.stated for part in parts], "csr"), np.concatenate([part.others for part in parts]))

    def __len__(self) -> int:
        return len(self.others)

    def _refuse(self, *others: Any) -> NoReturn:
        raise TypeError("labels are no array; labels[:] is one, with a code for each image and label")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = _refuse
    __hash__ = object.__hash__  # which Python removes for a class with __eq__

    def __getitem__(self, rows: Any) -> NDArray[np.int8]:
        """Return the codes of one image, i8[K], or of several, i8[n,K].

        `rows` is an index of the axis N. Raises TypeError if it has two axes.
        """
        if isinstance(rows, tuple):
            self._refuse()
        if np.ndim(rows) == 0 and not isinstance(rows, slice):
            return self[[range(len(self))[rows]]][0]
        part = self.stated[rows]
        codes = np.repeat(self.others[rows][:, None], self.shape[1], axis=1)
        codes[np.repeat(np.arange(len(codes)), np.diff(part.indptr)), part.indices] = part.data
        return codes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return self[:].astype(dtype or np.int8, copy=False)

    def take(self, rows: Integer[np.ndarray, " n"]) -> LabelMatrix:
        """Return the codes of the images with the row numbers `rows`, in that order."""
        return LabelMatrix(self.stated[rows], self.others[rows])

    def choose(self, labels: Integer[np.ndarray, " k"]) -> LabelMatrix:
        """Return the codes of the labels with these indices, in that order."""
        return LabelMatrix(self.stated[:, labels], self.others)

    def replace(self, changed: Mapping[tuple[int, int], int]) -> LabelMatrix:
        """Return the matrix with other codes at some places; `changed` is (image, label) -> code."""
        parts, end = [], 0
        for row, places in itertools.groupby(sorted(changed), itemgetter(0)):
            codes = self[[row]]
            for place in places:
                codes[0, place[1]] = changed[place]
            parts += [self.take(np.arange(end, row)), LabelMatrix.of(codes)]
            end = row + 1
        return self.join([*parts, self.take(np.arange(end, len(self)))])

    def blocks(self) -> Iterator[Int8[np.ndarray, "n _"]]:
        """Yield the codes of all images as dense arrays of a limited size, at least one."""
        size = max(1, _BLOCK // max(1, self.shape[1]))
        for start in range(0, max(1, len(self)), size):
            yield self[start : start + size]

    def count(self, code: int, axis: int = 0) -> Int64[np.ndarray, " _"]:
        """Return the number of images with a code per label, i64[K], or with `axis` 1 of labels per image, i64[N]."""
        by_default = self.others == code
        entries = (self.stated.data == code).astype(np.int8) - np.repeat(by_default, np.diff(self.stated.indptr))
        change = csr_array((entries, self.stated.indices, self.stated.indptr), self.shape).sum(axis=axis)
        return change + (self.shape[1] * by_default if axis else np.count_nonzero(by_default))

    def marked(self, *codes: int) -> csr_array:
        """Return sparse bool[N,K], where a label has one of `codes`, which are POSITIVE or DIFFICULT."""
        marks = np.isin(self.stated.data, codes)
        found = csr_array((marks, self.stated.indices, self.stated.indptr), self.shape, copy=True)
        found.eliminate_zeros()
        return found


LabelCodes = LabelMatrix | Integer[np.ndarray, "n k"]


def few_positives(labels: LabelCodes) -> str:
    """Return "a median of N positives per label" if N is less than FEW_POSITIVES, otherwise "".

    The AP of a label with one positive image is 1/rank of this image. A mean over such labels is therefore noisy.
    """
    counts = LabelMatrix.of(labels).count(POSITIVE)
    if not len(counts) or (median := np.median(counts)) >= FEW_POSITIVES:
        return ""
    return f"a median of {median:g} positives per label"
