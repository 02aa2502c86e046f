"""From an image file to the array of a batch: decoding, orientation, resizing, and augmentation in training."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from ml_collections import ConfigDict
from numpy.random import Generator
from PIL import Image

from mlmoe_jax.data import randaugment, transforms
from mlmoe_jax.data.decoding import BadImage, Decoding, has_frames, open_image
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.randaugment import Policy

CROP_RATIOS = (3 / 4, 4 / 3)  # range of width / height in the Inception crop
JITTER = ("contrast", "brightness", "saturation", "hue")  # transforms, and their strengths in `PixelTransforms`


@dataclass(frozen=True)
class Geometry:
    """A conversion of images of any size to S × S pixels. The fields are keys of `config.data` and `config.augment`.

    Attributes:
      image_size: S.
      fit: `square` (`transforms.resize_square`), `crop` or `clip` (`transforms.resize_and_crop`), `pad`
        (`transforms.resize_and_pad`), or a random crop, `random_resized_crop` or `multi_scale_crop` of `transforms`.
      crop_fraction: for `crop`, S divided by the short side of the resized image.
      crop_scale: for `random_resized_crop`, the range of the area of the crop as a fraction of the image.
      margin: for `multi_scale_crop`, the image is first resized to a square with sides S + `margin`; 0 skips this
        resize.
      fill: for `pad`, the color of the border, with values in 0…1.
    """

    image_size: int
    fit: str
    crop_fraction: float
    crop_scale: tuple[float, float] = (1.0, 1.0)
    margin: int = 0
    fill: tuple[float, ...] = ()

    @property
    def short_side(self) -> int:
        """The short side of the resized image before the center crop, in pixels."""
        return round(self.image_size / self.crop_fraction)

    @property
    def smallest_useful_side(self) -> int:
        """The least short side in pixels to which decoding may reduce a JPEG.

        0 means full size, which random crops need, unless the image is resized before the crop.
        """
        match self.fit:
            case "square" | "clip" | "pad":  # for pad, the long side would be enough
                return self.image_size
            case "crop":
                return self.short_side
            case "multi_scale_crop" if self.margin:
                return self.image_size + self.margin
        return 0

    def __call__(self, image: np.ndarray | Image.Image, random: Generator | None = None) -> np.ndarray:
        """Return an image as u8[S,S,3]. `random` is used by random crops only."""
        size = self.image_size
        match self.fit:
            case "square":
                return transforms.resize_square(image, size)
            case "crop":
                return transforms.resize_and_crop(np.asarray(image), self.short_side, size)
            case "clip":
                return transforms.resize_and_crop(np.asarray(image), size, size, clip=True)
            case "pad":
                return transforms.resize_and_pad(image, size, self.fill)
            case "random_resized_crop":
                return transforms.random_resized_crop(np.asarray(image), random, size, self.crop_scale, CROP_RATIOS)
        resized = transforms.resize_square(image, size + self.margin) if self.margin else np.asarray(image)
        return transforms.multi_scale_crop(resized, random, size)


@dataclass(frozen=True)
class PixelTransforms:
    """Transforms that do not change the size of an image. The fields are keys of `config.augment`.

    Attributes:
      flip: whether to mirror the image left to right with probability 1/2.
      contrast: strength of `transforms.contrast`; 0 disables it. `brightness`, `saturation` and `hue` are the strengths
        of the transforms with these names.
      jitter_order: `fixed` applies contrast, brightness, saturation and hue in this order. Otherwise their order is
        random for each image.
      cutout: side of the square of `transforms.cutout`, as a fraction of the height.
      erase: probability of `transforms.erase`.
      policy: the policy of RandAugment; None disables it.
    """

    flip: bool = False
    contrast: float = 0.0
    brightness: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    jitter_order: str = "fixed"
    cutout: float = 0.0
    erase: float = 0.0
    policy: Policy | None = None

    def __call__(self, image: np.ndarray, random: Generator | None) -> np.ndarray:
        """Apply all transforms to an image u8[h,w,3]."""
        if self.flip:
            image = transforms.flip(image, random)
        order = range(len(JITTER)) if self.jitter_order == "fixed" else random.permutation(len(JITTER))
        for name in [JITTER[k] for k in order]:
            if strength := getattr(self, name):
                image = getattr(transforms, name)(image, random, strength)
        if self.cutout:
            image = transforms.cutout(image, random, self.cutout)
        image = randaugment.apply(image, random, self.policy) if self.policy else image
        return transforms.erase(image, random, self.erase) if self.erase else image


@dataclass(frozen=True)
class ImageReader:
    """A reader of images as model inputs u8[S,S,3], which can be pickled for worker processes.

    With `skip`, it returns None for an image that cannot be read. Otherwise BadImage is raised.
    """

    decoding: Decoding
    geometry: Geometry
    pixels: PixelTransforms = PixelTransforms()
    skip: bool = False

    @classmethod
    def from_config(cls, data_config: ConfigDict, augment: ConfigDict | None = None) -> ImageReader:
        """Return a reader for evaluation, or for training if `augment` (`config.augment`) is given."""
        size, fraction = data_config.image_size, data_config.crop_fraction
        geometry = Geometry(size, data_config.resize, fraction, fill=tuple(data_config.fill))
        pixels = PixelTransforms()
        if augment is not None:
            if augment.geometry != "none":
                geometry = Geometry(size, augment.geometry, fraction, tuple(augment.crop_scale), augment.margin)
            strengths = {field.name: augment[field.name] for field in fields(PixelTransforms) if field.name in augment}
            pixels = PixelTransforms(**strengths, policy=randaugment.POLICIES[augment.randaugment])
        least = geometry.smallest_useful_side if data_config.reduced_decoding else 0
        return cls(Decoding.from_config(data_config, least), geometry, pixels, data_config.bad_images == "skip")

    def __call__(self, images: Images, row: int, random: Generator | None = None) -> np.ndarray | None:
        """Return image `row` as u8[S,S,3], or None, see `skip`. `random` is needed in training only."""
        try:
            image = self.geometry(images.open(row, self.decoding), random)
        except BadImage:
            if not self.skip:
                raise
            return None
        return np.ascontiguousarray(self.pixels(image, random))

    def encoded(self, content: bytes, name: str = "") -> tuple[np.ndarray, bool]:
        """Decode the bytes of an image file for evaluation to u8[S,S,3], and return also its `has_frames`.

        A BadImage error calls the file `name`.
        """
        image = self.geometry(open_image(content, name=name, decoding=self.decoding))
        return np.ascontiguousarray(self.pixels(image, None)), has_frames(content)
