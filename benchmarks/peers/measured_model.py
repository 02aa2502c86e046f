"""The models and batches that are measured: published configs with the sizes of a case, random values and pixels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.runs.assemble import Parts, abstract_parts

CONFIGS = {
    "ml-vpt": "mlvpt_dinov2",
    "q2l": "q2l_resnet101",
    "dr-moe": "drmoe_resnet101",
    "vpt": "vpt",
    "lora": "lora",
}


def config_of(case: dict[str, Any]) -> ConfigDict:
    """Return the published config with the sizes of a case."""
    reference = CONFIGS[case["method"]]
    reference += f":dataset=coco2014,resolution={case['resolution']},backbone={case['backbone']}"
    overrides = {
        "model.backbone.weights": "none",
        "model.dtype": case["dtype"],
        "model.frozen_dtype": case["dtype"],
        "train.batch_size": case["batch"],
        "eval.batch_size": case["batch"],
        "model.prompts.num_groups": case["groups"],
        "model.prompts.per_group": case["per_group"],
    }
    config = configuration.load_config(reference, [(key, str(value)) for key, value in overrides.items()])
    configuration.validate(config)
    return config


def random_values(shapes: Any) -> Any:
    """Return random values for a tree of shapes, quickly, by repeating 4,096 numbers; variances are above 1."""
    numbers = 0.02 * np.random.default_rng(0).standard_normal(4096).astype(np.float32)

    def fill(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        values = np.resize(numbers, shape.shape)
        if jax.tree_util.keystr(path).endswith("var']"):
            values = 1 + np.abs(values)
        return jnp.asarray(values, shape.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def parts_of(config: ConfigDict, space: LabelSpace) -> Parts:
    """Return the model of a config with random values."""
    return random_values(abstract_parts(config, space))


def random_batch(size: int, side: int, labels: int) -> dict[str, np.ndarray]:
    """Return a batch of the pipeline with random pixels and labels."""
    draw = np.random.default_rng(0)
    return {
        "image": draw.integers(0, 256, (size, side, side, 3), np.uint8),
        "label": draw.integers(0, 2, (size, labels)).astype(np.float32),
        "label_mask": np.ones((size, labels), np.float32),
        "mask": np.ones(size, np.float32),
        "id": np.arange(size, dtype=np.int32),
    }
