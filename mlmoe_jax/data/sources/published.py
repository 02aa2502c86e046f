"""Where the files of a published data set are, and what to say if they are not there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mlmoe_jax.errors import UserError

VARIABLE = "MLMOE_DATA"  # a folder with one folder per data set
BESIDE = Path("data")  # the same, below the working directory


@dataclass(frozen=True)
class Published:
    """The files of one published data set.

    name: that of `data.name`. files: the files and folders that its folder holds. address: where they are published.
    section: that of docs/datasets.md which has the download commands and the layout.
    """

    name: str
    files: str
    address: str
    section: str

    def folder(self, root: str | os.PathLike = "") -> Path:
        """Return the folder of the data set: `root`, or if it is empty $MLMOE_DATA/NAME or else data/NAME.

        Raises UserError if there is none; a `root` that is set is the only place that counts.
        """
        if os.fspath(root):
            places = [Path(root).expanduser()]
        else:
            above = [Path(os.environ[VARIABLE]).expanduser()] if os.environ.get(VARIABLE) else []
            places = [folder / self.name for folder in (*above, BESIDE)]
        found = next((place for place in places if place.is_dir()), None)
        if found is None:
            unset = "" if os.fspath(root) or len(places) > 1 else f" (and ${VARIABLE} is not set)"
            raise self.wanted(f"there is no folder {' or '.join(map(str, places))}{unset}")
        return found

    def wanted(self, reason: str) -> UserError:
        """Return the error for files that are not there; `reason` says which was looked for and where."""
        return UserError(
            f"{reason}; {self.name} needs {self.files}, published at {self.address}: put it there, or set data.root "
            f"to its folder (docs/datasets.md#{self.section} shows how)"
        )
