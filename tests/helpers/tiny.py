"""The tiny backbone and the few scenes of digits on which tests train: the only place where they are put in."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from mlmoe_jax.data.sources import digits
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.catalog import BackboneEntry
from mlmoe_jax.models.backbones.resnet import ResNetShape
from mlmoe_jax.models.backbones.vit import ViT

NAME = "vit_digits"
SCENES = {"train": 200, "val": 60, "test": 70, "test_shift": 70}
FEW = {"train": 60, "val": 40, "test": 40, "test_shift": 40}
# name -> shape and file: a ViT of four patches, and the smallest of all.
BACKBONES = {
    NAME: {"patch": 32, "file": "small.safetensors"},
    "tiny": {"width": 8, "depth": 1, "patch": 4, "native": 8, "mlp_ratio": 1, "file": "tiny.safetensors"},
}
_PUBLISHED = catalog.CATALOG[NAME]


def entry(*, file: str = _PUBLISHED.weights.name, **shape) -> BackboneEntry:
    """Return the catalogue's `vit_digits` with two blocks of width 16, or as `shape` says, its weights in `file`."""
    narrow = {"width": 16, "depth": 2, "heads": 2, **shape}
    weights = replace(_PUBLISHED.weights, name=file)
    return replace(_PUBLISHED, shape=replace(_PUBLISHED.shape, **narrow), weights=weights)


def use_vit(monkeypatch: pytest.MonkeyPatch | None = None, /, *, name: str = NAME, **options) -> None:
    """Let `name` be the tiny backbone: until `monkeypatch` is undone, or without one for the rest of the process.

    options: as in `entry`.
    """
    (monkeypatch or pytest.MonkeyPatch()).setitem(catalog.CATALOG, name, entry(**options))


def use_scenes(monkeypatch: pytest.MonkeyPatch | None = None, **counts: int) -> None:
    """Let digits have few scenes: `SCENES`, or as many as `counts` says; `monkeypatch` as in `use_vit`."""
    (monkeypatch or pytest.MonkeyPatch()).setattr(digits, "SCENES", counts or SCENES)


def use(monkeypatch: pytest.MonkeyPatch | None = None, /) -> None:
    """Let digits have the scenes `FEW`, and all `BACKBONES` and `resnet101` be small; `monkeypatch` as in `use_vit`."""
    use_scenes(monkeypatch, **FEW)
    for name, options in BACKBONES.items():
        use_vit(monkeypatch, name=name, **options)
    small = replace(catalog.CATALOG["resnet101"], shape=ResNetShape((1, 1), stem=4))
    (monkeypatch or pytest.MonkeyPatch()).setitem(catalog.CATALOG, "resnet101", small)


def write_cache(folder: Path) -> None:
    """Write a cache folder with the weights of all `BACKBONES`."""
    for options in BACKBONES.values():
        write_weights(folder / options["file"], entry(**options), seed=5)


def write_weights(path: Path, entry: BackboneEntry, seed: int = 0) -> None:
    """Write a file of weights drawn in numpy for a ViT, as those in the package are written."""
    vit, draw = nnx.eval_shape(lambda: ViT(entry.shape, rngs=nnx.Rngs(0))), np.random.default_rng(seed)
    shapes = {"/".join(map(str, path)): value.shape for path, value in nnx.to_flat_state(nnx.state(vit))}
    tensors = {name: draw.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
