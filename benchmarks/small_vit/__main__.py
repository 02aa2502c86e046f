"""Distill a ViT-Ti/16 at 160 px from EfficientNet-Lite2 on photographs, and compare linear probes on both.

    python -m benchmarks.small_vit --root=/data/VOCdevkit --weights=efficientnet-lite2.pth --out=runs/small_vit

root: a data set in the layout of VOC 2012 with the splits `train` and `val`. Labels are used by the probes only.

The teacher encodes views of the photographs of `train` once: each whole photograph, and crops of it. A sample is a
crop of a view: each patch of the ViT regresses the teacher's features at its place, interpolated between the cells of
its map; the class token regresses their mean over the crop, and predicts the teacher's probabilities of the 1,000
classes of ImageNet for that mean. During the first part of the training, half of the patches are dropped.

The state is saved every few minutes; rerun the same command to resume. The results are OUT/results.json and
OUT/student.safetensors, the moving average of the ViT's parameters.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from flax import nnx
from PIL import Image
from safetensors.numpy import save_file

import mlmoe_jax as mm
from benchmarks.photographs import frequent
from benchmarks.small_vit.probes import features_of, probe
from benchmarks.small_vit.student import SHAPE, normalized
from benchmarks.small_vit.teacher import SIDE, TEACHER, said_by_teacher
from benchmarks.small_vit.training import BATCH, distill
from mlmoe_jax.apps.cli.large_pages import use_large_pages
from mlmoe_jax.data.sources.voc import open_voc
from mlmoe_jax.data.split import POSITIVE
from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.models.params import ModelDef


def main() -> None:
    flags = parse()
    flags.out.mkdir(parents=True, exist_ok=True)
    splits = {name: open_voc(flags.root, 2012, name) for name in ("train", "val")}
    images = {name: [Image.fromarray(pixels) for pixels in split.images] for name, split in splits.items()}
    columns = frequent(flags.root)
    labels = {name: split.labels[:, columns] == POSITIVE for name, split in splits.items()}
    targets = said_by_teacher(images["train"], flags.weights, flags.out / "teacher.npz")
    definition, average = distill(images["train"], targets, flags.samples // BATCH, flags.out)
    student = definition.merge(average).vit
    write(student, flags.out / "student.safetensors")
    results = {}
    for name, backbone, prepare, side in compared(student, flags.weights):
        found = {part: features_of(backbone, prepare, of, side) for part, of in images.items()}
        results[name] = probe(found["train"], labels["train"], found["val"], labels["val"])
        print(f"{name}: mAP {100 * results[name]['mAP']:.2f}", flush=True)
    (flags.out / "results.json").write_text(json.dumps(results | {"samples": flags.samples}, indent=1))


def parse() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="the VOCdevkit folder")
    parser.add_argument("--samples", type=int, default=480_000, help="crops to train on")
    parser.add_argument("--weights", required=True, help="the file of EfficientNet-Lite2 with its classifier")
    parser.add_argument("--out", type=Path, default=Path("runs/small_vit"))
    return parser.parse_args()


def compared(student: ViT, weights: str) -> list[tuple]:
    """Return the name of each backbone of the comparison, the backbone, its preprocessing, and its image size."""
    teacher = mm.load_backbone(TEACHER, weights=weights)
    return [
        ("teacher", teacher, teacher.preprocess, SIDE),
        ("teacher at 160 px", teacher, teacher.preprocess, SHAPE.native),
        ("student", student, normalized, SHAPE.native),
        ("untrained student", ViT(SHAPE, rngs=nnx.Rngs(0)), normalized, SHAPE.native),
    ]


def write(student: ViT, path: Path) -> None:
    """Write the ViT's parameters as float16."""
    _, values, _ = ModelDef.split(student)
    save_file({name: np.asarray(value, np.float16) for name, value in values.items()}, path)


if __name__ == "__main__":
    use_large_pages()
    main()
