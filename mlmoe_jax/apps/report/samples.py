"""Sections about sample images: routing weights, and attention of prompts or label queries.

Shape letters: S sample images, K labels, E entries of a gate, Q queries (prompts or labels), N patch tokens.
"""

import base64
from typing import Any

import numpy as np

from mlmoe_jax.apps.report.components import Note, PageTable, Widget
from mlmoe_jax.apps.report.run_files import RunFiles, Samples
from mlmoe_jax.inference.explain import query_names
from mlmoe_jax.models.outputs import LABELS

MOST_GATED = 80  # labels with gates per image
LISTED = 12  # labels per image: its present labels, then the labels with the highest scores
MOST_QUERIES = 36  # per image and kind of attention map


def shared_data(files: RunFiles) -> dict[str, Any]:
    """Return the data that all widgets about sample images use; {} if the run has no sample images.

    Keys: `ids`, the names of the S images; `labels`, for each image a list of (label index, label code, score) with at
    most LISTED entries; `names`, the names of all labels.
    """
    samples = files.samples
    if samples is None:
        return {}
    labels = [
        [(k, int(codes[k]), round(float(scores[k]), 4)) for k in image_labels(samples, s, LISTED)]
        for s, (codes, scores) in enumerate(zip(samples.codes, samples.scores, strict=True))
    ]
    return {"ids": list(samples.images), "labels": labels, "names": files.names}


def image_labels(samples: Samples, s: int, most: int) -> list[int]:
    """Return at most `most` labels (indices) of image `s`: present, then other labels, each by decreasing score."""
    order = np.lexsort((-samples.scores[s], samples.codes[s] != 1))
    return [int(k) for k in order[:most]]


def gate_labels(files: RunFiles, samples: Samples) -> list[int]:
    """Return the sorted indices of the at most MOST_GATED labels whose gates are shown.

    They are the most frequent labels of the sample images. Ties are broken by the frequency in training.
    """
    space, in_samples = files.label_space, (samples.codes == 1).sum(axis=0)
    in_training = np.zeros_like(in_samples) if space is None else space.positives
    return sorted(int(k) for k in np.lexsort((-in_training, -in_samples))[:MOST_GATED])


def _bytes(values: np.ndarray) -> str:
    levels = np.rint(255 * np.clip(values.astype(np.float64), 0, 1))
    return base64.b64encode(levels.astype(np.uint8).tobytes()).decode()


# ----------------------------------------------------------------------------------------------------------- gates
def gates(files: RunFiles) -> list[Any]:
    """Return a widget with a selected label's routing weights per image, and a table of each label's mean weights."""
    samples = files.samples
    labels = gate_labels(files, samples)
    packed = [
        {"name": gate, "entries": samples.entries[gate], "images": len(weights), "weights": _bytes(weights[:, labels])}
        for gate, weights in samples.gates.items()
    ]
    note = (
        f"Routing weights sum to 1 over the entries of a gate. They are shown for {len(samples.images)} sample images "
        f"of {samples.split}, rounded to 1/255. Of {len(files.names):,} labels, the {len(labels)} most frequent are "
        "shown."
    )
    static = [gate for gate, weights in samples.gates.items() if len(weights) == 1]
    if static:
        note += f" The weights of {', '.join(static)} do not depend on the image (static gates)."
    data = {"labels": labels, "gates": packed}
    widget = Widget("gates", "gates", data, "Routing weights of a selected label in every image")
    return [Note(note), widget, gate_table(files, samples)]


def gate_table(files: RunFiles, samples: Samples) -> PageTable:
    """Return a table of mean gate weights over the sample images, with one row per label.

    There is one column per entry of each gate, and one for the sum over all shared experts of a gate. The last column
    is the mean of p(other | label) over all other labels in training, because DR-MoE claims that shared experts get
    more weight for labels that co-occur with other labels.
    """
    space, columns, values = files.label_space, [], []
    for gate, weights in samples.gates.items():
        entries = samples.entries[gate]
        means = weights.astype(np.float64).mean(axis=0)
        columns += [f"{gate}: {entry}" for entry in entries]
        values += list(means.T)
        shared = np.array([entry.startswith("shared ") for entry in entries])
        if 1 < shared.sum() < len(entries):
            columns.append(f"{gate}: all shared experts")
            values.append(means[:, shared].sum(axis=1))
    if space is not None and len(space.names) > 1:
        columns.append("mean p(other | label)")
        conditional = np.asarray(space.together.sum(axis=1)).ravel() / np.maximum(space.positives, 1)
        values.append(conditional / (len(space.names) - 1))
    rows = [[name, *row] for name, row in zip(files.names, np.stack(values, axis=1).round(5).tolist(), strict=True)]
    caption = f"Mean weights per label in percent, over the sample images of {samples.split}."
    return PageTable("gate-table", ["label", *((name, "fraction") for name in columns)], rows, caption)


# ------------------------------------------------------------------------------------------------------- attention
def attention(files: RunFiles) -> list[Any]:
    """Return maps of the attention of group prompts, label queries or the class token over patches of sample images."""
    samples = files.samples
    maps = [pack_attention(files, samples, kind, values) for kind, values in samples.attention.items()]
    note = (
        "Each map is scaled to its maximum; the peak is the ratio of the maximum to uniform attention over all "
        "patches. Attention shows the patches that a query reads, which need not be the reason for a prediction. At "
        f"most {MOST_QUERIES} maps are shown per image."
    )
    data = {"grid": list(samples.grid), "maps": maps}
    return [Note(note), Widget("attention", "attention", data, "Attention maps over an image")]


def pack_attention(files: RunFiles, samples: Samples, kind: str, values: np.ndarray) -> dict[str, Any]:
    """Return attention maps of one kind for the widget. At most MOST_QUERIES maps are kept per image.

    `kind` is a key of `samples.attention`, and `values`, f16[S,Q,N], the attention of each query over the patches. The
    result has `name` (the kind), `queries` (index -> name), `shown` (the indices of the kept queries for each image),
    `peaks` (ratio of the maximum of each map to uniform attention), and `maps` (the maps divided by their maximum, as
    bytes in base64).
    """
    images, queries, tokens = values.shape
    names, most = query_names(kind, queries, files.names, samples.prompts), min(queries, MOST_QUERIES)
    indices = np.tile(np.arange(most), (images, 1))
    if kind == LABELS:
        indices = np.array([image_labels(samples, s, most) for s in range(images)])
    maps = np.take_along_axis(values, indices[:, :, None], axis=1).astype(np.float64)
    peak = maps.max(axis=2)
    return {
        "name": kind,
        "queries": {int(q): names[q] for q in np.unique(indices)},
        "shown": indices.tolist(),
        "peaks": (peak * tokens).round(2).tolist(),
        "maps": _bytes(maps / np.where(peak > 0, peak, 1)[:, :, None]),
    }
