"""A file that its authors have published: the weights of a backbone or of a text tower, or a tokenizer."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedFile:
    """A published file, at an address or in an installed Python package. `pretrained.locate` finds or downloads it."""

    name: str  # the path of the file below the cache folder
    license: str  # the license of the content
    address: str = ""  # the https address; empty if a package has the file
    package: str = ""  # PACKAGE/FOLDER of an installed Python package with the file, which is searched before the cache
    # The published sha256, or its first digits. If empty, the sha256 of the first download is stored, and later
    # downloads must have this sha256. Checksums of the Hugging Face Hub are always checked.
    sha256: str = ""
    repository: str = ""  # the repository on the Hugging Face Hub; empty if the file is elsewhere
    gated: bool = False  # whether a user must accept the license on the page of the repository before the download


def on_hub(repository: str, license: str, file: str = "model.safetensors", *, gated: bool = False) -> PublishedFile:
    """Return a file on the Hugging Face Hub, in the main branch of `repository`, USER/NAME; cached below NAME."""
    name = f"{repository.partition('/')[2]}/{file}"
    address = f"https://huggingface.co/{repository}/resolve/main/{file}"
    return PublishedFile(name, license, address, repository=repository, gated=gated)


def on_server(address: str, license: str) -> PublishedFile:
    """Return a file on another server. A name like NAME-0676ba61.pth (PyTorch) has the first digits of the sha256."""
    name = address.rpartition("/")[2]
    digits = re.fullmatch(r".+-([0-9a-f]{8,64})\.pth", name)
    return PublishedFile(name, license, address, sha256=digits[1] if digits else "")
