"""Sections about single images: routing weights, and attention of prompts or label queries.

Shape letters: S sample images, K labels, E entries of a gate, Q queries (prompts or labels), N patch tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Note, Section, SortableTable, Widget
from mlmoe_jax.apps.report.run_files import RunFiles, Samples
from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.evaluation.gate_shares import label_shares
from mlmoe_jax.models.heads.catalog import HEADS
from mlmoe_jax.runs.folder import GATES

MOST_LABELS = 80  # with gates
LISTED = 12  # labels per image: its own, then those with the highest scores
MOST_QUERIES = 100  # per image and kind of attention map
MOST_BYTES = 3_000_000  # of all attention maps of one kind, one byte per token
_NO_SAMPLES = "The run keeps no sample images (config.report.samples is 0); an evaluation adds them:"


def _command(files: RunFiles) -> str:
    return files.command("--mode=eval", "--config.report.samples=16")


def shared(files: RunFiles) -> dict[str, Any]:
    """Return the data shared by all sections about images: ids, images, and labels per image; {} without samples.

    labels: per image (label, code, score) of LISTED labels. names: label -> name, for all labels that occur.
    """
    samples = files.samples
    if samples is None:
        return {}
    names = label_names(files, samples)
    listed = [image_labels(samples, s, LISTED) for s in range(len(samples.ids))]
    used = {k for of_image in listed for k in of_image} | set(gate_labels(files, samples))
    return {
        "ids": list(samples.ids),
        "images": ["data:image/jpeg;base64," + base64.b64encode(image).decode() for image in samples.images],
        "labels": [
            [(k, int(samples.codes[s, k]), round(float(samples.scores[s, k]), 4)) for k in of_image]
            for s, of_image in enumerate(listed)
        ],
        "names": {k: names[k] for k in sorted(used)},
    }


def label_names(files: RunFiles, samples: Samples) -> Sequence[str]:
    """Return the names of the K labels."""
    return files.names or [f"label {k}" for k in range(samples.codes.shape[1])]


def image_labels(samples: Samples, s: int, most: int) -> list[int]:
    """Return up to `most` labels of an image: its own by decreasing score, then the others by decreasing score."""
    order = np.lexsort((-samples.scores[s], samples.codes[s] != 1))
    return [int(k) for k in order[:most]]


def gate_labels(files: RunFiles, samples: Samples) -> list[int]:
    """Return the labels whose gates are shown, in order: most frequent in the samples, then in training."""
    space, in_samples = files.label_space, (samples.codes == 1).sum(axis=0)
    in_training = np.zeros_like(in_samples) if space is None else space.positives
    return sorted(int(k) for k in np.lexsort((-in_training, -in_samples))[:MOST_LABELS])


def _bytes(values: np.ndarray) -> str:
    return base64.b64encode(np.rint(255 * np.clip(values, 0, 1)).astype(np.uint8).tobytes()).decode()


# ----------------------------------------------------------------------------------------------------------- gates
def gates(files: RunFiles) -> Section:
    """Return the routing weights per label: mean and deviation over the images, and per image."""
    name, title, samples = "gates", "Gates: the experts of each label", files.samples
    if samples is None:
        return Section(name, title, missing=_NO_SAMPLES, command=_command(files))
    if not samples.gates:
        gated = " or ".join(kind for kind in HEADS if HEADS[kind].gate_entries(default_config()))
        return Section(name, title, missing=f"This model has no gates: config.model.head.kind {gated} has.")
    names, labels = label_names(files, samples), gate_labels(files, samples)
    shown = [names[k] for k in labels]
    packed, drawn = [], []
    for gate, weights in samples.gates.items():
        weights = np.asarray(weights, np.float64)[:, labels]
        entries = entry_names(samples, gate, weights.shape[-1])
        drawn += _summaries(gate, weights, shown, entries)
        packed.append({"name": gate, "entries": entries, "images": len(weights), "weights": _bytes(weights)})
    note = (
        f"Routing weights sum to 1 over the entries of a gate. They are shown for {len(samples.ids)} sample images of "
        f"{samples.split}, rounded to 1/255."
    )
    if len(labels) < len(names):
        note += f" Of {len(names):,} labels, the {len(labels)} most frequent are shown."
    static = [gate for gate, weights in samples.gates.items() if len(weights) == 1]
    if static:
        note += f" The weights of {', '.join(static)} are the same for every image (static gates)."
    widget = Widget("gates", {"labels": labels, "gates": packed}, "Routing weights of a selected label in every image")
    return Section(name, title, [Note(note), widget, Charts(drawn), *_shares(files)])


def _shares(files: RunFiles) -> list[Any]:
    """Return the table of the weight on shared experts per label over a whole split; [] without gates.npz."""
    main = files.main_split
    if main is None:
        return []
    difficult = files.settings(main.prefix).data.difficult_eval
    shares, space = label_shares(files.folder, main.name, difficult=difficult), files.label_space
    if not shares:
        return []
    columns, values = [("label", "text")], []
    for gate, of_gate in shares.items():
        columns += [(f"{gate}: shared experts", "fraction"), (f"{gate}: in images with the label", "fraction")]
        values += [of_gate.mean, of_gate.present]
    if space is not None and len(space.names) > 1:
        together = np.asarray(space.together.sum(axis=1)).ravel() / np.maximum(space.positives, 1)
        columns.append(("mean p(other | label) in training", "number"))
        values.append(together / (len(space.names) - 1))
    cells = ([None if np.isnan(x) else round(float(x), 6) for x in row] for row in zip(*values, strict=True))
    with files.folder.reading(GATES):
        rows = [[name, *row] for name, row in zip(files.names, cells, strict=True)]
    caption = (
        f"Mean weight of the shared experts over the images of {main.name}, in percent. DR-MoE claims that labels "
        "which occur with others give them more."
    )
    return [SortableTable("gate-table", columns, rows, caption)]


def entry_names(samples: Samples, gate: str, count: int) -> list[str]:
    """Return the names of the E entries of a gate."""
    given = list(samples.entries.get(gate, ()))
    return given if len(given) == count else [f"expert {e}" for e in range(count)]


def _summaries(gate: str, weights: np.ndarray, labels: Sequence[str], entries: Sequence[str]) -> list[Chart]:
    mean, deviation = weights.mean(axis=0), weights.std(axis=0)
    found = [
        _label_heat(f"gate-{gate}-mean", f"{gate}: mean weight (full color: 1)", "mean weight", mean, labels, entries)
    ]
    if len(weights) > 1:
        title = f"{gate}: standard deviation over images (full color: 0.5, the maximum)"
        found.append(_label_heat(f"gate-{gate}-deviation", title, "deviation", deviation, labels, entries, scale=2))
    return found


def _label_heat(
    name: str,
    title: str,
    what: str,
    values: np.ndarray,
    labels: Sequence[str],
    entries: Sequence[str],
    scale: float = 1,
) -> Chart:
    rows = [
        {
            "x": entries[e],
            "y": labels[k],
            "value": round(scale * float(values[k, e]), 4),
            "text": f"{labels[k]}, {entries[e]}: {what} {values[k, e]:.3f}",
        }
        for k, e in np.ndindex(values.shape)
    ]
    spec = charts.heat_map(rows, x=entries, y=labels, value_title="")
    alt = f"{what} of {len(entries)} entries for {len(labels)} labels, from {values.min():.2f} to {values.max():.2f}"
    return Chart(name, title, spec, alt)


# ------------------------------------------------------------------------------------------------------- attention
def attention(files: RunFiles) -> Section:
    """Return attention maps of group prompts, label queries or the class token over the sample images."""
    name, title, samples = "attention", "Attention over the image", files.samples
    if samples is None:
        return Section(name, title, missing=_NO_SAMPLES, command=_command(files))
    if not samples.attention:
        return Section(
            name, title, missing="samples/explained.npz has no attention: the head of this model has no attention maps."
        )
    maps = [_pack(files, samples, kind, values) for kind, values in samples.attention.items()]
    note = (
        "Each map is scaled to its own maximum; the peak is the ratio of that maximum to uniform attention over all "
        "patches. Attention shows the patches that a query reads, which need not be the reason for a prediction."
    )
    for of_kind in maps:
        if of_kind["left_out"]:
            note += (
                f" Of {of_kind['left_out']:,} maps of {of_kind['name']} per image, {len(of_kind['kept'][0])} are shown."
            )
    widget = Widget("attention", {"grid": list(samples.grid), "maps": maps}, "Attention maps over a selected image")
    return Section(name, title, [Note(note), widget])


def _pack(files: RunFiles, samples: Samples, kind: str, values: np.ndarray) -> dict[str, Any]:
    """Return one kind of maps f16[S,Q,N] as bytes, reduced per image to the limits."""
    images, queries, tokens = values.shape
    names = query_names(files, samples, kind, queries)
    most = max(1, min(queries, MOST_QUERIES, MOST_BYTES // (images * tokens)))
    if most < queries and kind == "labels":
        kept = np.array([image_labels(samples, s, most) for s in range(images)])
    else:
        kept = np.tile(np.arange(most), (images, 1))
    chosen = np.take_along_axis(values, kept[:, :, None], axis=1).astype(np.float64)
    peak = chosen.max(axis=2)
    scaled = chosen / np.where(peak > 0, peak, 1)[:, :, None]
    return {
        "name": kind,
        "queries": {int(q): names[q] for q in np.unique(kept)},
        "kept": kept.tolist(),
        "peaks": (peak * tokens).round(2).tolist(),
        "maps": _bytes(scaled),
        "left_out": queries if most < queries else 0,
    }


def query_names(files: RunFiles, samples: Samples, kind: str, count: int) -> Sequence[str]:
    """Return the names of the Q queries of a kind of attention."""
    if kind == "labels":
        return label_names(files, samples)
    if kind == "cls":
        return ["class token"]
    if samples.prompts and len(samples.prompts) == count:
        return [f"{side} group {group + 1}, expert {expert}" for side, group, expert in samples.prompts]
    return [f"{kind} {q}" for q in range(count)]
