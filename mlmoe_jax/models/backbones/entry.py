"""Catalog entry of a named backbone: architecture, preprocessing, and the file with its published weights."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlmoe_jax.models.contracts import BackboneShape

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DINOV3_LICENSE = "DINOv3 License"
GATED = (DINOV3_LICENSE,)  # licenses that have to be accepted on the page of the weights before the download


@dataclass(frozen=True)
class BackboneEntry:
    """A named backbone.

    Attributes:
      shape: the architecture.
      mean: mean per channel, for pixel values in 0…1.
      std: standard deviation per channel, for pixel values in 0…1.
      image_size: the default side of input images in pixels.
      file: the name of the weights file in the package or in the cache folder; empty if no weights are published.
      address: the published location of the file.
      license: the license of the weights.
      final_norm: whether heads on prompts read the prompts after the final LayerNorm, as in the papers; see
        `build.reads_final_norm`.
      sha256: the published sha256 of the file, or its first digits. If empty, the sha256 of the first download is
        stored, and later downloads must have this sha256. Checksums of the Hugging Face Hub are always checked.
      package: PACKAGE/FOLDER of an installed Python package that contains the file; empty if no pip package contains
        it. This folder is searched before the cache.
    """

    shape: BackboneShape
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_size: int
    file: str = ""
    address: str = ""
    license: str = ""
    final_norm: bool = True
    sha256: str = ""
    package: str = ""

    @property
    def gated(self) -> bool:
        """Whether a user must accept the license before the download, on the page of the repository in `address`."""
        return self.license in GATED


def sha256_in(file: str) -> str:
    """Return the first digits of a sha256 in a file name, such as "0676ba61" for NAME-0676ba61.pth; "" if none."""
    match = re.fullmatch(r".+-([0-9a-f]{8,64})\.pth", file)
    return match[1] if match else ""


def torchvision_entry(shape: BackboneShape, file: str) -> BackboneEntry:
    """Return the entry of a backbone published by torchvision."""
    address = f"https://download.pytorch.org/models/{file}"
    return BackboneEntry(shape, IMAGENET_MEAN, IMAGENET_STD, 224, file, address, "BSD-3-Clause", sha256=sha256_in(file))
