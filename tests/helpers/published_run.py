"""A run on the smallest of backbones, whose published weights are in the cache, with random values for the rest."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from helpers import tiny
from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.space import LabelSpace, synthetic_label_space
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.params import Params
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import Parts, assemble, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import write_run_metadata
from mlmoe_jax.training.selection import Selection

CLASSES = ("a", "b", "c")
CALIBRATION = {
    "split": "val",
    "labels": {
        "a": {"scale": 0.5, "offset": 0.25},
        "b": {"scale": 2.0, "offset": -1.0},
        "c": {"scale": 1.5, "offset": 0.5},
    },
}


@contextlib.contextmanager
def config_of(folder: Path) -> Iterator[ConfigDict]:
    """Give a config for the backbone `tiny`; its weights are published in `folder` until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLMOE_CACHE", str(folder / "cache"))
        shape = {"width": 8, "depth": 1, "patch": 4, "native": 8, "mlp_ratio": 1}
        tiny.use_vit(patch, name="tiny", file="tiny.safetensors", **shape)
        publish(folder, seed=5)
        config = default_config()
        config.model.backbone.name, config.data.image_size, config.eval.batch_size = "tiny", 8, 4
        config.model.matmul_precision = "highest"
        yield config


def publish(folder: Path, seed: int) -> None:
    """Put random weights for the backbone tiny into the cache."""
    tiny.write_weights(folder / "cache" / "tiny.safetensors", catalog.entry("tiny"), seed)


def write_run(folder: RunFolder, config: ConfigDict) -> tuple[Parts, Params]:
    """Write a run folder as training does, with random trained parameters; return the parts and the values."""
    drawn = synthetic_label_space(len(CLASSES), 1)
    space = LabelSpace(CLASSES, drawn.counts, np.array([2, 3, 4]), 10, drawn.co_group, drawn.dc_group)
    parts = assemble(config, space)
    with folder.writing():
        write_run_metadata(folder, config, space, preprocess_for(config), parts)
        values = {path: value + 0.5 for path, value in parts.trainable.items()}
        with checkpoint.open_manager(folder) as manager:
            notes = Selection({}, step=20, kind="raw").notes()
            checkpoint.save(manager, 30, {"step": jnp.int32(30)}, values, notes)
    return parts, values
