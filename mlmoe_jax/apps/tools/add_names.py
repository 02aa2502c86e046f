"""`mlmoe import` of a run with vectors of further label names: a model with these labels, without training.

The queries of RAM++ can also be replaced at prediction, because they are computed from vectors of names.
"""

from dataclasses import dataclass
from functools import cached_property

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.text_encoder import vectors_for
from mlmoe_jax.models.adapters.catalog import prompts_class
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.partition import label_axes
from mlmoe_jax.runs.assemble import abstract_parts
from mlmoe_jax.runs.restore import read_run
from mlmoe_jax.training.initialization import OtherRun


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
