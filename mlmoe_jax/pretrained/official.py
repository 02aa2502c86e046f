"""Import and export of whole models as checkpoints of the authors' PyTorch code.

Both directions use the same layouts (`rules/prompt_names.py`, `rules/head_names.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.entry import IMAGENET_MEAN
from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.heads.query import ML_DECODER_SETTINGS, Q2L_SETTINGS, QueryHead
from mlmoe_jax.models.layers.positions import sine_positions
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.query_decoder import STYLES
from mlmoe_jax.pretrained.load import LAYOUTS, LoadReport, MappedFile, fill, map_file, recognize
from mlmoe_jax.pretrained.rules.base import INVERSES, Layout, Rule
from mlmoe_jax.pretrained.torch_file import SUFFIXES as TORCH_SUFFIXES
from mlmoe_jax.runtime.array_types import Arrays
from mlmoe_jax.runtime.storage import atomic_file, named_file

CHECKPOINT_SUFFIXES = (".npz", ".safetensors", *TORCH_SUFFIXES)
POSITION_TABLE = "backbone/pos_embed"
# The style of Q2L with self-attention between labels (by flags of the authors' code), and its parameters.
_Q2L_WITH_SELF_ATTENTION, _SELF_ATTENTION = "q2l_self_attention", r"head/decoder/layers/\d+/self_attn/.*"


def _decoder_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return config key -> value of the settings of a query decoder that change its outputs but no parameter shape."""
    return {f"head.decoder.{key}": settings[key] for key in ("heads", "style")}


# The values of keys of `config.model` in the authors' code: (pattern of layouts, {key: value}).
_EXPECTED = (
    (
        r"ml_vpt.*",
        {
            "prompts.groups": "published",
            "prompts.attention_mask": "all_prompts",
            "head.activation": "gelu",
            "head.gates_of": "label",
            "head.gate_bias": "unused",
            "head.combine": "mean_logit",
        },
    ),
    (r"vpt_deep.*", {"prompts.pruned": "zeroed"}),
    (r"q2l", _decoder_keys(Q2L_SETTINGS)),
    (r"ml_decoder.*", _decoder_keys(ML_DECODER_SETTINGS) | {"backbone.normalization": "unit"}),
)


def load_official(model: nnx.Module, path: Path) -> LoadReport:
    """Fill a model in place from a checkpoint of the authors' code. The checkpoint may contain only the head.

    If the position table of the file has another number of positions, it replaces the table of the backbone. The
    authors' code for ViT-B/16 resamples the table when it builds a model for larger images, and stores the result.

    Raises:
      UserError: the checkpoint is neither a whole model nor a head. Or the head in its code reads other tokens than
        the head of the model. Or its shapes do not fit the model, for instance because the number of labels differs.
        The model is then unchanged.
    """
    mapped = map_file(path, whole_model=True)
    if problem := _find_contradiction(model, mapped):
        raise UserError(f"{mapped} {problem}")
    if mapped.layout.is_head:
        mapped = replace(mapped, layout=replace(mapped.layout, optional=(r"(?!head/).*",)))
    table = mapped.values.get(POSITION_TABLE)
    if not isinstance(model.backbone, ViT) or table is None or not _is_table(table, model.backbone.shape.width):
        return fill(model, mapped)
    own = model.backbone.pos_embed
    model.backbone.pos_embed = nnx.Param(jnp.zeros(table.shape))
    try:
        return fill(model, mapped)
    except UserError:
        model.backbone.pos_embed = own
        raise


def _find_contradiction(model: nnx.Module, mapped: MappedFile) -> str:
    """Return why a checkpoint belongs to another model than `model`, and the remedy; "" if nothing contradicts."""
    pool = _pooling(mapped.layout.name, mapped.values.get(POSITION_TABLE))
    if pool not in (None, _head_pool(model)):
        return f"comes from code that classifies {_TOKENS[pool]}; set config.model.head.pool={pool}"
    of_q2l = isinstance(model.head, QueryHead) and model.head.decoder.style == STYLES["q2l"]
    if of_q2l and any(re.fullmatch(_SELF_ATTENTION, path) for path in mapped.values):
        style = _Q2L_WITH_SELF_ATTENTION
        return f"has self-attention between labels; set config.model.head.decoder.style={style}"
    return ""


_TOKENS = {"cls": "the class token", "mean": "the mean of prompts and patches, as on MAE"}


def _pooling(layout: str, table: np.ndarray | None) -> str | None:
    """Return the `model.head.pool` of the authors' code for a layout, "cls" or "mean"; None if it is unknown.

    On MAE, the head in the code of VPT, GateVPT and E2VPT reads the mean of prompts and patches. On other backbones it
    reads the class token. GateVPT's code uses the same tensor names for MAE and MoCo v3, but the fixed position tables
    f32[1,1+S·S,D] of MAE and MoCo v3 differ. The result is None for any other position table, and for layouts of other
    models.
    """
    if layout.endswith("_mae"):
        return "mean"
    if layout.endswith("_timm"):
        if table is None or not _is_table(table, table.shape[-1]) or table.shape[-1] % 4:
            return None
        side = math.isqrt(table.shape[1] - 1)
        mae = sine_positions(side, table.shape[-1], endpoint=False).reshape(side, side, -1)
        patches = table[0, 1:].reshape(mae.shape)
        tables = {"mean": mae, "cls": mae.swapaxes(0, 1)}  # of MAE and of MoCo v3
        return next((pool for pool, fixed in tables.items() if np.allclose(patches, fixed, rtol=0, atol=1e-2)), None)
    return "cls" if layout.startswith("vpt") else None


