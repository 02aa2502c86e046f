"""Models and state dicts of the authors' code, small and with random values."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.paths import PARITY
from mlmoe_jax.config import default_config
from mlmoe_jax.config.recipes.prompt_tuning import use_ml_vpt
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.models.build import build_model
from tools.parity import prompt_family as family

LISTED = json.loads((PARITY / "checkpoint_keys.json").read_text())
LAYOUTS = {
    "ML-VPT on DINOv2": "ml_vpt_dinov2",
    "ML-VPT on the supervised ViT-B/16 class": "ml_vpt",
    "ML-VPT on MAE": "ml_vpt",
    "ML-VPT on MoCo v3": "ml_vpt",
    "VPT deep": "vpt_deep",
    "VPT shallow": "vpt_shallow",
    "GateVPT": "vpt_shallow_timm",
    "E2VPT": "vpt_deep",
}

# Methods -> their case in `tools.parity.prompt_family`.
FAMILY = {"VPT deep": "vpt_deep", "VPT shallow": "vpt_shallow", "GateVPT": "gate_vpt", "E2VPT": "e2vpt"}


def listed(name: str) -> dict:
    """Return the configuration and the {tensor name: shape} of a layout; some names refer to another entry."""
    found = LISTED[name]
    return LISTED[found] if isinstance(found, str) else found


def random_tensors(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {key: draw.normal(size=shape).astype(np.float32) for key, shape in listed(name)["keys"].items()}


@functools.cache
def structure(name: str, **changes):
    """Return the structure of the model of a name in LISTED or in the family, and its abstract values.

    changes: keys of config.model.prompts, and their values.
    """
    config, shape, labels = family_config(name) if name in family.CASES else listed_config(name)
    for key, value in changes.items():
        config.model.prompts[key] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(catalog.CATALOG, "tiny", replace(catalog.entry("vit_b16_in1k"), shape=shape))
        space = synthetic_label_space(labels, 2)
        return nnx.split(nnx.eval_shape(lambda: build_model(config, space, rngs=nnx.Rngs(0))))


def make_model(name: str, seed: int = 0, **changes):
    """Return a model with random values; see `structure`."""
    graph, state = structure(name, **changes)
    draw = np.random.default_rng(seed)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), state))


def listed_config(name: str):
    sizes = listed(name)["config"]
    dinov2 = {"layer_scale": 1.0, "mask_token": True} if sizes.get("layerscale") else {}
    shape = ViTShape(sizes["embed"], sizes["depth"], sizes["heads"], sizes["patch"], sizes["img"], **dinov2)
    if name.startswith("ML-VPT"):
        config = default_config()
        config.model.backbone.name, prompts = "tiny", config.model.prompts
        use_ml_vpt(config)
        prompts.num_groups, prompts.per_group = sizes["Nc"], sizes["Nm"]
    else:
        config, *_ = family_config(FAMILY[name])
        prompts = config.model.prompts
        prompts.count, prompts.key_values, prompts.pruning = sizes["prompts"], sizes.get("kv_prompts", 0), "learned"
    return config, shape, sizes["K"]


def family_config(name: str):
    case, config = family.CASES[name], default_config()
    config.model.backbone.name = "tiny"
    prompts = config.model.prompts
    prompts.kind = "e2vpt" if case.key_values else "deep" if case.deep else "shallow"
    prompts.count, prompts.project = family.PROMPTS, case.project
    prompts.gated = prompts.learn_temperature = case.gated
    prompts.key_values, prompts.share_key_values = family.KEY_VALUES, case.key_values == "shared"
    prompts.pruning, prompts.pruned = ("fixed" if case.masked else "none"), "zeroed"
    config.model.head.pool = "mean" if case.mae else "cls"
    shape = ViTShape(family.WIDTH, family.DEPTH, family.HEADS, family.PATCH, family.IMAGE)
    return config, shape, family.LABELS


def columns_first(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors with the positions of MoCo v3 in place of those of MAE, rounded as in half precision."""
    table = tensors["pos_embed"]
    patches = table[:, 1:].reshape(1, 4, 4, -1)
    assert np.abs(patches[:, :, 1] - patches[:, :, 0]).max() > 0.8  # the first channels depend on the column
    turned = np.concatenate([table[:, :1], patches.swapaxes(1, 2).reshape(1, 16, -1)], axis=1)
    return tensors | {"pos_embed": turned.astype(np.float16).astype(np.float32)}
