"""The rates of named pairs of labels in one run, or in two runs on the same images, see `label_pairs`.

Shape letters: N images, K labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlmoe_jax.apps.tools.compare import Change, ComparedRun, MatchedImages
from mlmoe_jax.apps.tools.label_pairs import (
    RATES,
    Cuts,
    DifferingImage,
    Rate,
    choose_pairs,
    differing_images,
    pair_in_training,
    pair_rates,
    paired_interval,
    parse_pairs,
    prediction_cuts,
    rate_cells,
)
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.metrics.cooccurrence import Pair
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.runs.folder import LABEL_SPACE, LABELS, THRESHOLDS
from mlmoe_jax.runs.restore import read_config, read_label_space
from mlmoe_jax.runs.thresholds import read_thresholds
from mlmoe_jax.runtime.text import percent, text_table

_SHOWN = 3  # images of a printed pair


@dataclass(frozen=True)
class MeasuredPair:
    """A pair (a, b) of label names with its statistics in training and its rates in one or two runs.

    rates: one dict per run, name of RATES -> Rate. changes: name -> the shares of two runs and the interval of their
    difference; {} for one run. differing: see `label_pairs.differing_images`; () for one run.
    """

    a: str
    b: str
    training: Pair
    rates: tuple[dict[str, Rate], ...]
    changes: dict[str, Change]
    differing: tuple[DifferingImage, ...]

    @property
    def name(self) -> str:
        """The pair as --pairs takes it."""
        return f"{self.a}:{self.b}"


@dataclass(frozen=True)
class MeasuredPairs:
    """Pairs measured on one split. thresholds: where those of each run come from."""

    split: str
    thresholds: tuple[str, ...]
    pairs: tuple[MeasuredPair, ...]


def pairs_of_run(run: ComparedRun, split: str, *, pairs: str = "") -> MeasuredPairs:
    """Measure pairs on the images of a split that the run has scored; pairs: as in `pairs_of_runs`."""
    scored = run.splits[split]
    table = scored.take(scored.read)
    return _measure((run,), (table,), *table.targets(run.difficult(table.name)), pairs)


def pairs_of_runs(first: ComparedRun, second: ComparedRun, images: MatchedImages, *, pairs: str = "") -> MeasuredPairs:
    """Measure pairs in two runs on the same images, each at its own thresholds.

    pairs: as in `parse_pairs`; "" = those of `choose_pairs`, none if the first run has neither the labels of the paper
    nor statistics of its training labels. Raises UserError for a pair that is not among the labels, and for a damaged
    label space.
    """
    return _measure((first, second), (images.one, images.other), images.label, images.mask, pairs)


def _measure(
    runs: Sequence[ComparedRun], tables: Sequence[SplitScores], label: np.ndarray, mask: np.ndarray, pairs: str
) -> MeasuredPairs:
    folder, labels = runs[0].folder, runs[0].labels
    space = read_label_space(folder) if (folder / LABEL_SPACE).exists() else None
    if space is not None and set(space.names) != set(labels):
        raise UserError(f"{folder / LABEL_SPACE} is damaged: its labels are not those of {LABELS}")
    support = read_config(folder).metrics.pair_support
    names = parse_pairs(pairs, labels) if pairs else choose_pairs(labels, space, support=support)
    cuts = [_cuts(run, tables[0].name, labels) for run in runs]
    found = []
    for a, b in names:
        pair = pair_in_training((a, b), labels, space)
        rates = tuple(pair_rates(table.scores, label, mask, pair, cut) for table, cut in zip(tables, cuts, strict=True))
        changes, differing = {}, []
        if len(runs) == 2:
            differing = differing_images(*tables, label, mask, pair, tuple(cuts))
            changes = _changes(tables, rate_cells(label, mask, pair), pair.b, cuts)
        found.append(MeasuredPair(a, b, pair, rates, changes, tuple(differing)))
    return MeasuredPairs(tables[0].name, tuple(cut.origin for cut in cuts), tuple(found))


def _cuts(run: ComparedRun, split: str, labels: Sequence[str]) -> Cuts:
    stored = read_thresholds(run.folder) if (run.folder / THRESHOLDS).exists() else None
    return prediction_cuts(stored, run.threshold(split), split, labels)


def _changes(
    tables: Sequence[SplitScores], cells: dict[str, np.ndarray], b: int, cuts: Sequence[Cuts]
) -> dict[str, Change]:
    """Return the shares of both runs in each cell, and the interval of their difference."""
    first, second = (table.scores[:, b] >= cut.values[b] for table, cut in zip(tables, cuts, strict=True))
    found = {}
    for name, cell in cells.items():
        images, of_first, of_second = (int(rows.sum()) for rows in (cell, cell & first, cell & second))
        lost, gained = int((cell & first & ~second).sum()), int((cell & second & ~first).sum())
        shares = (Rate(images, of_first).share, Rate(images, of_second).share)
        found[name] = Change(*shares, *paired_interval(lost, gained, images))
    return found


# ------------------------------------------------------------------------------------------------------------ output
def as_dict(found: MeasuredPairs) -> dict[str, Any]:
    """Return measured pairs as values for JSON: fractions with all digits, runs named a and b."""
    return {
        "thresholds": dict(zip("ab", found.thresholds, strict=False)),
        "pairs": [
            {
                "pair": pair.name,
                "p_b_given_a": pair.training.p_b_given_a,
                "p_b": pair.training.p_b,
                "support": pair.training.support,
                "rates": {name: _rate_dict(pair, name) for name in RATES},
                "differing": [vars(image) | {"better": image.better} for image in pair.differing],
            }
            for pair in found.pairs
        ],
    }


def _rate_dict(pair: MeasuredPair, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"images": pair.rates[0][name].images}
    for run, of_run in zip("ab", pair.rates, strict=False):
        rate, (low, high) = of_run[name], of_run[name].interval
        found[run] = {"predicted": rate.predicted, "share": rate.share, "low": low, "high": high}
    if change := pair.changes.get(name):
        found |= {"difference": change.difference, "low": change.low, "high": change.high}
    return found


def table_rows(found: MeasuredPairs) -> list[dict[str, Any]]:
    """Return the rates and differing images of two runs as rows of the CSV of a comparison, by column name."""
    rows = []
    for pair in found.pairs:
        for name, change in pair.changes.items():
            (a_low, a_high), (b_low, b_high) = (of_run[name].interval for of_run in pair.rates)
            row = {"kind": f"pair {name}", "name": pair.name, "positives": pair.rates[0][name].images}
            row |= vars(change) | {"difference": change.difference}
            rows.append(row | {"a_low": a_low, "a_high": a_high, "b_low": b_low, "b_high": b_high})
        for image in pair.differing:
            row = {"kind": f"pair image {pair.name}", "name": image.id, "positives": int(image.present)}
            row |= {"a": image.first, "b": image.second, "difference": image.second - image.first}
            rows.append(row | {"moves": move_text(pair, image)})
    return rows


def move_text(pair: MeasuredPair, image: DifferingImage) -> str:
    """Return the change of b in an image: + if the second run is right, then the scores of b in both runs."""
    sign = "+" if image.better else "−"
    truth = "present" if image.present else "absent"
    return f"{sign} {pair.b} {100 * image.first:.0f} → {100 * image.second:.0f} % ({truth})"


def format_pairs(found: MeasuredPairs) -> str:
    """Return the pairs of two runs as a table in percent, followed by images on which the runs differ."""
    if not found.pairs:
        return "label pairs: none is known to occur together in training; name some with --pairs=LABEL:LABEL"
    lines = [
        "label pairs a:b, how often b is predicted, % [95 % interval] of the number of images",
        *(f"thresholds of {run}: {origin}" for run, origin in zip("ab", found.thresholds, strict=False)),
    ]
    rows = [["", "images", "run a", "run b", "b − a"]]
    for pair in found.pairs:
        rows.append([f"{pair.name}{_training(pair)}; the runs differ in {len(pair.differing):,} images with a"])
        for name, change in pair.changes.items():
            shares = [rate_text(of_run[name]) for of_run in pair.rates]
            images = f"{pair.rates[0][name].images:,}"
            rows.append([f"  {RATES[name]}", images, *shares, difference_text(change)])
    lines.append(text_table(rows, align="<>>><"))
    if any(pair.differing for pair in found.pairs):
        lines.append("images with a for which only one run predicts b, + if run b is right:")
    for pair in found.pairs:
        for image in pair.differing[:_SHOWN]:
            name = image.id.encode(errors="surrogateescape").decode(errors="replace")
            lines.append(f"{pair.name}  {name}  {move_text(pair, image)}{_others_text(image)}")
    return "\n".join(lines)


def rate_text(rate: Rate) -> str:
    """Return the share of a rate in percent with its interval."""
    if not rate.images:
        return "–"
    low, high = map(percent, rate.interval)
    return f"{percent(rate.share)} [{low}, {high}]"


def _training(pair: MeasuredPair) -> str:
    p = pair.training
    return "" if math.isnan(p.p_b_given_a) else f"  p(b|a) {p.p_b_given_a:.2f}, p(b) {p.p_b:.2f} in training"


def difference_text(change: Change) -> str:
    """Return a difference in percent with its interval, and * if that excludes 0."""
    if math.isnan(change.difference):
        return "–"
    value, low, high = (_signed(x) for x in (change.difference, change.low, change.high))
    return f"{value} [{low}, {high}]{' *' if change.clear else ''}"


def _signed(value: float) -> str:
    return percent(round(value, 4) + 0.0, sign="+")  # + 0.0: no sign of a negative zero


def _others_text(image: DifferingImage) -> str:
    labels = "1 other label differs" if image.others == 1 else f"{image.others} other labels differ"
    return f", and {labels}" if image.others else ""
