"""The arrays of a stored checkpoint.

python -m tools.faults.arrays RUN
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath


def newest_checkpoint(run: Path) -> Path:
    """Return the folder of the last checkpoint of a run folder."""
    return max(
        (path for path in (run / "checkpoints").iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )


def array_digests(run: Path) -> dict[str, dict[str, str]]:
    """Return the sha256 of every array of the last checkpoint: state and selected -> path -> digest."""
    return {item: _digests(epath.Path(newest_checkpoint(run).resolve() / item)) for item in ("state", "selected")}


def _digests(item: epath.Path) -> dict[str, str]:
    handler = ocp.PyTreeCheckpointHandler()
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(item).tree)
    arrays = handler.restore(item, args=ocp.args.PyTreeRestore(restore_args=on_host))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): hashlib.sha256(np.asarray(array).tobytes()).hexdigest()
        for path, array in jax.tree_util.tree_leaves_with_path(arrays)
    }


if __name__ == "__main__":
    print(json.dumps(array_digests(Path(sys.argv[1]))))
