"""Data sets on the Hugging Face hub, `hf://datasets/USER/NAME`: their files, in the cache of huggingface_hub."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from mlmoe_jax.runtime.files import cache_folder, damage_explained, disk_errors_explained, is_file_name
from mlmoe_jax.runtime.http import NoAnswer, require_online
from mlmoe_jax.runtime.hub import Address, download, look_up, unreachable
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.text import quantity

CONNECTIONS = 8


def find_commit(address: Address) -> tuple[Address, list[str]]:
    """Return the commit to which an address points, and the paths of its files.

    If the hub cannot be reached, it is the commit that was found last, and this is logged. Raises UserError if there is
    none, or if the data set does not exist or is not visible.
    """
    known = Folder(cache_folder() / "hub" / address.path.replace("/", "--"))
    record = f"revisions/{urllib.parse.quote(address.revision, safe='')}.json"
    try:
        commit, files = look_up(address)
    except NoAnswer as error:
        if not (known / record).exists():
            raise unreachable(address, error, "give FOLDER") from error
        with damage_explained(known / record):
            sha, names = json.loads(known.read_text(record))
        status(f"{error}; {address} is the commit {sha[:12]}, which was found before")
        return replace(address, revision=sha), names
    names = [name for name in files if all(map(is_file_name, name.split("/")))]  # anybody may have written them
    with disk_errors_explained(known):
        known.write_text(record, json.dumps([commit.revision, names]))
    return commit, names


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
