"""Reach the files of an address: a local path, or a store that fsspec knows, such as gs:// and s3://."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from mlmoe_jax.data.image_search import is_skipped, list_files
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.files import open_regular

_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs"}  # which fsspec needs


def find_files(address: str, suffix: str) -> tuple[str, list[str]]:
    """Return a folder, and the sorted paths below it of the files with `suffix` (in lower case) at an address.

    The address is of a folder, in which files are found at any depth, or of one file. Hidden files, and files and
    folders whose name starts with _, as other programs write beside the data, are left out. Raises UserError if the
    address cannot be reached.
    """
    if "://" in address:
        names = _find_remote(address)
    elif os.path.isdir(address):
        names = list_files(address, Usage(address, "file"))
    else:
        names = [""] if os.path.isfile(address) else []
    if names == [""]:  # it is a file
        folder, _, name = address.rpartition("/")
        return folder, [name] if name.lower().endswith(suffix) else []
    beside = [name for name in names if any(map(_is_beside, name.split("/")))]
    return address.rstrip("/"), sorted(name for name in {*names} - {*beside} if name.lower().endswith(suffix))


def _is_beside(name: str) -> bool:
    return name.startswith("_") or is_skipped(name)


def open_source(address: str) -> BinaryIO:
    """Open a file at an address, with random access; OSError if it is local and cannot be read, see `open_regular`."""
    if "://" not in address:
        return open_regular(address)
    with _explained(address):
        system, path = _file_system(address)
        return system.open(path, "rb")


def version_of(address: str) -> str:
    """Return a text that identifies the version of a file: it changes if the file changes."""
    if "://" in address:
        with _explained(address):
            system, path = _file_system(address)
            return f"{address} {system.ukey(path)}"
    status = os.stat(address)
    return f"{os.path.abspath(address)} {status.st_size} {status.st_mtime_ns}"


def _find_remote(address: str) -> list[str]:
    """Return the paths of all files below an address; [""] if it is a file."""
    with _explained(address):
        system, path = _file_system(address)
        return [str(name).removeprefix(path.rstrip("/")).lstrip("/") for name in system.find(path)]


def _file_system(address: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # here, because --help does without it

    return url_to_fs(address)


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    """Convert the errors of a store, whose libraries raise their own types, to a UserError with the address."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        package = _PACKAGES.get(address.partition("://")[0], "")
        if isinstance(error, ImportError) and package:
            raise UserError(f"{address} needs the package {package}; run `pip install {package}`") from error
        raise UserError(f"cannot read {address}: {reason_of(error)}") from error
