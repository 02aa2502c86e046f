"""Trained models on the Hugging Face hub: `hf:user/name` or `hf:user/name@revision`.

The content of a repository may come from anybody. Only files with known names are downloaded, each up to a size, into a
folder of the cache with the name of the commit. All other content of a repository is ignored.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import HUB, cache_folder, disk_errors_explained, sha256_of
from mlmoe_jax.runtime.progress import megabytes, status
from mlmoe_jax.runtime.text import printable
from mlmoe_jax.runtime.version import __version__

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
FILE = re.compile(
    r"https://(?:huggingface\.co|hf\.co)/(?P<repo>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)"
)
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_TIMEOUT = 30.0  # seconds, for connecting and for every read
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOGIN = "set HF_TOKEN, or run `hf auth login`"


@dataclass(frozen=True)
class Address:
    """A model on the hub: user/name, and a branch, tag or commit."""

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{HUB}{self.repository}{'' if self.revision == 'main' else f'@{self.revision}'}"


class NoAnswer(Exception):
    """A server did not answer, or not completely.

    Attributes:
      wait: the number of seconds that the server asks the client to wait.
    """

    def __init__(self, reason: str, wait: str = ""):
        super().__init__(reason)
        self.wait = float(wait) if wait.isdigit() else 0.0


class Refused(UserError):
    """A server refuses a request. A retry is of no use."""


def require_repository(name: str) -> str:
    """Return the name of a repository; UserError if it is not user/name."""
    if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name:
        raise UserError(
            f"'{printable(name, 200)}' is not the name of a model on the hub; write USER/NAME, as in ada/birds"
        )
    return name


def require_revision(name: str) -> str:
    """Return the name of a branch, tag or commit; UserError if it cannot be one."""
    if not _REVISION.fullmatch(name) or ".." in name or "//" in name or name.endswith("/"):
        raise UserError(f"'{printable(name, 200)}' is not the name of a branch, a tag or a commit on the hub")
    return name


def parse(text: str) -> Address:
    """Return the address of `hf:user/name` or `hf:user/name@revision`; UserError for another form."""
    repository, at, revision = text.removeprefix(HUB).partition("@")
    return Address(require_repository(repository), require_revision(revision) if at else "main")


# ---------------------------------------------------------------------------------------------------------- download
def locate(address: str) -> tuple[str, dict[str, str], str]:
    """Return the location of the file at an https address, headers for requests, and its sha256 or "".

    A file on the hub is located at its commit, on the mirror and with the token of the user.

    Raises:
      Refused, NoAnswer: the hub does not describe the file.
    """
    if not (match := FILE.fullmatch(address)):
        return address, {}, ""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    repository, revision, name = match["repo"], match["revision"], urllib.parse.unquote(match["file"])
    headers = build_hf_headers(library_name="mlmoe_jax")
    with _explained(Address(repository, revision)):
        url = hf_hub_url(repository, name, revision=revision, endpoint=_endpoint())
        about = get_hf_file_metadata(url, headers=headers, timeout=_TIMEOUT)
    location = hf_hub_url(repository, name, revision=about.commit_hash or revision, endpoint=_endpoint())
    return location, headers, about.etag if about.etag and _SHA256.fullmatch(about.etag) else ""


def fetch_model(address: Address, most: Mapping[str, int], required: Collection[str]) -> Path:
    """Download the files of a model that are not in the cache, and return their folder.

    If the hub cannot be reached, the files of an earlier download of this revision are used, and a message says so.

    Args:
      address: the model and its revision.
      most: name -> the largest size in bytes. Only these files are downloaded.
      required: the files that a model must have.

    Raises:
      UserError: the repository does not exist, is not visible or lacks a required file, a file is too large, or a
        download fails.
    """
    models = cache_folder() / "hub" / address.repository.replace("/", "--")
    earlier = models / "revisions" / urllib.parse.quote(address.revision, safe="")
    known = earlier.read_text() if earlier.is_file() else ""
    try:
        commit, files = _look_up(address)
        if missing := [name for name in required if name not in files]:
            raise UserError(f"{address} is not a model that mlmoe_jax has shared: it has no {missing[0]}")
        if known != commit:
            _download(address, commit, {name: files[name] for name in most if name in files}, most, models / commit)
            earlier.parent.mkdir(parents=True, exist_ok=True)
            earlier.write_text(commit)
    except NoAnswer as error:
        if not _COMMIT.fullmatch(known):
            raise UserError(
                f"{address} cannot be downloaded, because {error}; try again, or download it elsewhere with `hf "
                f"download {address.repository} --local-dir=FOLDER` and set --workdir=FOLDER"
            ) from error
        status(f"{error}; {address} is the commit {known[:12]}, which was downloaded before")
        return models / known
    return models / commit


def _look_up(address: Address) -> tuple[str, dict[str, tuple[int, str]]]:
    """Return the commit of a revision, and name -> (size in bytes, sha256 or "") of its files."""
    if os.environ.get("MLMOE_OFFLINE", "") not in ("", "0"):
        raise NoAnswer("MLMOE_OFFLINE is set")
    with _explained(address):
        about = _hub().model_info(address.repository, revision=address.revision, files_metadata=True, timeout=_TIMEOUT)
    if not _COMMIT.fullmatch(about.sha or ""):  # it becomes the name of a folder
        raise UserError(f"the hub describes {address} in a form that is not understood; try again, or another revision")
    files = {file.rfilename: (file.size or 0, file.lfs.sha256 if file.lfs else "") for file in about.siblings or ()}
    return about.sha, files


def _download(
    address: Address, commit: str, files: Mapping[str, tuple[int, str]], most: Mapping[str, int], folder: Path
) -> None:
    from huggingface_hub import hf_hub_download

    for name, (size, _) in files.items():
        if size > most[name]:
            raise UserError(f"{address} has a {name} of {megabytes(size)}, above {megabytes(most[name])}")
    status(f"downloading {address}, commit {commit[:12]}, to {folder}")
    for name, (size, sha256) in files.items():
        with _explained(address), disk_errors_explained(folder):
            hf_hub_download(address.repository, name, revision=commit, local_dir=folder, endpoint=_endpoint())
        path = folder / name
        if path.stat().st_size != size or (sha256 and sha256_of(path) != sha256):
            path.unlink()
            raise UserError(f"the {name} of {address} has another size or sha256 than on the hub; try again")


# ------------------------------------------------------------------------------------------------------------ upload
def require_token() -> None:
    """Raise UserError without a token of the user for the hub."""
    from huggingface_hub import get_token

    if not get_token():
        page = "https://huggingface.co/settings/tokens"
        raise UserError(f"there is no token for the hub; create one that may write at {page} and {_LOGIN}")


def upload_model(folder: Path, address: Address, names: Collection[str], *, private: bool) -> str:
    """Upload files of a folder as one commit, and return the address of the commit.

    The repository and the branch are created if they do not exist.

    Args:
      folder: the folder.
      address: the repository and the branch.
      names: the files to upload. Files of an earlier upload that are in `names` but not in the folder are deleted. All
        other files of the repository stay.
      private: whether the repository must be private.

    Raises:
      UserError: the hub refuses or cannot be reached, or the repository is public but must be private.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    repository, revision, hub = address.repository, address.revision, _hub()
    try:
        with _explained(address, writes=True):
            hub.create_repo(repository, private=private or None, exist_ok=True)
            if private and not hub.model_info(repository, timeout=_TIMEOUT).private:
                raise UserError(f"{repository} exists and is public; make it private there, or leave --private out")
            if revision != "main":
                hub.create_branch(repository, branch=revision, exist_ok=True)
            present = {file.rfilename for file in hub.model_info(repository, revision=revision).siblings or ()}
            added = [name for name in names if (folder / name).exists()]
            commit = hub.create_commit(
                repository,
                [
                    *(CommitOperationAdd(name, folder / name) for name in added),
                    *(CommitOperationDelete(name) for name in sorted(present & set(names) - set(added))),
                ],
                commit_message="Share a model of mlmoe_jax",
                revision=revision,
            )
    except NoAnswer as error:
        raise UserError(f"{repository} cannot be uploaded, because {error}; try again") from error
    return commit.commit_url


