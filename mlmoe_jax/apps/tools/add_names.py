"""`--mode=import` of a run with vectors of further label names: a model with these labels, without training.

The queries of RAM++ are exchangeable at prediction in the same way: they are computed from vectors of names.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.text_encoder import vectors_for
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.partition import label_axes
from mlmoe_jax.models.registries import head_class, prompts_class
from mlmoe_jax.runs.assemble import abstract_parts, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import read_run, write_run_metadata
from mlmoe_jax.runs.shared_model import write_adapter
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.training.initialization import OtherRun


def add_names(config: ConfigDict, source: OtherRun, folder: RunFolder) -> None:
    """Write a run folder with the labels of a run and the further ones of `model.head.names`.

    The scores of the labels of the run do not change. Like a shared model, the folder has the values and no
    checkpoints.

    Args:
      config: the config of the run, with the names of all labels.
      source: the run.
      folder: the new run folder.

    Raises:
      UserError: the vectors do not fit the labels of the run, or its scores of a label depend on the other labels.
    """
    folder.require_creatable()
    setup_jax(config)
    source_config, known = read_run(source.folder)
    space = known.with_names(vectors_for(config))
    _require_open(config, space, source, abstract_parts(source_config, known).definition)
    parts = source.parts(space)
    with folder.writing_by_first():
        if distributed.is_first():
            write_adapter(folder, {**parts.trainable, **parts.stats}, {"step": 0, "kind": "imported", "split": ""})
            write_run_metadata(folder, config, space, preprocess_for(config), parts)


def _require_open(config: ConfigDict, space: LabelSpace, source: OtherRun, trained: ModelDef) -> None:
    """Raise UserError unless a model has values for further labels, and its labels are computed apart.

    Args:
      config: the config of the model.
      space: all labels.
      source: the run.
      trained: the structure of the model of the run, without the further labels.
    """
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
