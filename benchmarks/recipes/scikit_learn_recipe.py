"""scikit-learn on features: logistic regression per label, with a threshold of the best F1 in five folds.

The features are those of timm's network in float32, of images resized to 224 x 224 pixels. LogisticRegression has its
defaults, but more iterations. A label with fewer than five positives has no folds, and the threshold 0.5.
"""

from pathlib import Path

import joblib
import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import TunedThresholdClassifierCV
from task import Scores, Task, carry_out, write_thresholds

FOLDS, TOGETHER, SIDE = 5, 32, 224


def features(task: Task, paths: list[Path]) -> np.ndarray:
    torch.set_num_threads(task.threads)
    model = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()
    weights = load_file(task.weights)
    model.load_state_dict({name: value for name, value in weights.items() if not name.startswith("classifier.")})
    found = []
    with torch.inference_mode():
        for at in range(0, len(paths), TOGETHER):
            batch = torch.from_numpy(np.stack([pixels(path) for path in paths[at : at + TOGETHER]]))
            found.append(model(batch.permute(0, 3, 1, 2)).numpy())
    return np.concatenate(found)


def pixels(path: Path) -> np.ndarray:
    image = Image.open(path).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return (np.asarray(image, np.float32) - 127) / 128


def regression() -> LogisticRegression:
    return LogisticRegression(max_iter=1000)


def train(task: Task, run: Path) -> None:
    found, targets = features(task, [path for path, _ in task.rows]), np.array(task.targets)
    models, thresholds = [], []
    for target in targets.T:
        models.append(regression().fit(found, target) if target.any() else None)
        threshold = 0.5
        if target.sum() >= FOLDS:
            tuned = TunedThresholdClassifierCV(regression(), scoring="f1", cv=FOLDS).fit(found, target)
            threshold = float(tuned.best_threshold_)
        thresholds.append(threshold)
    joblib.dump(models, run / "models.joblib")
    write_thresholds(run, thresholds)


def score(task: Task, run: Path, paths: list[Path]) -> Scores:
    found = features(task, paths)
    models = joblib.load(run / "models.joblib")
    absent = np.zeros(len(paths))
    columns = [model.predict_proba(found)[:, 1] if model else absent for model in models]
    return zip([path.name for path in paths], np.stack(columns, axis=1), strict=True)


if __name__ == "__main__":
    carry_out(train, score)
