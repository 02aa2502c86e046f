"""The cost of a config before training: parameters, multiply-adds per image, bytes of state.

There are four counts of multiply-adds (MACs), see _NOTES. Publications use `layers` and `products`; `executed` counts
the operations of the evaluation step as it is compiled. `layers` is the count of the profiler that the prompt-tuning
papers used: convolutions, linear layers, 4·tokens·D per LayerNorm and K·D for the classifier, with all tokens in every
block. D is the embedding dimension, and K the number of labels.
"""

from typing import Any

import jax
from ml_collections import ConfigDict

from mlmoe_jax.models.macs import count_macs
from mlmoe_jax.models.params import Params, module_rows
from mlmoe_jax.runtime.sharding import find_devices, make_mesh
from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.training.build_steps import Steps, abstract_steps

_NOTES = (
    "MACs: multiply-adds per image. layers: as the prompt-tuning papers count;",
    "full: with attention, experts and gates;",
    "products: full without norms, as the papers on heads over feature maps count;",
    "executed: dot products and convolutions of the actual evaluation step",
)


def count_cost(config: ConfigDict) -> dict[str, Any]:
    """Return the numbers of parameters and multiply-adds of a config, and the bytes of its training state.

    The number of labels is a constant for a published data set, and otherwise read from the training labels of
    `config.data`. Raises UserError if it is unknown.

    Returns:
      A dict with four entries:
      `params`: the numbers of parameters: total, trainable and backbone.
      `macs`: the multiply-adds per image: layers, full, products and executed, see the docstring of this module.
      `memory`: the bytes of each part of the training state: frozen, trainable, optimizer, average and selected.
      `modules`: name of a module -> the numbers of all its parameters and of its trainable parameters.
    """
    parts, steps = abstract_steps(config, make_mesh({"data": 1, "fsdp": 1, "expert": 1}, find_devices()[:1]))
    trainable, frozen, learned = parts.trainable, parts.frozen, parts.learned
    params = {**trainable, **frozen}
    layers, extra, norms = parts.definition.merge(params, parts.stats).published_macs(config.data.image_size)
    moments = jax.tree.leaves(jax.eval_shape(steps.optimizer.init, trainable))
    return {
        "params": {
            "total": _size(params),
            "trainable": _size(trainable),
            "backbone": _size({path: p for path, p in params.items() if path.startswith("backbone/")}),
        },
        "macs": {
            "layers": layers,
            "full": layers + extra,
            "products": layers + extra - norms,
            "executed": _executed_macs(steps, learned, frozen, config.eval.batch_size),
        },
        "memory": {
            "frozen": _bytes(frozen),
            "trainable": _bytes(learned),
            "optimizer": sum(m.size * m.dtype.itemsize for m in moments if m.ndim),
            "average": _bytes(learned),
            "selected": _bytes(learned),
        },
        "modules": module_rows(trainable, frozen),
    }


def _size(params: Params) -> int:
    return sum(p.size for p in params.values())


def _bytes(params: Params) -> int:
    return sum(p.size * p.dtype.itemsize for p in params.values())


def _executed_macs(steps: Steps, learned: Params, frozen: Params, batch_size: int) -> int:
    """Return the multiply-adds per image of the evaluation step, counted in its jaxpr."""
    batch = steps.preprocess.batch_shapes(batch_size)
    with jax.default_device("cpu"):  # on an NVIDIA GPU, attention is a call of cuDNN, whose matmuls cannot be counted
        evaluation = steps.eval_step.trace(learned, frozen, batch).jaxpr
    return round(count_macs(evaluation.jaxpr) / batch_size)


def cost_outcome(costs: dict[str, dict[str, Any]]) -> Outcome:
    """Return a table of configs, and one of modules per config; `costs` is config name -> result of `count_cost`."""
    names = ("parameters", "trainable", "backbone", "MACs: layers", "full", "products", "executed")
    columns = ["config", *names, Column("state, MB", _megabytes_text)]
    rows = [
        [config, *cost["params"].values(), *cost["macs"].values(), sum(cost["memory"].values())]
        for config, cost in costs.items()
    ]
    tables = [Table(columns, rows, notes=_NOTES)]
    for config, cost in costs.items():
        modules = [[module, *counts] for module, counts in cost["modules"].items()]
        parts = (f"{part} {_megabytes_text(size)} MB" for part, size in cost["memory"].items())
        tables.append(Table([config, "parameters", "trainable"], modules, notes=[f"state: {', '.join(parts)}"]))
    return Outcome(tables, costs)


def _megabytes_text(size: int) -> str:
    return f"{size / 1e6:,.1f}"
