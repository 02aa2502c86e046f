"""The Hugging Face hub: addresses of its repositories, its client, and what the errors of its client mean."""

from __future__ import annotations

import contextlib
import re
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.files import HUB, HUB_DATA, cache_folder, disk_errors_explained, make_cache
from mlmoe_jax.runtime.http import TIMEOUT, NoAnswer, Refused, require_online
from mlmoe_jax.runtime.progress import DownloadBar, status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.text import printable
from mlmoe_jax.runtime.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoSibling

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_DATA_ADDRESS = re.compile(r"([^/@]*/[^/@]*)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
LOGIN = "set HF_TOKEN, or run `hf auth login`"


DATA_SET = "dataset"


@dataclass(frozen=True)
class Address:
    """The address of a model or a data set on the hub: a repository, user/name, and a branch, tag or commit of it.

    `kind` is "model" or DATA_SET, as huggingface_hub names them.
    """

    repository: str
    revision: str = "main"
    kind: str = "model"

    @property
    def path(self) -> str:
        """The repository in web addresses of the hub."""
        return f"datasets/{self.repository}" if self.kind == DATA_SET else self.repository

    def __str__(self) -> str:
        start = HUB_DATA.removesuffix("datasets/") if self.kind == DATA_SET else HUB
        return f"{start}{self.path}{'' if self.revision == 'main' else f'@{self.revision}'}"


def parse_address(text: str) -> Address:
    """Parse `hf:user/name` or `hf:user/name@revision`, where `hf:` may be missing; UserError for invalid names."""
    repository, _, revision = text.removeprefix(HUB).partition("@")
    return _require_names(Address(repository, revision if "@" in text else "main"), "write USER/NAME, as in ada/birds")


def parse_data_address(text: str) -> tuple[Address, str]:
    """Parse `hf://datasets/user/name`, `…/name@revision` or `…/name/inside`; UserError for invalid names.

    Return also `inside`, the path of a file or folder in the repository, or the name of a configuration; "" if the
    address has none.
    """
    match = _DATA_ADDRESS.fullmatch(text.removeprefix(HUB_DATA))
    repository, revision, inside = match.groups("") if match else (text, "", "")
    address = Address(repository, revision or "main", DATA_SET)
    return _require_names(address, f"write {HUB_DATA}USER/NAME"), inside.rstrip("/")


def _require_names(address: Address, remedy: str) -> Address:
    repository, revision = address.repository, address.revision
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise UserError(f"'{printable(repository, 200)}' is not the name of a {address.kind} on the hub; {remedy}")
    if not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision or revision.endswith("/"):
        raise UserError(f"'{printable(revision, 200)}' is not the name of a branch, a tag or a commit on the hub")
    return address


def open_hub() -> HfApi:
    """Return the client of the hub."""
    from huggingface_hub import HfApi  # here, because only a few commands need it

    return HfApi(library_name="mlmoe_jax", library_version=__version__)


def look_up(address: Address) -> tuple[Address, dict[str, RepoSibling]]:
    """Return the commit to which an address points, and its files by name, with their sizes for a model.

    Raises UserError if the hub refuses, cannot be reached (NoAnswer), or names no commit.
    """
    require_online()
    options = {"revision": address.revision, "timeout": TIMEOUT, "files_metadata": address.kind != DATA_SET}
    with hub_errors_explained(address):
        about = open_hub().repo_info(address.repository, repo_type=address.kind, **options)
    if not COMMIT.fullmatch(about.sha or ""):  # it becomes the name of a folder
        raise UserError(f"the hub describes {address} in a form that is not understood; try again, or another revision")
    return replace(address, revision=about.sha), {file.rfilename: file for file in about.siblings or ()}


def hub_folder(address: Address) -> Folder:
    """Return the folder of the cache with what was found in a repository."""
    return Folder(cache_folder() / "hub" / address.path.replace("/", "--"))


class Found(NamedTuple):
    """What was found at an address: the commit to which it points, "" for none, and names of its files."""

    commit: str = ""
    names: Sequence[str] = ()


def find_last(address: Address, find: Callable[[Found], Found], remedy: str) -> Found:
    """Return what `find` finds. It is given what was found last.

    If the hub cannot be reached, return what was found last, and log this. Raises UserError if there is nothing, see
    `unreachable`.
    """
    folder, record = hub_folder(address), f"revisions/{urllib.parse.quote(address.revision, safe='')}.json"
    known = folder.read_json(record, lambda stored: Found(**stored)) if (folder / record).exists() else Found()
    try:
        found = find(known)
    except NoAnswer as error:
        if not COMMIT.fullmatch(known.commit):
            raise unreachable(address, error, remedy) from error
        status(f"{error}; {address} is the commit {known.commit[:12]}, which was found before")
        return known
    if found != known:
        make_cache(folder.path)
        folder.write_json(record, found._asdict())
    return found


def download(commit: Address, name: str, folder: Path | None = None) -> None:
    """Download a file of a commit to a folder, by default the cache of huggingface_hub; UserError if it fails."""
    from huggingface_hub import constants, hf_hub_download

    with hub_errors_explained(commit), disk_errors_explained(folder or constants.HF_HUB_CACHE):
        hf_hub_download(
            commit.repository,
            name,
            repo_type=commit.kind,
            revision=commit.revision,
            local_dir=folder,
            library_name="mlmoe_jax",
            library_version=__version__,
            tqdm_class=DownloadBar,
        )


def unreachable(address: Address, error: NoAnswer, remedy: str) -> UserError:
    """Return an error that says how files are downloaded elsewhere. `remedy` says what to do with their FOLDER."""
    return UserError(
        f"{address} cannot be downloaded, because {error}; try again, or download it elsewhere with `hf download "
        f"{address.repository} --repo-type={address.kind} --local-dir=FOLDER` and {remedy}"
    )


@contextlib.contextmanager
def hub_errors_explained(address: Address) -> Iterator[None]:
    """Return a context that converts exceptions of huggingface_hub to Refused or NoAnswer. Messages have no token."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each major version of the library has other types of errors
        # LocalEntryNotFoundError hides the response of the hub.
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        raise _failure(cause or error, address) from error


def _failure(error: BaseException, address: Address) -> Refused | NoAnswer:
    """Convert an exception of huggingface_hub to an error that states the cause and, if there is one, a remedy."""
    from huggingface_hub import errors

    repository, page = address.repository, f"https://huggingface.co/{address.path}"
    if not isinstance(error, errors.HfHubHTTPError):
        return NoAnswer(f"the hub cannot be reached ({reason_of(error)})")
    code = error.response.status_code
    if code >= 500 or code in (408, 429):
        return NoAnswer(f"the hub responds with {code}")
    if isinstance(error, errors.GatedRepoError):
        return Refused(f"access to {repository} has to be requested at {page}; then {LOGIN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return Refused(f"the {address.kind} {repository} has no revision '{address.revision}'; see {page}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return Refused(f"the hub has no {address.kind} {repository}, or it is private: check the name, or {LOGIN}")
    return Refused(f"the hub refuses {repository} with the status {code}; {LOGIN} with a token that has access")
