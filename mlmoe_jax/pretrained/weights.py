"""Where the published weights of a backbone are found: in the package, in the cache, or by download."""

from pathlib import Path

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.catalog import entry
from mlmoe_jax.pretrained.download import Unreachable, fetch
from mlmoe_jax.runtime.cache import cache_folder


def find_weights(name: str) -> Path:
    """Return the file with the published weights of a backbone: in the package, in the cache, or else downloaded.

    Raises UserError saying which file is wanted, where it was looked for, where it is published and how to go on.
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
            f"the weights of {name} are not here: {error}, name another copy with "
            "--config.model.backbone.weights=FILE, or start on random weights with "
            "--config.model.backbone.weights=none"
        ) from error
