"""Make the label quality scores of cleanlab for labels and probabilities, in label_quality.npz (cleanlab 2.9.0).

python tools/parity/label_quality.py
"""

from pathlib import Path

import numpy as np
from cleanlab.multilabel_classification import get_label_quality_scores
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
    np.savez_compressed(folder / "label_quality.npz", codes=codes, scores=scores, labels=labels, images=images, **ranks)
