"""What is known of a backbone that has a name: architecture, preprocessing, and the file with its published weights."""

from __future__ import annotations

from dataclasses import dataclass

from mlmoe_jax.models.contracts import BackboneShape

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Entry:
    """One backbone. `file` is looked for in the package, then in the cache folder; `address` is where it is published.
    Without them it has no published weights.

    package: for weights that are installed with pip instead of downloaded, PACKAGE/FOLDER, the folder of `file` in an
    installed Python package, which comes before the cache.

    mean, std: of each channel, for pixel values in 0…1. image_size: the usual input side in pixels. final_norm: whether
    the papers read its features after the last LayerNorm. sha256: of the file, where its publisher says it; otherwise
    the first download is pinned (the hub's own checksums are used in any case).
    """

    shape: BackboneShape
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_size: int
    file: str = ""
    address: str = ""
    licence: str = ""
    final_norm: bool = True
    sha256: str = ""
    package: str = ""


def torchvision_entry(shape: BackboneShape, file: str) -> Entry:
    """Return the entry of a backbone that torchvision publishes."""
    address = f"https://download.pytorch.org/models/{file}"
    return Entry(shape, IMAGENET_MEAN, IMAGENET_STD, 224, file, address, "BSD-3-Clause")
