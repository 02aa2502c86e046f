"""Make the label quality scores and label issues of cleanlab, in label_quality.npz (cleanlab 2.9.0).

python tools/parity/label_quality.py
"""

from pathlib import Path

import numpy as np
from cleanlab.count import get_confident_thresholds
from cleanlab.multilabel_classification import get_label_quality_scores
from cleanlab.multilabel_classification.filter import find_multilabel_issues_per_class
from cleanlab.multilabel_classification.rank import get_label_quality_scores_per_class

IMAGES, LABELS = 97, 8


def write(folder: Path) -> None:
    draw = np.random.default_rng(0)
    codes = (draw.random((IMAGES, LABELS)) < np.linspace(0.05, 0.6, LABELS)).astype(np.int8)
    codes[:5, 0] = 1  # cleanlab needs images with each label
    scores = np.clip(draw.normal(0.3 + 0.4 * codes, 0.25), 0.001, 0.999).round(3)
    names = [np.flatnonzero(row).tolist() for row in codes]
    labels, images = get_label_quality_scores_per_class(names, scores), get_label_quality_scores(names, scores)
    ranks = {
        "label_order": np.argsort(labels, axis=None, kind="stable"),
        "image_order": np.argsort(images, kind="stable"),
    }
    issues = find_multilabel_issues_per_class(names, scores, filter_by="confident_learning", n_jobs=1)
    thresholds = get_confident_thresholds(names, scores, multi_label=True)  # of 1 − p if absent, of p if present
    found = {"issues": issues, "thresholds": thresholds}
    values = {"codes": codes, "scores": scores, "labels": labels, "images": images}
    np.savez_compressed(folder / "label_quality.npz", **values, **ranks, **found)
