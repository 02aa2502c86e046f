"""Runs of every method with random weights to export, and what is in an exported folder."""

import runpy
from collections import Counter
from pathlib import Path

import pytest

from mlmoe_jax import load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.runs.assemble import assemble, preprocess_for
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.sharding import make_mesh

SMALL = {"data.image_size": 32, "model.head.decoder.width": 16, "model.head.decoder.hidden": 32}
ON_VIT = {"model.backbone.name": "vit_digits", "data.image_size": 32}
ON_RESNET = SMALL | {"model.backbone.name": "resnet50"}
CNNS = {name: {"data.image_size": 32, "model.backbone.name": name} for name in ("efficientnet_lite0", "convnext_tiny")}


def random_run(reference: str, assembled=assemble, **changes) -> Run:
    """The run of a config with random weights; with `abstract_parts`, of shapes alone."""
    config = load_config(reference, {"model.backbone.weights": "none", "model.matmul_precision": "highest", **changes})
    space = synthetic_label_space(6, 2)
    parts = assembled(config, space)
    values = {**parts.trainable, **parts.stats}
    mesh = make_mesh(config.mesh)
    placed = {"definition": parts.definition, "preprocess": preprocess_for(config), "mesh": mesh}
    return Run(config, space, values, parts.frozen, {"step": 0}, **placed)


def model_of(folder: Path):
    """Return the `Model` that load.py of an exported folder has."""
    return runpy.run_path(str(folder / "load.py"))["Model"](folder)


def operations(folder: Path) -> Counter[str]:
    """Return how many operations of each type model.onnx has."""
    program = pytest.importorskip("onnx").load(folder / "model.onnx", load_external_data=False)
    return Counter(node.op_type for node in program.graph.node)
