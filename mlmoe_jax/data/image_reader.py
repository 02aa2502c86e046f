"""From an image file to the array of a batch: decoding, orientation, resizing, and augmentation in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.data import randaugment, transforms
from mlmoe_jax.data.images import BadImage, Decoding, Images, open_image
from mlmoe_jax.data.randaugment import Policy

CROP_RATIOS = (3 / 4, 4 / 3)  # range of width / height in the Inception crop


@dataclass(frozen=True)
class Geometry:
    """Convert an image of any size to S × S pixels. The fields are keys of `config.data` and `config.augment`.

    Attributes:
      fit: square | crop | random_resized_crop | multi_scale_crop.
    """

    image_size: int
    fit: str
    crop_fraction: float
    crop_scale: tuple[float, float] = (1.0, 1.0)
    margin: int = 0

    @property
    def short_side(self) -> int:
        """The short side in pixels before the center crop."""
        return round(self.image_size / self.crop_fraction)

    @property
    def fixed_side(self) -> int:
        """The side in pixels of the images that `fixed` returns, 0 if it does not resize images."""
        if self.fit in ("square", "crop"):
            return self.image_size
        return self.image_size + self.margin if self.fit == "multi_scale_crop" and self.margin else 0

    @property
    def smallest_useful_side(self) -> int:
        """The smallest short side in pixels to which an image can be decoded so that the resize never enlarges it.

        0 means the full size, for a random crop from the decoded image.
        """
        return self.short_side if self.fit == "crop" else self.fixed_side

    def fixed(self, image: np.ndarray | Image.Image) -> np.ndarray:
        """Return the result of the deterministic part."""
        if self.fit == "crop":
            return transforms.resize_and_crop(np.asarray(image), self.short_side, self.image_size)
        return transforms.resize_square(image, self.fixed_side) if self.fixed_side else np.asarray(image)

    def varied(self, image: np.ndarray, random: np.random.Generator | None) -> np.ndarray:
        """Return the image u8[S,S,3] for a result of `fixed`, after random crops."""
        if self.fit == "random_resized_crop":
            return transforms.random_resized_crop(image, random, self.image_size, self.crop_scale, CROP_RATIOS)
        return transforms.multi_scale_crop(image, random, self.image_size) if self.fit == "multi_scale_crop" else image


@dataclass(frozen=True)
class PixelTransforms:
    """Transforms that keep the size, with strengths from `config.augment`.

    Attributes:
      policy: the policy of RandAugment, or None.
    """

    flip: bool = False
    shift: float = 0.0
    contrast: float = 0.0
    brightness: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    jitter_order: str = "fixed"
    cutout: float = 0.0
    erase: float = 0.0
    policy: Policy | None = None

    def __call__(self, image: np.ndarray, random: np.random.Generator | None) -> np.ndarray:
        """Return the transformed image u8[h,w,3] for u8[h,w,3]."""
        if self.flip:
            image = transforms.flip(image, random)
        shift, cutout = (transforms.shift, self.shift), (transforms.cutout, self.cutout)
        for transform, strength in (shift, *self._jitter(random), cutout):
            if strength:
                image = transform(image, random, strength)
        image = randaugment.apply(image, random, self.policy) if self.policy else image
        return transforms.erase(image, random, self.erase) if self.erase else image

    def _jitter(self, random: np.random.Generator | None) -> list[tuple[Callable[..., np.ndarray], float]]:
        """Return the transforms of the color jitter and their strengths, in the order for one image."""
        names = ("contrast", "brightness", "saturation", "hue")
        jitter = [(getattr(transforms, name), getattr(self, name)) for name in names]
        if self.jitter_order == "fixed":
            return jitter
        return [jitter[place] for place in random.permutation(len(jitter))]


@dataclass(frozen=True)
class ImageReader:
    """Read images as model inputs u8[S,S,3]; can be pickled for worker processes.

    `fixed` is the deterministic part, whose result a cache can store. `varied` is the rest, with all random transforms.
    """

    decoding: Decoding
    geometry: Geometry
    pixels: PixelTransforms = PixelTransforms()
    skip: bool = False  # return None for an image that cannot be read, instead of raising BadImage

    @classmethod
    def of(cls, data_config: ConfigDict, augment: ConfigDict | None = None) -> ImageReader:
        """Return the reader for `config.data`, and for `config.augment` in training."""
        size, fraction = data_config.image_size, data_config.crop_fraction
        geometry, pixels = Geometry(size, data_config.resize, fraction), PixelTransforms()
        if augment is not None:
            if augment.geometry != "none":
                geometry = Geometry(size, augment.geometry, fraction, tuple(augment.crop_scale), augment.margin)
            strengths = {field.name: augment[field.name] for field in fields(PixelTransforms) if field.name in augment}
            pixels = PixelTransforms(**strengths, policy=randaugment.make_policy(augment))
        least = geometry.smallest_useful_side if data_config.reduced_decoding else 0
        return cls(Decoding.of(data_config, least), geometry, pixels, data_config.bad_images == "skip")

    def __call__(self, images: Images, row: int, random: np.random.Generator | None = None) -> np.ndarray | None:
        """Read an image. Evaluation needs no random generator."""
        image = self.fixed(images, row)
        return None if image is None else self.varied(image, random)

    def fixed(self, images: Images, row: int) -> np.ndarray | None:
        """Decode an image, and resize it unless it gets a random crop."""
        try:
            return self.geometry.fixed(images.open(row, self.decoding))
        except BadImage:
            if not self.skip:
                raise
            return None

    def varied(self, image: np.ndarray, random: np.random.Generator | None = None) -> np.ndarray:
        """Return u8[S,S,3] for an image that `fixed` returned."""
        return np.ascontiguousarray(self.pixels(self.geometry.varied(image, random), random))

    def encoded(self, content: bytes, name: str = "") -> np.ndarray:
        """Read the bytes of an image file for evaluation. Raises BadImage with `name`."""
        return self.varied(self.geometry.fixed(open_image(content, name=name, decoding=self.decoding)))
