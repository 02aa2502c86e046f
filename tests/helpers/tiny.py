"""The tiny backbone and the few scenes of digits on which tests train: the only place where they are put in."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from mlmoe_jax.config import default_config
from mlmoe_jax.data.sources import digits
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.catalog import BackboneEntry
from mlmoe_jax.models.backbones.vit import ViT

NAME = "vit_digits"
SCENES = {"train": 200, "val": 60, "test": 70, "test_shift": 70}
_PUBLISHED = catalog.CATALOG[NAME]


def entry(*, file: str = _PUBLISHED.file, **shape) -> BackboneEntry:
    """Return the catalogue's `vit_digits` with two blocks of width 16, or as `shape` says, its weights in `file`."""
    narrow = {"width": 16, "depth": 2, "heads": 2, **shape}
    return replace(_PUBLISHED, shape=replace(_PUBLISHED.shape, **narrow), file=file)


def use_vit(monkeypatch: pytest.MonkeyPatch | None = None, /, *, name: str = NAME, **options) -> None:
    """Let `name` be the tiny backbone: until `monkeypatch` is undone, or without one for the rest of the process.

    options: as in `entry`.
    """
    (monkeypatch or pytest.MonkeyPatch()).setitem(catalog.CATALOG, name, entry(**options))


def use_scenes(monkeypatch: pytest.MonkeyPatch | None = None, **counts: int) -> None:
    """Let digits have few scenes: `SCENES`, or as many as `counts` says; `monkeypatch` as in `use_vit`."""
    (monkeypatch or pytest.MonkeyPatch()).setattr(digits, "SCENES", counts or SCENES)


def small_training(monkeypatch: pytest.MonkeyPatch) -> ConfigDict:
    """Return a linear probe on few scenes of digits: two epochs of three steps, with a row of the log per step."""
    use_scenes(monkeypatch, train=60, val=40, test=40, test_shift=40)
    use_vit(monkeypatch, patch=32)
    config = default_config()
    config.model.backbone.weights, config.data.test_splits = "none", ("test",)
    config.train.epochs, config.train.batch_size, config.train.log_every = 2, 20, 1
    config.eval.batch_size, config.ema.decay, config.log.tensorboard = 40, 0.9, False
    return config


def write_weights(path: Path, entry: BackboneEntry, seed: int = 0) -> None:
    """Write a file of weights drawn in numpy for a ViT, as those in the package are written."""
    vit, draw = nnx.eval_shape(lambda: ViT(entry.shape, rngs=nnx.Rngs(0))), np.random.default_rng(seed)
    shapes = {"/".join(map(str, path)): value.shape for path, value in nnx.to_flat_state(nnx.state(vit))}
    tensors = {name: draw.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
