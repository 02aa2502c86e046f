"""Photographs for a demonstration: those that come with scikit-image, which also has the license of each."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.locations import DEMO
from mlmoe_jax.runtime.text import printable

PHOTOGRAPHS = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")


def is_demo(item: str) -> bool:
    """Return whether an item of `--images` names the photographs of the demonstration."""
    return item.startswith(DEMO)


def demo_images(item: str) -> list[str]:
    """Return the paths of the photographs that `demo:photographs` names.

    Raises UserError for another name, and if scikit-image is not installed or has none of them.
    """
    if item != f"{DEMO}photographs":
        raise UserError(f"there are no images {printable(item, 100)}; there are {DEMO}photographs")
    spec = importlib.util.find_spec("skimage")  # which is not imported, because this would take a second
    folders = (spec and spec.submodule_search_locations) or []
    found = [path for folder in folders for name in PHOTOGRAPHS if (path := Path(folder) / "data" / name).is_file()]
    if not found:
        raise UserError(
            f"the images {item} are those of scikit-image, which is not installed; run `pip install scikit-image`, or "
            "name images of your own"
        )
    return [os.fspath(path) for path in found]