def is_safe(address: str) -> bool:
    """Return whether an address is https, or http on this machine."""
    parts = urllib.parse.urlsplit(address)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOCAL_HOSTS)


def _endpoint() -> str | None:
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None  # the library reads it only when it is imported
    if endpoint and not is_safe(endpoint):
        raise Refused(f"HF_ENDPOINT: '{endpoint}' is not an https address; set the address of the hub or of a mirror")
    return endpoint


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=_endpoint(), library_name="mlmoe_jax", library_version=__version__)


@contextlib.contextmanager
def _explained(address: Address, *, writes: bool = False) -> Iterator[None]:
    """Turn the errors of the hub's library into UserError or NoAnswer, without quoting a token."""
    from huggingface_hub import errors

    repository, page = address.repository, f"https://huggingface.co/{address.repository}"
    try:
        yield
    except UserError:
        raise
    except errors.HfHubHTTPError as error:
        code, do = getattr(error.response, "status_code", 0), "write to" if writes else "read"
        if code >= 500 or code in (408, 429):
            raise NoAnswer(f"the hub responds with {code}") from error
        reasons = {
            errors.GatedRepoError: f"access to {address} has to be requested at {page}; then {_LOGIN}",
            errors.RevisionNotFoundError: f"the model {repository} has no revision '{address.revision}'; see {page}",
            errors.RepositoryNotFoundError: f"the hub has no model {repository}, or it is private: check the name, or "
            f"{_LOGIN}",
        }
        reason = next((text for kind, text in reasons.items() if isinstance(error, kind)), "")
        if not reason and code in (401, 403):
            reason = f"the token for the hub may not {do} {repository}; {_LOGIN} with a token that may"
        reason = reason or f"the hub refuses {address} with the status {code}; check the name and the token"
        raise Refused(reason) from error
    except Exception as error:  # each major version of the library has other types of errors
        raise NoAnswer(f"the hub cannot be reached ({brief(error)})") from error


def brief(error: Exception) -> str:
    """Return the message of an error as a part of a sentence."""
    reason = getattr(error, "reason", error)
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return text.partition("\n")[0].partition(". ")[0].rstrip(".")
