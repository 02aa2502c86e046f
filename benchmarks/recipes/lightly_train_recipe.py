"""LightlyTrain's classification with several labels: its defaults, but a warm-up of a tenth of the steps.

The default warm-up of 500 steps is longer than these trainings. A tenth of the images is held out for its choice of the
best step. The weights are normalized as they were pretrained.
"""

import csv
import re
from pathlib import Path

import lightly_train
import torch
from lightly_train._models.timm import timm as wrapper
from task import Scores, Task, carry_out, write_losses

BATCH, WORKERS, HELD_OUT, TOGETHER = 16, 2, 10, 32
NORMALIZE = {"mean": [127 / 255] * 3, "std": [128 / 255] * 3}

# LightlyTrain 0.18.0 sizes the head for the 1,280 channels of this network's last layer, but reads the 320 before it.
wrapper._get_forward_features_fn = lambda model: wrapper._forward_features


def train(task: Task, run: Path) -> None:
    torch.set_num_threads(task.threads)
    rows = task.rows
    parts = {"train": [row for at, row in enumerate(rows) if at % HELD_OUT], "val": rows[::HELD_OUT]}
    tables = {name: str(write_table(run / f"{name}.csv", part)) for name, part in parts.items()}
    steps = task.epochs * len(parts["train"]) // BATCH
    lightly_train.train_image_classification(
        out=run / "out",
        model="timm/tf_efficientnet_lite0",
        classification_task="multilabel",
        data={**tables, "classes": dict(enumerate(task.classes)), "label_delimiter": ";"},
        steps=steps,
        batch_size=BATCH,
        num_workers=WORKERS,
        seed=task.seed,
        overwrite=True,
        model_args={"backbone_args": {"checkpoint_path": task.weights}, "lr_warmup_steps": steps // 10},
        transform_args={"normalize": NORMALIZE},
    )
    log = (run / "out" / "train.log").read_text()
    write_losses(run, list(map(float, re.findall(r"train_loss: ([\d.]+)", log))))


def write_table(path: Path, rows: list[tuple[Path, list[str]]]) -> Path:
    """Write a table that LightlyTrain reads."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image_path", "label"])
        writer.writerows([image, ";".join(labels)] for image, labels in rows)
    return path


def score(task: Task, run: Path, paths: list[Path]) -> Scores:
    torch.set_num_threads(task.threads)
    model = lightly_train.load_model(run / "out" / "exported_models" / "exported_best.pt")
    for at in range(0, len(paths), TOGETHER):
        batch = paths[at : at + TOGETHER]
        for path, found in zip(batch, model.predict_batch(list(map(str, batch)), threshold=0.0), strict=True):
            scores = dict(zip(found["labels"].tolist(), found["scores"].tolist(), strict=True))
            yield path.name, [scores.get(column, 0.0) for column in range(len(task.classes))]


if __name__ == "__main__":
    carry_out(train, score)
