"""Catalog entry of a named backbone: architecture, preprocessing, and the file with its published weights."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlmoe_jax.models.contracts import BackboneShape

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DINOV3_LICENCE = "DINOv3 License"
GATED = (DINOV3_LICENCE,)  # licences that have to be accepted on the page of the weights before they can be downloaded


@dataclass(frozen=True)
class Entry:
    """A named backbone.

    file: the name of its weights file in the package or in the cache folder; empty if no weights are published.
    address: the published location of the file. package: for weights that are installed with pip instead of
    downloaded, PACKAGE/FOLDER, the folder of `file` in an installed Python package, which comes before the cache.
    mean, std: per channel, for pixel values in 0…1. image_size: the default side of input images in pixels.
    final_norm: whether the papers read its features after the final LayerNorm. sha256: of the file, or its first
    digits, if published; the first download is pinned (checksums of the hub are always used).
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

    @property
    def gated(self) -> bool:
        """Whether the licence has to be accepted before the download, on the page that `address` begins with."""
        return self.licence in GATED


def sha256_in(file: str) -> str:
    """Return the first digits of the sha256 that PyTorch's convention puts before the suffix, as in NAME-0676ba61.pth.

    "" for a name without them.
    """
    found = re.fullmatch(r".+-([0-9a-f]{8,64})\.pth", file)
    return found[1] if found else ""


def torchvision_entry(shape: BackboneShape, file: str) -> Entry:
    """Return the entry of a backbone published by torchvision."""
    address = f"https://download.pytorch.org/models/{file}"
    return Entry(shape, IMAGENET_MEAN, IMAGENET_STD, 224, file, address, "BSD-3-Clause", sha256=sha256_in(file))
