"""Upload a model to the Hugging Face hub."""

from collections.abc import Collection
from pathlib import Path

from huggingface_hub import get_token

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.http import TIMEOUT, NoAnswer
from mlmoe_jax.runtime.hub import LOGIN, Address, hub_errors_explained, open_hub


def require_token() -> None:
    """Raise UserError if the user has not stored a token for the hub."""
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
