"""`mlmoe import`: make a run folder of a checkpoint of the authors' code, or of the vectors of label names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.tools.add_names import parts_with_names
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.pipeline import steps_per_epoch
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.by_names import NOTES, parts_of_names
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import Parts, preprocess_for
from mlmoe_jax.runs.folder import ADAPTER, RunFolder
from mlmoe_jax.runs.restore import has_checkpoint, write_run_metadata
from mlmoe_jax.runs.shared_model import write_adapter
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.sharding import shard_tree
from mlmoe_jax.training.build_steps import build_steps
from mlmoe_jax.training.initialization import OtherRun, find_origin
from mlmoe_jax.training.selection import Selection
from mlmoe_jax.training.training_data import label_space_for


def import_run(config: ConfigDict, folder: RunFolder) -> None:
    """Convert the checkpoint `config.init_from`, or the vectors `model.head.names`, to a run folder without training.

    The run folder can be used for evaluation, prediction and export. For vectors, see `_write_untrained`.

    The labels, their order and their groups are taken from the training split of `config.data`. No image is read. The
    run folder has a checkpoint of step 0, from which training can resume.

    Raises:
      UserError: `init_from` is empty or cannot be read, or the folder already holds a run.
    """
    configuration.validate(config)
    _require_source(config)
    if has_checkpoint(folder) or (folder / ADAPTER).exists():
        raise UserError(f"{folder} already holds a run; choose another --workdir")
    if not config.init_from:
        _write_untrained(config, folder, parts_of_names)
        return
    origin = find_origin(config)
    if isinstance(origin, OtherRun) and config.model.head.names:
        _write_untrained(config, folder, partial(parts_with_names, source=origin))
        return
    folder.require_creatable()
    preprocess = preprocess_for(config)
    split = open_split(config.data, config.data.train_split, seed=config.seed)
    label_space = label_space_for(config, split)
    mesh = setup_jax(config)
    parts = origin.parts(label_space)
    total_steps = config.train.epochs * steps_per_epoch(len(split), config.train.batch_size)
    steps = build_steps(config, parts, preprocess, mesh, split.labels, total_steps=total_steps)
    # Without padding, so the checkpoint does not depend on the mesh.
    state = shard_tree(steps.initial_state(parts), mesh)
    selection = Selection(state.latest(), config.eval.select_metric, kind="imported")
    with folder.writing_by_first():
        if distributed.is_first():
            write_run_metadata(folder, config, label_space, preprocess, parts)
        with checkpoint.open_manager(folder, keep=config.checkpoint.keep) as manager:
            notes = {**selection.notes(), "skipped": []}
            checkpoint.save(manager, 0, state.replace(frozen={}), selection.values, notes)


def _require_source(config: ConfigDict) -> None:
    """Raise UserError unless the config names a checkpoint, or vectors that are a whole classifier."""
    if not config.init_from and not (config.model.head.kind == "cosine" and config.model.head.names):
        raise UserError(
            "mlmoe import needs --config.init_from=FILE, a checkpoint of the authors' code, or a run folder; or "
            "--config.model.head.kind=cosine and --config.model.head.names=FILE, vectors of label names"
        )


def _write_untrained(
    config: ConfigDict, folder: RunFolder, make: Callable[[ConfigDict], tuple[LabelSpace, Preprocess, Parts]]
) -> None:
    """Make a run folder of the model that `make` returns. The data is not opened, and need not have labels yet.

    Like a shared model, the folder has the values and no checkpoints.
    """
    folder.require_creatable()
    setup_jax(config)
    space, preprocess, parts = make(config)
    with folder.writing_by_first():
        if distributed.is_first():
            write_adapter(folder, {**parts.trainable, **parts.stats}, NOTES)
            write_run_metadata(folder, config, space, preprocess, parts)
