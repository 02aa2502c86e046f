"""Containers by their files: one function opens the images of any of them."""

from __future__ import annotations

from mlmoe_jax.data.containers.files_of_splits import find_splits
from mlmoe_jax.data.containers.parquet import open_parquet
from mlmoe_jax.data.containers.reach import open_place
from mlmoe_jax.data.containers.tar import find_shards, open_tar
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.usage import Usage


def open_images(address: str, usage: Usage, *, column: str = "") -> Images | None:
    """Return the images of a container, or of all containers in a folder, in order; None if the address is neither.

    Args:
      address: a tar file, a Parquet file, or a folder of such files, see `reach`. If a folder has tar files, only these
        are read.
      usage: the account, to which the use of the container is added.
      column: name of the column with the images, which are bytes or paths, or the field of a tar file; "" finds it.

    Raises:
      UserError: a container is damaged or has no such column, or the address cannot be reached.
    """
    place = open_place(address)
    if names := list(find_shards(place, usage)):
        return open_tar(place.fetch(names), names, usage, column, title=place.folder)
    names = list(find_splits(place, ".parquet"))
    return open_parquet(place.fetch(names), names, usage, column, title=place.folder) if names else None
