"""Catalog entry of a named backbone: architecture, preprocessing, and the file with its published weights."""

from __future__ import annotations

from dataclasses import dataclass

from mlmoe_jax.models.contracts import BackboneShape
from mlmoe_jax.models.published import PublishedFile, on_server

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


NORMALIZATIONS = {"imagenet": (IMAGENET_MEAN, IMAGENET_STD), "unit": ((0.0,) * 3, (1.0,) * 3)}


@dataclass(frozen=True)
class BackboneEntry:
    """A named backbone."""

    shape: BackboneShape
    mean: tuple[float, float, float] = IMAGENET_MEAN  # mean per channel, for pixel values in 0…1
    std: tuple[float, float, float] = IMAGENET_STD  # standard deviation per channel, for pixel values in 0…1
    image_size: int = 224  # the default side of input images in pixels
    weights: PublishedFile | None = None
    # Whether heads on prompts read the prompts after the final LayerNorm, as in the papers; see
    # `build.reads_final_norm`
    final_norm: bool = True
    resize: str = "square"  # how images get their size in the authors' code, a value of `data.resize`

    @property
    def images(self) -> dict[str, int | str]:
        """The values of keys of `data` that make images as published, which the vectors of names were trained with."""
        return {"image_size": self.image_size, "resize": self.resize}

    def normalization(self, name: str) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Return the mean and the standard deviation per channel by a value of `model.backbone.normalization`."""
        return NORMALIZATIONS.get(name, (self.mean, self.std))

    @property
    def repository(self) -> str | None:
        """The repository of the weights on the Hugging Face Hub; None if they are not there."""
        return (self.weights and self.weights.repository) or None


def torchvision_entry(shape: BackboneShape, file: str) -> BackboneEntry:
    """Return the entry of a backbone published by torchvision."""
    return BackboneEntry(shape, weights=on_server(f"https://download.pytorch.org/models/{file}", "BSD-3-Clause"))
