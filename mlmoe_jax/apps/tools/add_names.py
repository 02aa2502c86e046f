"""`mlmoe import` of a run with vectors of further label names: a model with these labels, without training.

The queries of RAM++ are exchangeable at prediction in the same way: they are computed from vectors of names.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.text_encoder import vectors_for
from mlmoe_jax.models.adapters.catalog import prompts_class
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.partition import label_axes
from mlmoe_jax.runs.assemble import Parts, abstract_parts, preprocess_for
from mlmoe_jax.runs.restore import read_run
from mlmoe_jax.training.initialization import OtherRun


def parts_with_names(config: ConfigDict, source: OtherRun) -> tuple[LabelSpace, Preprocess, Parts]:
    """Return a model with the labels of a run and the further ones of `model.head.names`, as `parts_of_names` does.

    The scores of the labels of the run do not change.

    Args:
      config: the config of the run, with the names of all labels.
      source: the run.

    Raises:
      UserError: the vectors do not fit the labels of the run, or its scores of a label depend on the other labels.
    """
    source_config, known = read_run(source.folder)
    space = known.with_names(vectors_for(config))
    _require_open(config, space, source, abstract_parts(source_config, known).definition)
    return space, preprocess_for(config), source.parts(space)


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
