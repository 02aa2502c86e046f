"""Merge the adapters of a run into the weights of its backbone."""

import copy
from dataclasses import replace

import jax
from ml_collections import ConfigDict

from mlmoe_jax.apps.export.program import program_of, require_equal
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.adapter_merge import merge_adapters
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.runs.assemble import abstract_parts, evaluated_definition
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.sharding import shard_tree


def merge_run(run: Run) -> Run:
    """Return a run whose adapters are merged into the weights of the backbone. Its outputs are equal.

    Its config has no `model.adapters`. The merged kernels are float32, and the backbone counts as unpublished. Raises
    UserError if the run has no adapters, and under the conditions of `merge_adapters`.
    """
    if not run.config.model.adapters:
        raise UserError("the run has no adapters to merge; leave --merge out")
    exact, config = copy.deepcopy(run.config), copy.deepcopy(run.config)
    exact.model.dtype = "float32"
    config.model.adapters, config.model.backbone.weights = ConfigDict(), "none"
    model = abstract_parts(exact, run.label_space).definition.merge(jax.device_put(run.weights()))
    model = merge_adapters(model)
    _, params, stats = ModelDef.split(model)
    parts, everything = abstract_parts(config, run.label_space), {**params, **stats}
    trained, frozen = (
        shard_tree({path: everything[path] for path in paths}, run.mesh, run.label_axes)
        for paths in (parts.learned, parts.frozen)
    )
    definition = evaluated_definition(config, parts, run.label_space)
    merged = replace(run, config=config, definition=definition, values=trained, frozen=frozen)
    label, weights = jax.jit(program_of(merged)), merged.everything
    status(f"adapters merged, {require_equal(run, lambda images: label(weights, images))}")
    return merged
