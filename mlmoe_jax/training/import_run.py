"""`mlmoe import`: make a run folder of a checkpoint of the authors' code, or of the vectors of label names.

A run with vectors of further label names becomes a model with these labels, without training. The queries of RAM++ can
also be replaced at prediction, because they are computed from vectors of names.
"""

from dataclasses import dataclass
from functools import cached_property

from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.by_names import NOTES, NamesOrigin
from mlmoe_jax.inference.text_encoder import vectors_for
from mlmoe_jax.models.adapters.catalog import prompts_class
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.partition import label_axes
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import abstract_parts, preprocess_for
from mlmoe_jax.runs.folder import CONFIG, RunFolder
from mlmoe_jax.runs.origin import Origin
from mlmoe_jax.runs.restore import has_checkpoint, read_run, write_run_metadata
from mlmoe_jax.runs.shared_model import write_adapter
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.sharding import shard_tree
from mlmoe_jax.training.build_steps import build_steps
from mlmoe_jax.training.initialization import OtherRun, find_origin
from mlmoe_jax.training.objective import training_labels
from mlmoe_jax.training.selection import Selection
from mlmoe_jax.training.training_data import label_space_for


def import_run(config: ConfigDict, folder: RunFolder) -> None:
    """Convert the checkpoint `config.init_from`, or the vectors `model.head.names`, to a run folder without training.

    The run folder can be used for evaluation, prediction and export. No image is read. With a checkpoint, the labels,
    their order and their groups are taken from the training split of `config.data`, and training can resume from step
    0. With vectors of names, the data set is not opened, and need not have labels yet. The run folder then has values
    but no checkpoints, like a shared model. Raises UserError if `init_from` is empty or cannot be read, or the folder
    already holds a run.
    """
    configuration.validate(config)
    written = (folder / CONFIG).exists()  # last, so without it an import was killed
    if has_checkpoint(folder) or (written and folder.is_shared):
        raise UserError(f"{folder} already holds a run; choose another --workdir")
    origin = _find_origin(config)
    folder.require_creatable()
    preprocess, mesh = preprocess_for(config), setup_jax(config)
    if origin.label_space is not None:
        _write_untrained(origin, folder, preprocess)
        return
    split = open_split(config.data, config.data.train_split, seed=config.seed)
    space = label_space_for(config, split)
    parts = origin.parts(space)
    labels = training_labels(config, split.labels, tree=split.tree)
    total_steps = config.train.epochs * labels.steps_per_epoch
    steps = build_steps(config, parts, preprocess, mesh, labels, total_steps=total_steps)
    # Without padding, so the checkpoint does not depend on the mesh.
    state = shard_tree(steps.initial_state(parts), mesh)
    selection = Selection(state.latest(), config.eval.select_metric, kind="imported")
    with folder.writing():
        write_run_metadata(folder, config, space, preprocess, parts)
        with checkpoint.open_manager(folder, keep=config.checkpoint.keep) as manager:
            notes = {**selection.notes(), "skipped": []}
            checkpoint.save(manager, 0, state.replace(frozen={}), selection.values, notes)


def _write_untrained(origin: Origin, folder: RunFolder, preprocess: Preprocess) -> None:
    space = origin.label_space
    parts = origin.parts(space)
    with folder.writing():
        write_adapter(folder, parts.learned, NOTES)
        write_run_metadata(folder, origin.config, space, preprocess, parts)


def _find_origin(config: ConfigDict) -> Origin:
    """Return the origin to import: a checkpoint, a run, or the vectors of label names. UserError if there is none."""
    if config.init_from:
        origin = find_origin(config)
        of_names = isinstance(origin, OtherRun) and config.model.head.names
        return RunWithNames(config, origin.folder) if of_names else origin
    if not (config.model.head.kind == "cosine" and config.model.head.names):
        raise UserError(
            "mlmoe import needs --config.init_from=FILE, a checkpoint of the authors' code, or a run folder; or "
            "--config.model.head.kind=cosine and --config.model.head.names=FILE, vectors of label names"
        )
    return NamesOrigin(config)


# ------------------------------------------------------------------------------------------------------- further labels
@dataclass(frozen=True)
class RunWithNames(OtherRun):
    """A run with further labels, with names in `model.head.names`. The scores of its trained labels do not change."""

    @cached_property
    def label_space(self) -> LabelSpace:
        """The labels of the run, followed by the further labels.

        Raises UserError if the vectors do not fit the labels of the run, or under the conditions of `_require_open`.
        """
        source_config, known = read_run(self.folder)
        space = known.with_names(vectors_for(self.config))
        _require_open(self, space, abstract_parts(source_config, known).definition)
        return space


def _require_open(source: RunWithNames, space: LabelSpace, trained: ModelDef) -> None:
    """Raise UserError if the scores of a label depend on other labels, or if a new label needs trained values.

    `trained` is the structure of the model of the run, without the further labels.
    """
    config = source.config
    kind, head = config.model.head.kind, head_class(config)
    grouped = prompts_class(config).uses_groups
    if grouped or head.mixes_labels(config):
        reason = "its prompts belong to groups of labels" if grouped else "its queries attend to one another"
        raise UserError(f"a label cannot be added to a model with head {kind} by its name, because {reason}")
    definition = abstract_parts(config, space).definition
    per_label = {path for path, names in definition.axes().items() if label_axes(names)}
    if per_label and not head.starts_from_names:
        raise UserError(
            f"a label cannot be added by its name, because {min(per_label)} has values for each label; train with head "
            "query, or routed_experts with routing.classifier=shared, gate_share=shared and task_experts=0, instead"
        )
    shapes, trained_shapes = definition.shapes(), trained.shapes()
    changed = {path for path in shapes.keys() | trained_shapes.keys() if shapes.get(path) != trained_shapes.get(path)}
    if other := changed - per_label:
        raise UserError(f"{min(other)} is not as in {source.folder}; give the config with which this run was trained")
