"""An attribute beside tags: digits on a background of one of four colors, as an attribute and as tags.

    python -m benchmarks.attributes FOLDER --seeds=3

Both models are linear classifiers of equal features, fitted to convergence. The features come from a random ViT,
because a ViT that was trained on digits does not see colors. The color of an image is its most probable value.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from PIL import Image

import mlmoe_jax as mm
from mlmoe_jax.data.sources.digits import SCENES_SOURCE
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.folder import RunFolder

COLORS = {"red": (190, 60, 60), "green": (60, 170, 60), "blue": (60, 60, 190), "gray": (120, 120, 120)}
COUNTS = {"train": 1000, "test": 1000}
TINT = 0.8  # the largest share of the color in a pixel


def make_images(folder: Path, seed: int) -> None:
    """Write scenes of digits with a tint, whose strength varies, and a table per split and kind of model."""
    config, random = mm.load_config("linear_probe", {"data.name": "digits"}), np.random.default_rng(seed)
    for split, count in COUNTS.items():
        scenes = SCENES_SOURCE.open(config.data, split)
        (folder / split).mkdir(parents=True, exist_ok=True)
        rows = []
        for row in range(count):
            color, share = str(random.choice([*COLORS])), TINT * random.uniform()
            pixels = (1 - share) * np.asarray(scenes.images.open(row)) + share * np.array(COLORS[color])
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{split}/{row}.png")
            labels = [scenes.classes[k] for k in np.flatnonzero(scenes.labels[row] == 1)]
            rows.append((f"{split}/{row}.png", labels, color))
        for kind in ("attribute", "tags"):
            with (folder / f"{kind}_{split}.csv").open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(["image", "labels", "color"] if kind == "attribute" else ["image", "labels"])
                for name, labels, color in rows:
                    own = [";".join(labels), color] if kind == "attribute" else [";".join([*labels, color])]
                    table.writerow([name, *own])


def main() -> None:
    """Print the accuracy of the color, and the mAP of digits and colors, for each seed and kind of model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    flags = parser.parse_args()
    for seed in range(flags.seeds):
        make_images(flags.folder / f"data{seed}", seed)
        for kind, key in (("attribute", "color"), ("tags", "")):
            settings = {
                "data.name": "csv",
                "data.root": str(flags.folder / f"data{seed}"),
                "data.table": f"{kind}_{{split}}.csv",
                "data.attributes": key,
                "data.val_split": "",
                "data.test_splits": "test",
                "eval.select_on": "none",
                "data.cache_features": "float32",
                "train.fit": "logistic",
                "loss.kind": "bce",
                "model.backbone.weights": "none",
                "seed": seed,
            }
            config = mm.load_config(
                "linear_probe:dataset=digits", {name: str(value) for name, value in settings.items()}
            )
            workdir = flags.folder / f"{kind}{seed}"
            mm.train(config, workdir)
            run = StoredRun(RunFolder(workdir))
            scored = run.split("test")
            colors = [k for k, label in enumerate(run.labels) if label.removeprefix("color: ") in COLORS]
            right = scored.scores[:, colors].argmax(axis=1) == scored.codes[:, colors].argmax(axis=1)
            ap = mm.metrics.average_precision(scored.scores, scored.codes)
            means = [100 * float(np.mean(some)) for some in (right, np.delete(ap, colors), ap[colors])]
            print(seed, kind, "accuracy {:.2f}, mAP of digits {:.2f}, mAP of colors {:.2f}".format(*means))


if __name__ == "__main__":
    main()
