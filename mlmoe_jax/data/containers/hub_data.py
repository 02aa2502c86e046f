"""Data sets on the Hugging Face hub, `hf://datasets/USER/NAME`: their files, in the cache of huggingface_hub."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import cache_folder, damage_explained, disk_errors_explained, is_file_name
from mlmoe_jax.runtime.http import TIMEOUT, NoAnswer, require_online
from mlmoe_jax.runtime.hub import Address, hub_errors_explained, open_hub, require_commit
from mlmoe_jax.runtime.progress import DownloadBar, status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.text import quantity
from mlmoe_jax.runtime.version import __version__

CONNECTIONS = 8


class Commit(NamedTuple):
    """A commit of a data set on the hub, and the paths of its files."""

    address: Address
    sha: str
    names: tuple[str, ...]


def look_up(address: Address) -> Commit:
    """Return the commit to which the revision of an address points.

    If the hub cannot be reached, it is the commit that was found last, and this is logged. Raises UserError if there is
    none, or if the data set does not exist or is not visible.
    """
    known = Folder(cache_folder() / "hub" / address.path.replace("/", "--"))
    record = f"revisions/{urllib.parse.quote(address.revision, safe='')}.json"
    try:
        require_online()
        with hub_errors_explained(address):
            about = open_hub().dataset_info(address.repository, revision=address.revision, timeout=TIMEOUT)
        names = (file.rfilename for file in about.siblings or ())
        inside = tuple(name for name in names if all(map(is_file_name, name.split("/"))))  # anybody may have written it
        commit = Commit(address, require_commit(about.sha, address), inside)
        with disk_errors_explained(known):
            known.write_text(record, json.dumps([commit.sha, commit.names]))
        return commit
    except NoAnswer as error:
        if not (known / record).exists():
            raise _unreachable(address, error) from error
        with damage_explained(known / record):
            sha, names = json.loads(known.read_text(record))
        status(f"{error}; {address} is the commit {sha[:12]}, which was found before")
        return Commit(address, sha, tuple(names))


def fetch(commit: Commit, names: Sequence[str]) -> str:
    """Return a folder with the files `names` of a commit, which are downloaded unless they are in the cache.

    Raises UserError if a download fails.
    """
    from huggingface_hub import constants, hf_hub_download

    address = commit.address
    folder = f"{constants.HF_HUB_CACHE}/datasets--{address.repository.replace('/', '--')}/snapshots/{commit.sha}"
    missing = [name for name in names if not os.path.exists(f"{folder}/{name}")]
    if not missing:
        return folder
    options = {"library_name": "mlmoe_jax", "library_version": __version__, "tqdm_class": DownloadBar}

    def download(name: str) -> None:
        with hub_errors_explained(address), disk_errors_explained(constants.HF_HUB_CACHE):
            hf_hub_download(address.repository, name, repo_type="dataset", revision=commit.sha, **options)

    try:
        require_online()
        status(f"downloading {quantity(len(missing), 'file')} of {address}, commit {commit.sha[:12]}, to {folder}")
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(download, missing))  # raises the first error
    except NoAnswer as error:
        raise _unreachable(address, error, missing[0]) from error
    return folder


def _unreachable(address: Address, error: NoAnswer, name: str = "") -> UserError:
    return UserError(
        f"{name and f'{name} of '}{address} cannot be downloaded, because {error}; try again, or download it elsewhere "
        f"with `hf download {address.repository} --repo-type=dataset --local-dir=FOLDER` and give FOLDER"
    )
