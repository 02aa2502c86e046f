"""Photographs for the suites that read files: the files of --photos, or smooth random images."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.suites.cases import Settings

LABELS = 5


@contextlib.contextmanager
def photo_files(settings: Settings, most: int) -> Iterator[list[str]]:
    """Yield the paths of at most `most` JPEG files: of --photos, or temporary random images of 640×480."""
    if settings.photos:
        files = sorted(str(path) for path in settings.photos.rglob("*.jpg"))[:most]
        if not files:
            raise SystemExit(f"--photos={settings.photos} holds no .jpg file")
        yield files
        return
    with tempfile.TemporaryDirectory() as folder:
        draw, files = np.random.default_rng(0), []
        for number in range(16 if settings.quick else most):
            image = Image.fromarray(draw.integers(0, 256, (48, 64, 3), dtype=np.uint8))
            files.append(f"{folder}/{number}.jpg")
            image.resize((640, 480), Image.Resampling.BICUBIC).save(files[-1], quality=90)
        yield files


@contextlib.contextmanager
def labeled_folder(settings: Settings, most: int) -> Iterator[Path]:
    """Yield a data set as configs/own_csv.py reads it: links to the files of `photo_files`, with random labels."""
    with photo_files(settings, most) as files, tempfile.TemporaryDirectory() as name:
        folder, draw, rows = Path(name), np.random.default_rng(0), ["image,labels"]
        for number, file in enumerate(files):
            (folder / f"{number}.jpg").symlink_to(Path(file).resolve())
            labels = np.flatnonzero(draw.random(LABELS) < 0.4)
            rows.append(f"{number}.jpg,{';'.join(f'label{label}' for label in labels)}")
        (folder / "labels.csv").write_text("\n".join(rows) + "\n")
        yield folder


def small_training(folder: Path) -> tuple[str, dict[str, str]]:
    """Return a config with keys for a tiny training on a folder, with a backbone with random weights."""
    keys = {"train.batch_size": "4", "eval.batch_size": "4", "train.epochs": "2", "train.log_every": "1"}
    keys["model.backbone.weights"] = "none"
    return f"own_csv:root={folder},backbone=vit_digits,resolution=32", keys
