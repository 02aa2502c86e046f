"""Trained models on the Hugging Face hub: `hf:user/name` or `hf:user/name@revision`.

The content of a repository may come from anybody. Only files of known names are downloaded, each up to a size, into a
folder of the cache that has the name of the commit; nothing else of a repository is read.
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
from mlmoe_jax.pretrained import web
from mlmoe_jax.pretrained.download import fetch
from mlmoe_jax.runtime.files import HUB, MIB, cache_folder
from mlmoe_jax.runtime.progress import megabytes, status
from mlmoe_jax.runtime.text import printable
from mlmoe_jax.runtime.version import __version__

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOGIN = "set HF_TOKEN, or run `hf auth login`"


@dataclass(frozen=True)
class Address:
    """A model on the hub: user/name, and a branch, tag or commit."""

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{HUB}{self.repository}{'' if self.revision == 'main' else f'@{self.revision}'}"


class _Unreachable(Exception):
    """The hub could not be asked."""


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
    """Return the address that `hf:user/name` or `hf:user/name@revision` stands for; UserError for another form."""
    repository, at, revision = text.removeprefix(HUB).partition("@")
    return Address(require_repository(repository), require_revision(revision) if at else "main")


# ---------------------------------------------------------------------------------------------------------- download
def fetch_model(address: Address, most: Mapping[str, int], required: Collection[str]) -> Path:
    """Download the files of a model that are not in the cache, and return their folder.

    most: name -> the largest size in bytes, of all files to download; those that the repository does not have are left
    out. If the hub cannot be reached, the files of an earlier download of the same revision are used, and this is told.
    Raises UserError if the repository does not exist, is not shown or has not all files of `required`, if a file is too
    large, and if a download fails.
    """
    models = cache_folder() / "hub" / address.repository.replace("/", "--")
    earlier = models / "revisions" / urllib.parse.quote(address.revision, safe="")
    try:
        commit, files = _look_up(address)
    except _Unreachable as error:
        commit = _complete_before(earlier)
        if not commit:
            raise UserError(
                f"{address} cannot be downloaded, because {error}; try again, or download it elsewhere with `hf "
                f"download {address.repository} --local-dir=FOLDER` and set --workdir=FOLDER"
            ) from error
        status(f"{error}; {address} is the commit {commit[:12]}, which was downloaded before")
        return models / commit
    if missing := [name for name in required if name not in files]:
        raise UserError(f"{address} is not a model that mlmoe_jax has shared: it has no {missing[0]}")
    for name in most:
        if name in files and files[name][0] > most[name]:
            raise UserError(f"{address} has a {name} of {megabytes(files[name][0])}, above {megabytes(most[name])}")
    folder = models / commit
    known = _complete_before(earlier) == commit
    if not known:
        status(f"downloading {address}, commit {commit[:12]}, to {folder}")
    for name in most:
        if name in files:
            size, sha256 = files[name]
            url = f"https://huggingface.co/{address.repository}/resolve/{commit}/{name}"
            fetch(url, folder / name, sha256=sha256, size=size, quiet=size < MIB)
    if not known:  # a cache that is only read need not be writable
        earlier.parent.mkdir(parents=True, exist_ok=True)
        earlier.write_text(commit)
    return folder


def _look_up(address: Address) -> tuple[str, dict[str, tuple[int, str]]]:
    """Return the commit of a revision, and name -> (size in bytes, sha256 or "") of its files."""
    if os.environ.get("MLMOE_OFFLINE", "") not in ("", "0"):
        raise _Unreachable("MLMOE_OFFLINE is set")
    with _explained(address):
        about = _hub().model_info(
            address.repository, revision=address.revision, files_metadata=True, timeout=web.TIMEOUT
        )
    files = {
        file.rfilename: (file.size or 0, file.lfs.sha256 if file.lfs else "")
        for file in about.siblings or ()
        if file.size is not None
    }
    commit = about.sha or ""
    good = all(size >= 0 and (not digest or web.SHA256.fullmatch(digest)) for size, digest in files.values())
    if not (good and _COMMIT.fullmatch(commit)):  # it becomes the name of a folder
        raise UserError(f"the hub describes {address} in a form that is not understood; try again, or another revision")
    return commit, files


def _complete_before(earlier: Path) -> str:
    """Return the commit of the last complete download of a revision, or ""."""
    commit = earlier.read_text() if earlier.is_file() else ""
    return commit if _COMMIT.fullmatch(commit) else ""


# ------------------------------------------------------------------------------------------------------------ upload
def require_token() -> None:
    """Raise UserError without a token of the user for the hub."""
    from huggingface_hub import get_token

    if not get_token():
        page = "https://huggingface.co/settings/tokens"
        raise UserError(f"there is no token for the hub; create one that may write at {page} and {_LOGIN}")


def upload_model(folder: Path, address: Address, names: Collection[str], *, private: bool) -> str:
    """Upload the files `names` of a folder as one commit, and return its address.

    The repository and the branch are created if they do not exist. Files that an earlier upload left and that are not
    in the folder now are deleted, if they are among `names`; all other files of the repository stay. Raises UserError
    if the hub refuses, cannot be reached, or shows everybody a repository that should be private.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    repository, revision, hub = address.repository, address.revision, _hub()
    try:
        with _explained(address, writes=True):
            hub.create_repo(repository, private=private or None, exist_ok=True)
            if private and not hub.model_info(repository, timeout=web.TIMEOUT).private:
                raise UserError(f"{repository} exists and is public; make it private there, or leave --private out")
            if revision != "main":
                hub.create_branch(repository, branch=revision, exist_ok=True)
            present = {file.rfilename for file in hub.model_info(repository, revision=revision).siblings or ()}
            added = [name for name in names if (folder / name).exists()]
            done = hub.create_commit(
                repository,
                [
                    *(CommitOperationAdd(name, folder / name) for name in added),
                    *(CommitOperationDelete(name) for name in sorted(present & set(names) - set(added))),
                ],
                commit_message="Share a model of mlmoe_jax",
                revision=revision,
            )
    except _Unreachable as error:
        raise UserError(f"{repository} cannot be uploaded, because {error}; try again") from error
    return done.commit_url


