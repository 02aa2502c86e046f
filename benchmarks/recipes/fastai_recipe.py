"""fastai, the recipe of its book for multi-label images (chapter 6), at 224 pixels and in batches of 32.

`fine_tune` with the book's rate and crops: four epochs for the head, then all layers. A tenth of the images is held out
for one threshold, the one of the best accuracy.
"""

from functools import partial
from pathlib import Path

import pandas as pd
import torch
from fastai.vision.all import (
    ImageDataLoaders,
    MultiCategoryBlock,
    RandomResizedCrop,
    accuracy_multi,
    load_learner,
    set_seed,
    vision_learner,
)
from task import Scores, Task, carry_out, write_losses, write_thresholds

SIDE, BATCH, RATE, FROZEN_EPOCHS = 224, 32, 3e-3, 4
MODEL = "learner.pkl"


def train(task: Task, run: Path) -> None:
    torch.set_num_threads(task.threads)
    set_seed(task.seed)
    table = pd.read_csv(Path(task.folder) / "labels.csv", keep_default_na=False)
    loaders = ImageDataLoaders.from_df(
        table,
        task.folder,
        valid_pct=0.1,
        seed=task.seed,
        label_delim=";",
        y_block=MultiCategoryBlock(vocab=task.classes),
        bs=BATCH,
        item_tfms=RandomResizedCrop(SIDE, min_scale=0.35),
    )
    metric = partial(accuracy_multi, thresh=0.2)
    weights = {"file": task.weights}
    learner = vision_learner(loaders, "tf_efficientnet_lite0", metrics=metric, pretrained_cfg_overlay=weights)
    losses = []
    with learner.no_bar():
        learner.freeze()
        learner.fine_tune(task.epochs - FROZEN_EPOCHS, base_lr=RATE, freeze_epochs=FROZEN_EPOCHS)
        losses += [float(row[0]) for row in learner.recorder.values]
        probabilities, targets = learner.get_preds()
    grid = torch.linspace(0.05, 0.95, 29)
    accuracy = [float(accuracy_multi(probabilities, targets, thresh=float(one), sigmoid=False)) for one in grid]
    write_thresholds(run, [float(grid[accuracy.index(max(accuracy))])] * len(task.classes))
    write_losses(run, losses)
    learner.path = run
    learner.export(MODEL)


def score(task: Task, run: Path, paths: list[Path]) -> Scores:
    torch.set_num_threads(task.threads)
    learner = load_learner(run / MODEL)
    with learner.no_bar():
        probabilities, _ = learner.get_preds(dl=learner.dls.test_dl(paths))
    order = [list(learner.dls.vocab).index(name) for name in task.classes]
    return zip([path.name for path in paths], probabilities.numpy()[:, order], strict=True)


if __name__ == "__main__":
    carry_out(train, score)