def _head_pool(model: nnx.Module) -> str | None:
    return model.head.pool if isinstance(model.head, LinearHead) else None


def _is_table(value: np.ndarray, width: int) -> bool:
    """Return whether an array has the shape [1,1+S·S,D] with D = `width`: a class token and S × S patch positions."""
    return (
        value.ndim == 3 and value.shape[::2] == (1, width) and math.isqrt(value.shape[1] - 1) ** 2 == value.shape[1] - 1
    )


def export_official(model: nnx.Module, path: Path) -> Layout:
    """Write a whole model as a float32 state dict of the authors' code, and return the layout.

    The file is .npz or .safetensors, see `require_writable`. Raises UserError if no layout fits the model.
    """
    layout, tensors = official_tensors(model)
    with atomic_file(named_file(path)) as partial:
        if path.suffix == ".npz":
            with open(partial, "wb") as file:
                np.savez(file, **tensors)
        else:
            save_file(tensors, partial, {"format": "pt"})
    return layout


def require_writable(path: Path) -> None:
    """Raise UserError if the suffix of a path is unsupported or the folder of the path does not exist."""
    if path.suffix not in (".npz", ".safetensors"):
        raise UserError(f"a state dict is written to .safetensors and .npz files, not to '{path.name}'")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} into")


def official_tensors(model: nnx.Module) -> tuple[Layout, Arrays]:
    """Return the layout of the authors' code that fits a whole model, and the parameters as tensor name -> f32.

    Importing these tensors restores the parameters. E2VPT's prompt keys and values cannot be exported, because their
    rules cannot be read backwards.

    Raises:
      UserError: no layout has names for all parameters, or the head in the code of the layout reads other tokens. Or
        the model has rotary positions, which the authors' code does not have.
    """
    if isinstance(model.backbone, ViT) and model.backbone.shape.rotary_base is not None:
        raise UserError("the authors' code has no ViT with rotary positions, so there is no layout for this model")
    _, params, stats = ModelDef.split(model)
    values = {path: np.asarray(value, np.float32) for path, value in {**params, **stats}.items()}
    for layout in LAYOUTS:
        tensors = _name_tensors(layout, values) if layout.is_whole_model else None
        # A layout with names for all parameters may belong to another class of models; its marker decides.
        named = tensors and recognize(tensors) is layout
        if named and _pooling(layout.name, values.get(POSITION_TABLE)) in (None, _head_pool(model)):
            return layout, {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    raise UserError("no layout of the authors' code has names for all parameters of this model and the same pooling")


def _name_tensors(layout: Layout, values: Arrays) -> Arrays | None:
    """Return tensor name -> array for the parameters `values`; None if the layout has no name for a parameter."""
    tensors = {}
    for path, value in values.items():
        try:
            rules = [rule for rule in layout.rules if rule.transform in INVERSES and rule.tensor_name(path)]
            parts = {rule.tensor_name(path): INVERSES[rule.transform](part) for rule, part in split_value(rules, value)}
        except ValueError:  # the parameter has another shape in the layout, or the rule has no inverse
            return None
        if not parts:
            return None
        tensors |= parts
    return tensors


def split_value(rules: Sequence[Rule], value: np.ndarray) -> list[tuple[Rule, np.ndarray]]:
    """Split an array into the tensors that `rules` concatenate along one axis: the inverse of `load.join_pieces`.

    Return (rule, tensor) in the order along the axis. If two rules make the same tensor, the first is used. Raises
    ValueError if the rules cannot split the array.
    """
    by_index = {rule.index: rule for rule in reversed(rules)}
    if set(by_index) <= {()}:
        return [(rule, value) for rule in by_index.values()]
    if any(len(index) != 1 or isinstance(index[0], str) for index in by_index):
        raise ValueError("a value is split along one axis, with one rule per part")
    ordered = [by_index[index] for index in sorted(by_index)]
    size = ordered[0].size
    parts = np.split(value, len(ordered) if size is None else [size], axis=ordered[0].axes[0])
    return list(zip(ordered, parts, strict=True))


def departures(settings: ConfigDict, layout: str) -> list[str]:
    """Return one phrase for each setting of `config.model` that differs from the authors' code of a layout."""
    expected = next((table for pattern, table in _EXPECTED if re.fullmatch(pattern, layout)), {})
    expected = {"backbone.normalization": "imagenet"} | expected
    if layout == "q2l" and settings.head.decoder.style == _Q2L_WITH_SELF_ATTENTION:
        expected["head.decoder.style"] = _Q2L_WITH_SELF_ATTENTION  # the tensors show which style it is
    if settings.prompts.pruning == "none":
        expected.pop("prompts.pruned", None)
    is_imagenet = catalog.entry(settings.backbone.name).mean == IMAGENET_MEAN
    if expected["backbone.normalization"] == "imagenet" and settings.backbone.normalization == "auto" and is_imagenet:
        del expected["backbone.normalization"]  # auto means imagenet
    values = {key: reduce(getitem, key.split("."), settings) for key in expected}
    return [
        f"model.{key} is {value} instead of {expected[key]}" for key, value in values.items() if value != expected[key]
    ]
