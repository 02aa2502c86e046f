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

import numpy as np
from jaxtyping import Bool
from ml_collections import ConfigDict
from numpy.random import RandomState

from mlmoe_jax.data.label_codes import POSITIVE, UNKNOWN, targets
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained, read_bytes

Marks = Bool[np.ndarray, "n k"]  # whether an image has a label, or it is known
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
    positive, _ = targets(split.labels, data_config.difficult_train)
    random = RandomState(KNOWN_SEED)
    if rule in HIDING_RULES:
        known = HIDING_RULES[rule](positive, random)
    elif rule.startswith(RANDOM):
        known = draw_share(positive, random, _share(rule))
    else:
        known = read_list(rule, split)
    labels = np.where(known, POSITIVE, UNKNOWN).astype(np.int8)
    return replace(split, labels=split.tree.close(labels)[0])


def find_mistake(rule: str) -> str:
    """Return why a value of `data.known_positives` is invalid; "" if it is valid. A file is not opened."""
    if rule in (ALL, *HIDING_RULES) or 0 < _share(rule) < 1 or rule.endswith(".txt"):
        return ""
    return (
        f"data.known_positives is '{rule}' and must be {ALL}, {', '.join(HIDING_RULES)}, {RANDOM}SHARE with a share "
        "between 0 and 1, or a .txt file"
    )


def draw_one(positive: Marks, random: RandomState) -> Marks:
    """Draw one positive label of each image that has positive labels."""
    known = np.zeros_like(positive)
    for row, is_positive in enumerate(positive):
        candidates, others = np.flatnonzero(is_positive), np.flatnonzero(~is_positive)
        random.shuffle(candidates)
        random.shuffle(others)  # as the authors' code does, for equal draws
        known[row, candidates[:1]] = True
    return known


def draw_fraction(positive: Marks, random: RandomState, divisor: int) -> Marks:
    """Draw ⌊m / divisor⌋ + 1 of the m positive labels of each image."""
    rows, columns = np.nonzero(positive)
    order = np.lexsort((random.random_sample(len(rows)), rows))
    count = positive.sum(axis=1)
    rank = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    drawn = order[rank <= np.repeat(count // divisor, count)]
    known = np.zeros_like(positive)
    known[rows[drawn], columns[drawn]] = True
    return known


def draw_share(positive: Marks, random: RandomState, share: float) -> Marks:
    """Draw a fraction `share`, in (0, 1), of the positive labels of all images together."""
    positions = np.flatnonzero(positive)
    known = np.zeros(positive.size, bool)
    known[random.permutation(positions)[: round(share * len(positions))]] = True
    return known.reshape(positive.shape)


HIDING_RULES: Mapping[str, Callable[[np.ndarray, RandomState], np.ndarray]] = {
    "one": draw_one,
    "0.75": lambda positive, random: draw_fraction(positive, random, 2),
    "0.4": lambda positive, random: draw_fraction(positive, random, 5),
}


def read_list(path: str, split: Split) -> Marks:
    """Return the known positives of a list as bool[N,K]. Lines about images of other splits are ignored.

    Raises UserError if a line has another format or an unknown class, or an image of the split is not in the list.
    """
    with damage_explained(path):
        listed = dict(_line(line, len(split.classes)) for line in read_bytes(path).decode().splitlines())
    names = [name.rpartition("/")[2] for name in split.ids]
    if absent := [name for name in names if name not in listed]:
        raise UserError(
            f"{path} has no line for {len(absent):,} of the {len(names):,} images of split {split.name}, the first is "
            f"{absent[0]}"
        )
    known = np.zeros(split.labels.shape, bool)
    for row, name in enumerate(names):
        known[row, listed[name]] = True
    return known


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
