"""Small text towers and tokenizers: those of `tools/parity/text_towers.py`, in the form of the catalog."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.paths import PARITY
from helpers.twins import below, write_weights
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.text import catalog as text_catalog
from mlmoe_jax.models.text.catalog import text_entry
from mlmoe_jax.models.text.entry import TextEntry
from tools.parity import text_towers as twins

ARRAYS = np.load(PARITY / "text_towers.npz")
BACKBONES = {"clip_quick_gelu": "clip_vitb16", "clip_gelu": "openclip_vitb16_laion2b", "siglip2": "siglip2_vitb16_224"}


def small_entry(name: str) -> TextEntry:
    """Return the entry of the backbone that a twin stands for, with the sizes of the twin."""
    entry, sizes = text_entry(BACKBONES[name]), dict(twins.SIZES)
    sizes |= {"output": 16} if name == "siglip2" else {"image_width": 16}
    return replace(entry, shape=replace(entry.shape, **sizes, vocabulary=twins.VOCABULARY))


def tokenizer_file(name: str) -> Path:
    """Return the file of the tokenizer of a twin."""
    return PARITY / f"text_{name.partition('_')[0]}.json"


def arrays_of(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a twin."""
    return below(ARRAYS, f"{name}/")


def weights_file(folder: Path, name: str) -> Path:
    """Write the whole model of a twin as the published file in the layout of transformers, and return its path."""
    return write_weights(folder / "model.safetensors", arrays_of(name))


def use_twin(patch: pytest.MonkeyPatch, cache: Path, name: str, backbone: str = "") -> str:
    """Let a backbone, by default the one that a twin stands for, and its text tower be the twin; return its name.

    Its files are written to `cache`, which becomes the cache folder, until `patch` is undone.
    """
    backbone, text = backbone or BACKBONES[name], small_entry(name)
    vision = catalog.CATALOG[backbone]
    sizes = {"width": 16, "depth": 1, "heads": 2, "patch": 7, "native": 28, "mlp_ratio": 1.5}
    small = replace(vision, shape=replace(vision.shape, **sizes), image_size=28, weights=text.weights)
    patch.setitem(catalog.CATALOG, backbone, small)
    patch.setitem(text_catalog.TEXT_CATALOG, backbone, text)
    patch.setenv("MLMOE_CACHE", str(cache))
    cache.mkdir(exist_ok=True)
    for file, content in (
        (text.weights.name, weights_file(cache, name).read_bytes()),
        (text.tokenizer.name, tokenizer_file(name).read_bytes()),
    ):
        (cache / file).parent.mkdir(parents=True, exist_ok=True)
        (cache / file).write_bytes(content)
    return backbone
