"""Data sets on the Hugging Face hub, `hf://datasets/USER/NAME`: their files, in the cache of huggingface_hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from mlmoe_jax.runtime.files import is_file_name
from mlmoe_jax.runtime.http import NoAnswer, require_online
from mlmoe_jax.runtime.hub import Address, Found, download, find_last, look_up, unreachable
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import quantity

CONNECTIONS = 8


def find_commit(address: Address) -> tuple[Address, Sequence[str]]:
    """Return the commit to which an address points, and the paths of its files.

    Raises UserError as `find_last`, or if the data set does not exist or is not visible.
    """

    def find(known: Found) -> Found:
        commit, files = look_up(address)
        names = [name for name in files if all(map(is_file_name, name.split("/")))]  # anybody may have written them
        return Found(commit.revision, names)

    commit, names = find_last(address, find, "give FOLDER")
    return replace(address, revision=commit), names


def fetch(commit: Address, names: Sequence[str]) -> str:
    """Return a folder with the files `names` of a commit, which are downloaded unless they are in the cache.

    Raises UserError if a download fails.
    """
    from huggingface_hub import constants

    repository = commit.repository.replace("/", "--")
    folder = f"{constants.HF_HUB_CACHE}/datasets--{repository}/snapshots/{commit.revision}"
    if missing := [name for name in names if not os.path.exists(f"{folder}/{name}")]:
        try:
            require_online()
            status(f"downloading {quantity(len(missing), 'file')} of {commit} to {folder}")
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(partial(download, commit), missing))  # raises the first error
        except NoAnswer as error:
            raise unreachable(commit, error, "give FOLDER") from error
    return folder
