"""Make the thresholds of mapie's conformal risk control for recall, in risk_control.npz (mapie 1.6.0).

python tools/parity/risk_control.py
"""

from pathlib import Path

import numpy as np
from mapie.risk_control import MultiLabelClassificationController

IMAGES, LABELS = 83, 7
MISS_RATES = (0.03, 0.1, 0.25)
BELOW = 1e-12  # mapie predicts scores above a threshold, and we predict scores from it on


def write(folder: Path) -> None:
    draw = np.random.default_rng(0)
    labels = draw.random((IMAGES, LABELS)) < 0.3
    labels[np.arange(IMAGES), draw.integers(0, LABELS, IMAGES)] = True  # mapie takes no image without a label
    scores = np.clip(draw.normal(0.35 + 0.3 * labels, 0.2), 0, 1).round(2)
    thresholds, bounds = [], []
    for miss_rate in MISS_RATES:
        controller = MultiLabelClassificationController(
            predict_function=lambda given: given,
            risk="recall",
            method="crc",
            target_level=1 - miss_rate,
            predict_params=np.unique(scores) - BELOW,
        )
        controller.calibrate(scores, labels.astype(int))
        (threshold,) = controller.best_predict_param
        thresholds.append(threshold + BELOW)
        bounds.append(controller.r_hat_plus[controller.predict_params == threshold][0])
    arrays = {"scores": scores, "labels": labels, "miss_rates": MISS_RATES, "thresholds": thresholds, "bounds": bounds}
    np.savez(folder / "risk_control.npz", **arrays)
