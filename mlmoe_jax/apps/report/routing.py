"""The section about shared and task experts: do correlated labels lean on shared experts, as DR-MoE claims?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Heading, Note, Section, SortableTable, Table
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.gate_shares import (
    Claim,
    GateShares,
    ImageShares,
    LabelCompany,
    claimed_correlations,
    label_company,
    measure_shares,
)
from mlmoe_jax.inference.gate_statistics import shared_entries
from mlmoe_jax.runs.folder import GATES

MOST_POINTS = 1000  # labels in the chart
_NAME, _TITLE = "routing", "Shared and task experts"


def routing(files: RunFiles) -> Section:
    """Return the share of gate weight on shared experts per label and per image, and its rank correlations.

    Raises UserError if gates.npz is damaged or has other labels than the run.
    """
    if not files.shares:
        if not shared_entries(files.config):
            text = "This model has no gates over shared and task experts; DR-MoE, HSQ and MLMoE have."
            return Section(_NAME, _TITLE, missing=text)
        text = "gates.npz is missing; an evaluation writes it to eval/ in this run folder:"
        return Section(_NAME, _TITLE, missing=text, command=files.command("--mode=eval"))
    main, space = files.main_split, files.label_space
    split = (
        files.shares[main.name] if main is not None and main.name in files.shares else next(iter(files.shares.values()))
    )
    labels = split.codes.shape[1]
    for names in (files.names, () if space is None else space.names):
        if names and len(names) != labels:
            raise UserError(f"{files.folder} is damaged: {GATES} has {labels:,} labels, the run has {len(names):,}")
    unknown = np.full(labels, math.nan)
    company = LabelCompany(unknown, unknown) if space is None else label_company(space)
    parts: list[Any] = [Note(_explain(split.name, len(split.codes)))]
    if space is None:
        parts.append(Note("label_space.npz is missing, so the co-occurrence of the labels is unknown."))
    prefix = files.splits[split.name].prefix if split.name in files.splits else ""
    found = measure_shares(split, difficult=files.settings(prefix).data.difficult_eval)
    for shares in found:
        parts += [Heading(f"Gate {shares.gate}")] if len(found) > 1 else []
        parts += _of_gate(files, shares, company)
    return Section(_NAME, _TITLE, parts)


def _explain(split: str, images: int) -> str:
    return (
        f"On the {images:,} images of {split}. DR-MoE claims that correlated labels lean on shared experts and "
        "heterogeneous labels on task experts. The share of a label in an image is the weight that its gate gives to "
        "all shared experts together. If the claim holds, each rank correlation (Spearman) below is above 0: that of "
        "the mean share of a label with its co-occurrence p(other|label) in training, and that of the mean share in an "
        "image with its number of labels. The mean over the labels of an image also depends on which labels these are. "
        "An interval that contains 0 is no evidence for the claim, one below 0 is evidence against it. Intervals "
        "(Bonett and Wright) and p-values treat labels, or images, as independent."
    )


def _of_gate(files: RunFiles, shares: GateShares, company: LabelCompany) -> list[Any]:
    names = files.names or [f"label {k}" for k in range(len(shares.mean))]
    parts: list[Any] = [_claims(claimed_correlations(shares, company))]
    drawn = [_label_chart(names, shares, company)] if np.isfinite(company.mean).any() else []
    if shares.images is None:
        static = "The gates are static: their weights are the same for every image, so no images can be compared."
        parts.append(Note(static))
    else:
        drawn.append(_image_chart(shares.gate, shares.images))
    return [*parts, *([Charts(drawn)] if drawn else []), _label_table(names, shares, company)]


def _claims(found: Sequence[Claim]) -> Table:
    rows = []
    for claim in found:
        one = claim.correlation
        interval = "–" if math.isnan(one.low) else f"{one.low:+.2f} … {one.high:+.2f}"
        rho, p = ("–", "–") if math.isnan(one.rho) else (f"{one.rho:+.2f}", _p_value(one.p))
        rows.append([claim.share, claim.against, rho, interval, p, f"{one.count:,} {claim.over}"])
    columns = ("mean share per …", "against", "ρ", "95 % interval", "p", "over")
    return Table(columns, rows, "Rank correlations that the claim predicts to be positive", text=(0, 1))


def _p_value(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}"


def _label_chart(names: Sequence[str], shares: GateShares, company: LabelCompany) -> Chart:
    defined = np.flatnonzero(np.isfinite(company.mean) & np.isfinite(shares.mean))[:MOST_POINTS]
    rows = [
        {
            "label": names[k],
            "company": round(float(company.mean[k]), 5),
            "largest": round(float(company.largest[k]), 5),
            "share": round(float(shares.mean[k]), 6),
        }
        for k in defined
    ]
    alt = f"Mean share of shared experts over mean p(other|label) for {len(rows)} labels"
    return Chart(f"routing-labels-{shares.gate}", "Labels: share over co-occurrence", charts.label_shares(rows), alt)


def _image_chart(gate: str, images: ImageShares) -> Chart:
    rows = []
    for number in np.unique(images.labels):
        of_number = images.all[images.labels == number]
        low, middle, high = np.percentile(of_number, [25, 50, 75])
        ends = {"low": round(float(low), 6), "high": round(float(high), 6)}
        rows.append({"labels": int(number), "share": round(float(middle), 6), **ends, "images": len(of_number)})
    first, last = (rows[end]["labels"] for end in (0, -1))
    alt = f"Median and quartiles of the share of shared experts for images with {first} to {last} labels"
    title = "Images: median share and quartiles over the number of labels"
    return Chart(f"routing-images-{gate}", title, charts.image_shares(rows), alt)


def _label_table(names: Sequence[str], shares: GateShares, company: LabelCompany) -> SortableTable:
    columns = [("label", "text"), ("share", "fraction"), ("share if present", "fraction")]
    columns += [("images", "count"), ("mean p(other|label)", "number"), ("max p(other|label)", "number")]
    values = (shares.mean, shares.present, shares.with_label, company.mean, company.largest)
    rows = [[name, *map(_cell, row)] for name, row in zip(names, zip(*values, strict=True), strict=True)]
    caption = (
        "Share of each label over all images and over those with it, in percent, and its co-occurrence in training."
    )
    return SortableTable(f"routing-table-{shares.gate}", columns, rows, caption)


def _cell(value: float) -> float | int | None:
    if isinstance(value, np.integer):
        return int(value)
    return round(float(value), 6) if math.isfinite(value) else None
