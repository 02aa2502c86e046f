"""Vectors of label names that are drawn, not encoded."""

import numpy as np

from mlmoe_jax.data.labels.name_vectors import NameVectors, unit


def drawn_vectors(names, width, *, projects_from=0, seed=0, **fields) -> NameVectors:
    """Return vectors of `names` in a space of `width`, with a projection from the width `projects_from` unless it is 0.

    fields: other attributes than those of SigLIP with random vectors.
    """
    draw = np.random.default_rng(seed)
    given = {"scale": 20.0, "bias": -4.0, "background": np.zeros(width, np.float32), "backbone": "tiny"}
    if projects_from:
        given["projection"] = draw.normal(size=(projects_from, width)).astype(np.float32)
    vectors = unit(draw.normal(size=(len(names), width))).astype(np.float32)
    return NameVectors(tuple(names), vectors, **(given | fields))
