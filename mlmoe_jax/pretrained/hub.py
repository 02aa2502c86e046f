"""Files of models on the Hugging Face hub: weights of backbones, and trained models (`hf:user/name@revision`).

The content of a repository may come from anybody. Of a trained model, only files with known names are downloaded, each
and only up to a fixed size, into a cache folder that is named by the commit. All other content is ignored.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import cache_folder, disk_errors_explained, file_sha256
from mlmoe_jax.runtime.http import TIMEOUT, NoAnswer, Refused, require_online
from mlmoe_jax.runtime.hub import COMMIT, Address, hub_errors_explained, open_hub, require_commit
from mlmoe_jax.runtime.progress import DownloadBar, megabytes, status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.version import __version__

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling


def download_file(repository: str, name: str, folder: Path) -> Path:
    """Download one file from the main branch of a repository, and return its path below `folder`.

    Raises:
      Refused: the hub refuses the request, or the repository does not have the file.
      NoAnswer: the hub cannot be reached.
      UserError: the download has another size or sha256 than the file on the hub.
    """
    address = Address(repository)
    commit, files = _look_up(address)
    if name not in files:
        raise Refused(f"the model {repository} has no file {name}")
    _download(address, commit, [files[name]], folder)
    return folder / name


def fetch_model(address: Address, most: Mapping[str, int], required: Collection[str]) -> Path:
    """Download the files of a model into the cache unless they are there, and return their folder.

    If the hub cannot be reached, the files that were downloaded last for this revision are used, and this is logged.

    Args:
      most: name of a file -> its largest allowed size in bytes. Other files are not downloaded.
      required: names of the files that a model must have.

    Raises:
      UserError: the repository does not exist, is not visible or lacks a required file. Or a file is too large, or a
        download fails.
    """
    models = Folder(cache_folder() / "hub" / address.repository.replace("/", "--"))
    revision = f"revisions/{urllib.parse.quote(address.revision, safe='')}"
    known = models.read_text(revision) if (models / revision).exists() else ""
    try:
        commit, files = _look_up(address)
        if problem := _find_problem(files, most, required):
            raise UserError(f"{address} {problem}")
        if known != commit:
            wanted = [file for name, file in files.items() if name in most]
            _download(address, commit, wanted, Path(models / commit))
            models.write_text(revision, commit)
    except NoAnswer as error:
        if not COMMIT.fullmatch(known):
            raise UserError(
                f"{address} cannot be downloaded, because {error}; try again, or download it elsewhere with `hf "
                f"download {address.repository} --local-dir=FOLDER` and set --workdir=FOLDER"
            ) from error
        status(f"{error}; {address} is the commit {known[:12]}, which was downloaded before")
        commit = known
    return Path(models / commit)


def _find_problem(files: Mapping[str, RepoSibling], most: Mapping[str, int], required: Collection[str]) -> str:
    """Return why a repository is not accepted as a model; "" if it is accepted.

    It must have all `required` files, and no file may be larger than its size in bytes in `most`.
    """
    for name in required:
        if name not in files:
            return f"is not a model that mlmoe_jax has shared: it has no {name}"
    for name in most.keys() & files.keys():
        size = files[name].size or 0
        if size > most[name]:
            return f"has a {name} of {megabytes(size)}, above {megabytes(most[name])}"
    return ""


def _look_up(address: Address) -> tuple[str, dict[str, RepoSibling]]:
    """Return the commit to which the revision of an address points, and the files of this commit by name."""
    require_online()
    with hub_errors_explained(address):
        about = open_hub().model_info(
            address.repository, revision=address.revision, files_metadata=True, timeout=TIMEOUT
        )
    return require_commit(about.sha, address), {file.rfilename: file for file in about.siblings or ()}


def _download(address: Address, commit: str, files: Iterable[RepoSibling], folder: Path) -> None:
    """Download files of a commit to `folder`; UserError if it fails, or a size or sha256 is not as on the hub."""
    from huggingface_hub import hf_hub_download

    status(f"downloading {address}, commit {commit[:12]}, to {folder}")
    for file in files:
        with hub_errors_explained(address), disk_errors_explained(folder):
            hf_hub_download(
                address.repository,
                file.rfilename,
                revision=commit,
                local_dir=folder,
                library_name="mlmoe_jax",
                library_version=__version__,
                tqdm_class=DownloadBar,
            )
        path = folder / file.rfilename
        if path.stat().st_size != file.size or (file.lfs and file_sha256(path) != file.lfs.sha256):
            path.unlink()
            raise UserError(f"the {file.rfilename} of {address} has another size or sha256 than on the hub; try again")
