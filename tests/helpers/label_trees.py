"""Random trees of labels, and what they say, in the most direct words."""

import numpy as np

from mlmoe_jax.data.label_tree import LabelTree


def draw_tree(seed: int, labels: int = 12) -> LabelTree:
    """Return a tree in which labels imply up to two others, with groups of exclusive labels where they are possible."""
    draw, names = np.random.default_rng(seed), [*map(str, range(labels))]
    order = draw.permutation(labels).tolist()
    implies = [
        (order[k], order[parent])
        for k in range(1, labels)
        for parent in draw.choice(k, min(k, draw.integers(3)), replace=False)
    ]
    tree = LabelTree(tuple(implies))
    for size in (2, 3, 2, 4):
        group = tuple(draw.choice(labels, size, replace=False).tolist())
        grown = LabelTree(tree.implies, (*tree.exclusive, group))
        tree = tree if grown.find_contradiction(names) else grown
    return tree


def violations(tree: LabelTree, scores: np.ndarray, limits: np.ndarray) -> int:
    """Return the number of rows of scores [N,K] that contradict a tree."""
    predicted = scores >= limits
    wrong = np.zeros(len(scores), bool)
    for label, implied in tree.implies:
        wrong |= (scores[:, label] > scores[:, implied]) | (predicted[:, label] & ~predicted[:, implied])
    for group in tree.exclusive:
        wrong |= predicted[:, list(group)].sum(axis=1) > 1
    return int(wrong.sum())
