"""Containers by their files: one function opens the images of any of them."""

from __future__ import annotations

import os
from fractions import Fraction

from mlmoe_jax.data.containers.files_of_splits import find_splits, find_suffix
from mlmoe_jax.data.containers.metadata_tables import METADATA, open_metadata
from mlmoe_jax.data.containers.parquet_images import open_parquet
from mlmoe_jax.data.containers.reach import open_place
from mlmoe_jax.data.containers.video import is_video, open_video
from mlmoe_jax.data.image_search import image_suffixes
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.usage import Usage


def open_images(address: str, usage: Usage, *, column: str = "", every: Fraction | None = None) -> Images | None:
    """Return the images of a container, or of all containers in a folder, in order; None if the address is neither.

    Args:
      address: a Parquet file, a tar file, a video, a table of metadata, or a folder of Parquet or tar files, see
        `reach` and `find_suffix`. A local folder that has images is no container.
      usage: the account, to which the use of the container is added.
      column: name of the column with the images, which are bytes or paths; "" finds it. Tar files have none.
      every: the seconds between frames of a video, see `open_video`.

    Raises:
      UserError: a container is damaged or has no such column, or the address cannot be reached.
    """
    if os.path.basename(address) in METADATA and ("://" in address or os.path.isfile(address)):
        return open_metadata(address, column)
    if is_video(address) and ("://" in address or os.path.isfile(address)):
        return open_video(address, usage, every)
    place = open_place(address)
    if "://" not in address and any(os.path.splitext(name)[1].lower() in image_suffixes() for name in place.names):
        return None
    match find_suffix(place):
        case ".tar":
            from mlmoe_jax.data.containers.tar import count_unused, find_shards, open_tar  # --help does without it

            if column:
                usage.notes.append(f"has no columns, so --column={column} has no effect")
            names = list(find_shards(place, usage))
            images = open_tar(place.fetch(names), names, place.folder)
            for index, name in zip(images.indexes, names, strict=True):
                count_unused(index, name, usage, texts=False)
            return images
        case ".parquet":
            usage.unit = "row"
            names = list(find_splits(place, ".parquet"))
            return open_parquet(place.fetch(names), names, place.folder, column)
    return None
