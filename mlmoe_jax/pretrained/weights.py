"""Find the published weights of a backbone: in the package, in the cache, or by download."""

from pathlib import Path

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.catalog import entry
from mlmoe_jax.pretrained.download import Unreachable, fetch
from mlmoe_jax.runtime.cache import cache_folder


def find_weights(name: str) -> Path:
    """Return the file with the published weights of a backbone: from the package, the cache, or else downloaded.

    Raises UserError with the file's name, the folder searched, the address of publication and the remedy.
    """
    wanted = entry(name)
    if not wanted.file:
        raise UserError(
            f"no weights of {name} are published; start on random weights with --config.model.backbone.weights=none or "
            "name a file there"
        )
    packaged, cached = Path(__file__).parent / "files" / wanted.file, cache_folder() / wanted.file
    if packaged.is_file():
        return packaged
    try:
        return fetch(wanted.address, cached, sha256=wanted.sha256)
    except Unreachable as error:
        raise UserError(
            f"the weights of {name} are not available: {error}, pass another copy with "
            "--config.model.backbone.weights=FILE, or start from random weights with "
            "--config.model.backbone.weights=none"
        ) from error
