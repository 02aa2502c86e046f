"""The backbones that have a name: architecture, preprocessing, and the file that holds their published weights."""

import os
from dataclasses import dataclass
from pathlib import Path

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.vit import ViTShape

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Entry:
    """One backbone. `file` is looked for in the package, then in the cache folder; `address` is where it is published.

    mean, std: of each channel, for pixel values in 0…1. image_size: the usual input side in pixels.
    """

    shape: ViTShape
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_size: int
    file: str
    address: str
    licence: str


def _dinov2(width: int, depth: int, heads: int, size: str) -> Entry:
    shape = ViTShape(width, depth, heads, patch=14, native=518, layer_scale=1e-5, mask_token=True, position_offset=0.1)
    return Entry(
        shape,
        IMAGENET_MEAN,
        IMAGENET_STD,
        224,
        f"dinov2-{size}/model.safetensors",
        f"https://huggingface.co/facebook/dinov2-{size}/resolve/main/model.safetensors",
        "Apache-2.0",
    )


CATALOG: dict[str, Entry] = {
    "vit_digits": Entry(
        ViTShape(width=128, depth=5, heads=4, patch=8, native=64),
        (0.5, 0.5, 0.5),
        (0.25, 0.25, 0.25),
        64,
        "vit_digits.safetensors",
        "this package; configs/pretrain_digits.py makes it again",
        "Apache-2.0",
    ),
    "dinov2_vits14": _dinov2(384, 12, 6, "small"),
    "dinov2_vitb14": _dinov2(768, 12, 12, "base"),
    "dinov2_vitl14": _dinov2(1024, 24, 16, "large"),
}


def entry(name: str) -> Entry:
    """Return the entry of a backbone; UserError lists the names for an unknown one."""
    if name not in CATALOG:
        raise UserError(f"there is no backbone '{name}'; model.backbone.name is one of {', '.join(CATALOG)}")
    return CATALOG[name]


def cache_folder() -> Path:
    """Return the folder of downloaded weights: $MLMOE_CACHE, or mlmoe_jax in the user's cache folder."""
    if chosen := os.environ.get("MLMOE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlmoe_jax"


def find_weights(name: str) -> Path:
    """Return the file with the published weights of a backbone.

    Raises UserError saying which file is wanted, where it was looked for, where it is published and how to go on.
    """
    wanted = entry(name)
    candidates = [Path(__file__).parent / "files" / wanted.file, cache_folder() / wanted.file]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(
        f"the weights of {name} are not here: put the file from {wanted.address} at {candidates[-1]}, name another "
        "copy with --config.model.backbone.weights=FILE, or start on random weights with "
        "--config.model.backbone.weights=none"
    )
