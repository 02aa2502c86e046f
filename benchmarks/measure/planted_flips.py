"""Plant wrong labels in photographs, and count how many of the corrections that an audit suggests are right.

    python -m benchmarks.measure planted_flips --root=/data/VOCdevkit --out=runs/planted_flips

Sets of --images images are drawn from `train`, --sets of each size. A share of the images, --share, gets each of three
kinds of wrong labels: a label is exchanged for another, a label is missing, or a label is superfluous. Added labels are
drawn by their frequency. The labels of VOC count as right, although some of them are wrong. The audit is that of
`mlmoe data --audit` on the features of EfficientNet-Lite0; `half` suggests the opposite of each value that is less
probable instead, and `right` makes only the suggestions of the audit that are right. If all suggestions are accepted, a
new fit is measured on `val`.

OUT/planted_flips.json and .md have, for each size, the means over the sets: the numbers of wrong labels and of
suggestions, the shares of right suggestions and of wrong labels that are found, of each kind, the wrong labels that
remain if all suggestions are accepted, and the mAP with planted, with accepted and with the original labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure import photographs
from benchmarks.measure.label_selection import Images, mean_ap, read_images
from benchmarks.report import over_seeds, publish
from mlmoe_jax.apps.audit.audit import Audit, can_judge
from mlmoe_jax.apps.audit.label_quality import HALF, self_confidence
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.table import Table
from mlmoe_jax.training.logistic.penalty_search import fit_logistic

KINDS = ("exchanged", "missing", "superfluous")
RULES = ("half", "limits", "right")
MEASURES = ("images", "rule", "wrong", "suggested", "right", "found", *KINDS, "wrong if accepted")
COLUMNS = (*MEASURES, "mAP of planted", "of accepted", "of original labels")


def planted(codes: np.ndarray, share: float, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return label codes i8[N,K] with wrong labels, and the kind of each, i8[N,K]: an index of KINDS, or −1.

    Args:
      codes: label codes i8[N,K]. Only positive and negative labels are changed.
      share: the share of the images that get wrong labels of a kind.
      draw: draws the images and the labels.
    """
    wrong, kinds = codes.copy(), np.full(codes.shape, -1, np.int8)
    frequency = (codes == POSITIVE).sum(axis=0)
    count = max(1, round(share * len(codes)))
    weights = frequency * (codes == NEGATIVE)
    rows = draw.permutation(np.flatnonzero((codes == POSITIVE).any(axis=1) & weights.any(axis=1)))
    for number, row in enumerate(rows[: len(KINDS) * count]):
        kind = number // count
        removed = draw.choice(np.flatnonzero(codes[row] == POSITIVE))
        added = draw.choice(len(frequency), p=weights[row] / weights[row].sum())
        places = {"exchanged": [removed, added], "missing": [removed], "superfluous": [added]}[KINDS[kind]]
        wrong[row, places] = POSITIVE + NEGATIVE - codes[row, places]
        kinds[row, places] = kind
    return wrong, kinds


def audited(codes: np.ndarray, scores: np.ndarray) -> Audit:
    """Return the audit of label codes i8[N,K] by out-of-fold scores f64[N,K]."""
    images = ArrayImages(np.zeros((len(codes), 1, 1, 3), np.uint8))
    names = tuple(f"{k:02}" for k in range(codes.shape[1]))
    return Audit(Split("train", names, codes, [f"{row}" for row in range(len(codes))], images), scores, [], [])


def less_probable(audit: Audit) -> np.ndarray:
    """Return the labels whose opposite value is more probable, bool[N,K], of all labels with enough images."""
    confidence = self_confidence(audit.split.labels[:], audit.scores)
    return (confidence < HALF) & can_judge(audit.split)


def suggested(audit: Audit) -> np.ndarray:
    """Return the labels that the audit would change, bool[N,K]."""
    found = np.zeros(audit.split.labels.shape, bool)
    found[tuple(audit.suggestions.T)] = True
    return found


def counts(changed: np.ndarray, kinds: np.ndarray) -> dict[str, int]:
    """Return the numbers of wrong labels, of suggestions bool[N,K], and of right ones, also of each kind."""
    wrong = kinds >= 0
    right = changed & wrong
    return {
        "wrong": int(wrong.sum()),
        "suggestions": int(changed.sum()),
        "right": int(right.sum()),
        **{kind: int((right & (kinds == number)).sum()) for number, kind in enumerate(KINDS)},
        **{f"all {kind}": int((kinds == number).sum()) for number, kind in enumerate(KINDS)},
    }


def run(train: Images, val: Images, columns: np.ndarray, count: int, share: float, seed: int) -> dict:
    """Return the mAP of one set of images, with planted and original labels, and the `counts` and mAP of each rule."""
    draw = np.random.default_rng(seed)
    images = train.take(draw.permutation(len(train.codes))[:count])
    wrong, kinds = planted(images.codes, share, draw)
    fit = fit_logistic(images.features, wrong, difficult="ignore", seed=seed)
    audit = audited(wrong, fit.held_out_scores)

    def mean_precision(codes: np.ndarray) -> float:
        probe = fit_logistic(images.features, codes, seed=seed)
        return mean_ap(val, columns, probe.kernel, probe.bias)

    results = {"planted": mean_precision(wrong), "original": mean_precision(images.codes)}
    given = suggested(audit)
    for rule, changed in zip(RULES, (less_probable(audit), given, given & (kinds >= 0)), strict=True):
        accepted = np.where(changed, np.where(wrong == POSITIVE, NEGATIVE, POSITIVE), wrong)
        results[rule] = counts(changed, kinds) | {"mAP": mean_precision(accepted.astype(np.int8))}
    return results


def table(results: dict[str, list[dict]]) -> str:
    """Return the Markdown table of number of images -> the results of each set."""
    rows = []
    for images, sets in results.items():
        planted_map, original_map = (over_seeds([one[name] for one in sets]) for name in ("planted", "original"))
        for rule in RULES:
            sums = {name: sum(one[rule][name] for one in sets) for name in sets[0][rule]}
            wrong, given, right = (sums[name] for name in ("wrong", "suggestions", "right"))
            found = [f"{100 * sums[kind] / sums[f'all {kind}']:.0f} %" for kind in KINDS]
            numbers = [f"{value / len(sets):.1f}" for value in (wrong, given)]
            remaining = f"{(wrong + given - 2 * right) / len(sets):.1f}"
            precision, recall = f"{100 * right / max(1, given):.0f} %", f"{100 * right / wrong:.0f} %"
            scores = [planted_map, over_seeds([one[rule]["mAP"] for one in sets]), original_map]
            rows.append([images, rule, *numbers, precision, recall, *found, remaining, *scores])
    return Table(COLUMNS, rows).markdown()


@dataclass(frozen=True)
class Options:
    root: Path
    images: tuple[int, ...] = (60, 200, 1000)
    sets: int = 20
    share: float = 0.05
    out: Path = Path("runs/planted_flips")


def measure(options: Options) -> Iterator[str]:
    train, val = read_images(options.root)
    columns, results = photographs.frequent(options.root), {}
    for count in options.images:
        results[str(count)] = [run(train, val, columns, count, options.share, seed) for seed in range(options.sets)]
        yield publish(options.out / "planted_flips", results, table(results))
