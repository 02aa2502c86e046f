"""Convert a batch of images to the input of the network."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float32, Real

Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class Preprocess:
    """The input format of a backbone. It is used in training, evaluation and prediction.

    Attributes:
      image_size: side of the images in pixels.
      mean: mean of each channel, for values in 0…1. `std` is the standard deviation, also for values in 0…1.
      flips: whether logits of evaluation and prediction are means over the image and its mirror image.
    """

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flips: bool = False

    def __call__(self, image: Real[ArrayLike, "b h w 3"]) -> Float32[Array, "b h w 3"]:
        """Normalize images with values in 0…255, [B,H,W,3], and return the network input f32[B,H,W,3]."""
        scaled = jnp.asarray(image).astype(jnp.float32) / 255
        return (scaled - jnp.asarray(self.mean)) / jnp.asarray(self.std)

    def batch_shapes(self, size: int, labels: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the arrays in a batch of `size` images, by name.

        `labels` is the number of labels; 0 means a batch without labels.
        """
        shapes = {
            "image": ((size, self.image_size, self.image_size, 3), jnp.uint8),
            "mask": ((size,), jnp.float32),
            "id": ((size,), jnp.int32),
        }
        if labels:
            shapes |= {name: ((size, labels), jnp.float32) for name in ("label", "label_mask")}
        return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
