"""The digests of a checkpoint: a sha256 of every file, written once all files are complete.

The digests are in the file `digests/metadata` of the checkpoint. Orbax gives the folder of the checkpoint its final
name after this file is written. An example, with `notes/metadata` as one of the files:

    {"step": 7, "files": {"notes/metadata": "<sha256>", "state/manifest.ocdbt": "<sha256>", …}}
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained, file_sha256
from mlmoe_jax.runtime.storage import Folder

ITEM = "digests"
_FILE = "metadata"


class Handler(ocp.CheckpointHandler):
    """The Orbax handler that writes the digests. It must be the last one in the registry of handlers."""

    _step = 0

    def save(self, directory: epath.Path, args: Save) -> None:
        self._step = args.step

    def finalize(self, directory: epath.Path) -> None:
        """Write the digests of all other items to `directory`. Orbax has already written their files completely."""
        checkpoint, own = Folder(directory.parent), f"{directory.name}/"
        names = [name for name in checkpoint.files() if "/" in name and not name.startswith(own)]
        files = {name: file_sha256(checkpoint / name) for name in sorted(names)}
        (directory / _FILE).write_text(json.dumps({"step": self._step, "files": files}))

    def restore(self, directory: epath.Path, args: Any = None) -> None:
        raise NotImplementedError("`damage` reads the digests")


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclass
class Save(ocp.args.CheckpointArgs):
    """The argument for saving digests with Orbax: the `step` of the checkpoint."""

    step: int


def damage(checkpoint: epath.Path, step: int, items: Collection[str]) -> str:
    """Return how the folder of a checkpoint differs from the checkpoint that was saved at `step`; "" if it does not.

    Only the files of `items`, such as `notes`, are read.
    """
    try:
        with damage_explained(checkpoint / ITEM):
            stored = json.loads((checkpoint / ITEM / _FILE).read_text())
            saved_step, files = stored["step"], dict(stored["files"])
            expected = {name: digest for name, digest in files.items() if name.partition("/")[0] in items}
            if missing := set(items) - {name.partition("/")[0] for name in expected}:
                raise KeyError(min(missing))
    except UserError as error:
        return str(error)
    if saved_step != step:
        return f"it is the checkpoint of step {saved_step}"
    changed = [name for name, digest in sorted(expected.items()) if _sha256(checkpoint / name) != digest]
    return f"{len(changed)} files differ from the saved ones, the first is {changed[0]}" if changed else ""


def _sha256(path: epath.Path) -> str:
    """Return the sha256 of a file; "" if it cannot be read."""
    try:
        return file_sha256(path)
    except OSError:
        return ""
