"""Hide positives of a training split: `data.known_positives`.

    all            all labels as they are
    one            one positive per image, drawn as by E. Cole et al., "Multi-Label Learning from Single Positive
                   Labels" (CVPR 2021); equal to their labels of COCO 2014
    0.75, 0.4      ⌊m/2⌋ + 1 and ⌊m/5⌋ + 1 of the m positives of an image, which are 75 % and 40 % of the positives of
                   COCO 2014: the rule of the lists of Y. Zhang et al. (arXiv 2112.07368)
    random:SHARE   this share of the positives of all images, drawn independently of the images
    FILE.txt       such a list: a line `file name, indices of classes` per image

Every other label of the split is then unknown, since a label that is hidden must not differ from an absent label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from ml_collections import ConfigDict
from numpy.random import RandomState

from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE, UNKNOWN
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained, read_text

if TYPE_CHECKING:
    from scipy.sparse import csr_array as Marks  # bool[N,K], whether an image has a label, or it is known

ALL, RANDOM = "all", "random:"
KNOWN_SEED = 1200  # of the known positives, as in the code of E. Cole et al.


def hide_positives(split: Split, data_config: ConfigDict) -> Split:
    """Return a training split in which only some positives are known, as `data.known_positives` sets it.

    A label that a known positive implies in the label tree is known too. All other labels are unknown. Raises UserError
    if the file that `data.known_positives` names is damaged or does not fit the split.
    """
    rule = data_config.known_positives
    if rule == ALL:
        return split
    codes = (POSITIVE, DIFFICULT) if data_config.difficult_train == "positive" else (POSITIVE,)
    positive = split.labels.marked(*codes)
    random = RandomState(KNOWN_SEED)
    if rule in HIDING_RULES:
        known = HIDING_RULES[rule](positive, random)
    elif rule.startswith(RANDOM):
        known = draw_share(positive, random, _share(rule))
    else:
        known = read_list(rule, split)
    from mlmoe_jax.data.label_matrix import LabelMatrix  # here, because it imports scipy, and --help needs none

    labels = LabelMatrix(known.astype(np.int8), np.full(len(split), UNKNOWN, np.int8))
    closed = replace(split, labels=labels).close_labels(split.tree)
    return replace(closed, contradictions=split.contradictions)


def find_mistake(rule: str) -> str:
    """Return why a value of `data.known_positives` is invalid; "" if it is valid. A file is not opened."""
    if rule in (ALL, *HIDING_RULES) or 0 < _share(rule) < 1 or rule.endswith(".txt"):
        return ""
    return (
        f"data.known_positives is '{rule}' and must be {ALL}, {', '.join(HIDING_RULES)}, {RANDOM}SHARE with a share "
        "between 0 and 1, or a .txt file"
    )


def _mark(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> Marks:
    from scipy.sparse import csr_array

    return csr_array((np.ones(len(rows), bool), (rows, columns)), shape)


def draw_one(positive: Marks, random: RandomState) -> Marks:
    """Draw one positive label of each image that has positive labels."""
    rows, columns = [], []
    for row in range(positive.shape[0]):
        candidates = positive.indices[slice(*positive.indptr[row : row + 2])].copy()
        others = np.delete(np.arange(positive.shape[1]), candidates)
        random.shuffle(candidates)
        random.shuffle(others)  # as the authors' code does, for equal draws
        rows += [row] * len(candidates[:1])
        columns += candidates[:1].tolist()
    return _mark(np.array(rows, np.int64), np.array(columns, np.int64), positive.shape)


def draw_fraction(positive: Marks, random: RandomState, divisor: int) -> Marks:
    """Draw ⌊m / divisor⌋ + 1 of the m positive labels of each image."""
    rows, columns = positive.nonzero()
    order = np.lexsort((random.random_sample(len(rows)), rows))
    count = np.diff(positive.indptr)
    rank = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    drawn = order[rank <= np.repeat(count // divisor, count)]
    return _mark(rows[drawn], columns[drawn], positive.shape)


def draw_share(positive: Marks, random: RandomState, share: float) -> Marks:
    """Draw a fraction `share`, in (0, 1), of the positive labels of all images together."""
    rows, columns = positive.nonzero()
    drawn = random.permutation(len(rows))[: round(share * len(rows))]
    return _mark(rows[drawn], columns[drawn], positive.shape)


HIDING_RULES: Mapping[str, Callable[[Marks, RandomState], Marks]] = {
    "one": draw_one,
    "0.75": lambda positive, random: draw_fraction(positive, random, 2),
    "0.4": lambda positive, random: draw_fraction(positive, random, 5),
}


def read_list(path: str, split: Split) -> Marks:
    """Return the known positives of a list. Lines about images of other splits are ignored.

    Raises UserError if a line has another format or an unknown class, or an image of the split is not in the list.
    """
    with damage_explained(path):
        listed = dict(_line(line, len(split.classes)) for line in read_text(path).splitlines())
    names = [name.rpartition("/")[2] for name in split.ids]
    if absent := [name for name in names if name not in listed]:
        raise UserError(
            f"{path} has no line for {len(absent):,} of the {len(names):,} images of split {split.name}, the first is "
            f"{absent[0]}"
        )
    columns = [np.unique(listed[name]) for name in names]
    rows = np.repeat(np.arange(len(split)), [len(some) for some in columns])
    return _mark(rows, np.concatenate(columns).astype(np.int64), split.labels.shape)


def _line(line: str, classes: int) -> tuple[str, list[int]]:
    name, _, labels = line.partition(",")
    indices = [int(index) for index in labels.split()]
    if not all(0 <= index < classes for index in indices):
        raise ValueError(f"'{line}' has an index that is not below {classes}, the number of classes")
    return name.rpartition("/")[2], indices


def _share(rule: str) -> float:
    try:
        return float(rule.removeprefix(RANDOM)) if rule.startswith(RANDOM) else 0.0
    except ValueError:
        return 0.0
