"""Files of models on the Hugging Face hub: weights of backbones, and trained models (`hf:user/name@revision`).

The content of a repository may come from anybody. Of a trained model, only files with known names are downloaded, each
and only up to a fixed size, into a cache folder that is named by the commit. All other content is ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import file_sha256, make_cache
from mlmoe_jax.runtime.http import TIMEOUT, NoAnswer, Refused
from mlmoe_jax.runtime.hub import (
    LOGIN,
    Address,
    Found,
    download,
    find_last,
    hub_errors_explained,
    hub_folder,
    look_up,
    open_hub,
)
from mlmoe_jax.runtime.progress import megabytes, status

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
    commit, files = look_up(address)
    if name not in files:
        raise Refused(f"the model {repository} has no file {name}")
    _download(commit, [files[name]], folder)
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
    folder = hub_folder(address)

    def find(known: Found) -> Found:
        commit, files = look_up(address)
        if problem := _find_problem(files, most, required):
            raise UserError(f"{address} {problem}")
        if known.commit != commit.revision:
            wanted = [file for name, file in files.items() if name in most]
            make_cache(folder / commit.revision)
            _download(commit, wanted, Path(folder / commit.revision))
        return Found(commit.revision, [])

    return Path(folder / find_last(address, find, "set --workdir=FOLDER").commit)


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


def _download(commit: Address, files: Iterable[RepoSibling], folder: Path) -> None:
    """Download files of a commit to `folder`; UserError if it fails, or a size or sha256 is not as on the hub."""
    status(f"downloading {commit} to {folder}")
    for file in files:
        download(commit, file.rfilename, folder)
        path = folder / file.rfilename
        if path.stat().st_size != file.size or (file.lfs and file_sha256(path) != file.lfs.sha256):
            path.unlink()
            raise UserError(f"the {file.rfilename} of {commit} has another size or sha256 than on the hub; try again")


# ------------------------------------------------------------------------------------------------------------ upload
def require_token() -> None:
    """Raise UserError if the user has not stored a token for the hub."""
    from huggingface_hub import get_token

    if not get_token():
        page = "https://huggingface.co/settings/tokens"
        raise UserError(f"there is no token for the hub; create one that may write at {page} and {LOGIN}")


def upload_model(folder: Path, address: Address, names: Collection[str], *, private: bool) -> str:
    """Upload files of a folder as one commit, and return the address of the commit.

    The repository and the branch are created if they do not exist. A name in `names` that `folder` does not have is
    deleted from the repository. All other files of the repository stay. Raises UserError if the hub refuses the upload
    or cannot be reached, or the repository is public but `private` is True.
    """
    repository, revision, hub = address.repository, address.revision, open_hub()
    try:
        with hub_errors_explained(address):
            hub.create_repo(repository, private=private or None, exist_ok=True)
            if private and not hub.model_info(repository, timeout=TIMEOUT).private:
                raise UserError(f"{repository} exists and is public; make it private there, or leave --private out")
            if revision != "main":
                hub.create_branch(repository, branch=revision, exist_ok=True)
            commit = hub.upload_folder(
                repo_id=repository,
                folder_path=folder,
                allow_patterns=list(names),
                delete_patterns=list(names),
                commit_message="Share a model of mlmoe_jax",
                revision=revision,
            )
    except NoAnswer as error:
        raise UserError(f"{repository} cannot be uploaded, because {error}; try again") from error
    return commit.commit_url