def _hub() -> Any:
    from huggingface_hub import HfApi

    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None  # the library reads it only when it is imported
    try:
        web.require_safe(endpoint or "https://huggingface.co")
    except web.Refused as error:
        raise UserError(f"HF_ENDPOINT: {error}; give the https address of the hub or of a mirror") from error
    return HfApi(endpoint=endpoint, library_name="mlmoe_jax", library_version=__version__)


@contextlib.contextmanager
def _explained(address: Address, *, writes: bool = False) -> Iterator[None]:
    """Turn the errors of the hub's library into a UserError, or into _Unreachable; none of them quotes a token."""
    from huggingface_hub import errors

    repository, page = address.repository, f"https://huggingface.co/{address.repository}"
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except errors.OfflineModeIsEnabled as error:
        raise _Unreachable("HF_HUB_OFFLINE is set") from error
    except errors.GatedRepoError as error:
        raise UserError(f"access to {address} has to be requested at {page}; then {_LOGIN}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"the model {repository} has no revision '{address.revision}'; {page} lists them") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"the hub has no model {repository}, or it is private: check the name, or {_LOGIN}") from error
    except errors.HfHubHTTPError as error:
        raise _refused(address, error.response, writes=writes) from error
    except Exception as error:  # each major version of the library changed its transport, and with it the errors
        raise _Unreachable(f"the hub cannot be reached ({web.brief(error)})") from error


def _refused(address: Address, response: Any, *, writes: bool) -> Exception:
    code = getattr(response, "status_code", 0)
    if code in (401, 403):
        may = "write to" if writes else "read"
        return UserError(f"the token for the hub may not {may} {address.repository}; {_LOGIN} with one that may")
    if code >= 500 or code in (408, 429):
        return _Unreachable(f"the hub responds with {code}")
    return UserError(f"the hub refuses {address} with the status {code}; check the name and the token")
