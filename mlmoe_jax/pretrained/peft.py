"""LoRA, rsLoRA and DoRA in the files of PEFT, `adapter_config.json` and `adapter_model.safetensors`.

The base model of such a file is a DINOv2 or a ViT of Hugging Face's transformers, with or without its classifier.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.adapter_merge import layer_weights
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.layers.deltas import layer_path
from mlmoe_jax.pretrained.load import read_tensors, require_finite
from mlmoe_jax.runtime.files import MIB, damage_explained, open_regular

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

# Layer -> its names in transformers 5, and before. A giant DINOv2 of transformers 5 has two layers for our `fc1`.
_NAMES = {
    "query": ("attention.q_proj", "attention.attention.query"),
    "key": ("attention.k_proj", "attention.attention.key"),
    "value": ("attention.v_proj", "attention.attention.value"),
    "output": ("attention.o_proj", "attention.output.dense"),
    "fc1": ("mlp.fc1", "intermediate.dense", "mlp.weights_in"),
    "fc2": ("mlp.fc2", "output.dense", "mlp.weights_out", "mlp.down_proj"),
}
_LAYERS = {name: layer for layer, names in _NAMES.items() for name in names}
_PARTS = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_magnitude_vector": "magnitude"}
_PREFIX = "base_model.model."
_TENSOR = re.compile(
    rf"{re.escape(_PREFIX)}(?:\w+\.)?(?:encoder\.)?layers?\.(?P<block>\d{{1,4}})\.(?P<layer>[a-z0-9_.]+)\."
    rf"(?P<part>{'|'.join(map(re.escape, _PARTS))})"
)
_CLASSIFIER = re.compile(rf"{re.escape(_PREFIX)}classifier\.(?P<part>weight|bias)")

# Options of PEFT with an effect on the files that is read from the tensors, or without an effect on outputs.
_HARMLESS = (
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "runtime_config"),
    *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("ensure_weight_tying", "peft_type", "r", "lora_alpha", "use_rslora", "use_dora"),
)
# Options with the values that we can represent, beside None, False and empty ones. Other initial values of LoRA change
# the weights of the base model.
_NEUTRAL = {
    "bias": ("none",),
    "modules_to_save": (["classifier"],),
    "init_lora_weights": (True, "gaussian", "eva"),
}


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA or DoRA adapter that PEFT has written.

    Attributes:
      path: the folder of the files.
      name: the name of the adapter in mlmoe_jax, `lora` or `dora`.
      settings: the settings of `model.adapters.NAME` that the files determine.
      tensors: `LAYER/a`, `LAYER/b` and `LAYER/magnitude` -> f32[L,…] for L blocks, in the axis order of Flax.
        `magnitude` is PEFT's: the norm of each column, not its difference from the norm of the frozen column.
      classifier: `kernel` f32[D,K] or f32[2D,K], and `bias` f32[K]; {} if the files have no classifier.
    """

    path: Path
    name: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    classifier: Mapping[str, np.ndarray]


def is_peft(path: Path) -> bool:
    """Return whether a path is a folder with PEFT's files."""
    return (path / CONFIG).is_file()


# ---------------------------------------------------------------------------------------------------------- reading
def read_peft(path: Path) -> PeftAdapter:
    """Read an adapter from a folder with PEFT's files.

    Raises:
      UserError: a file is missing or damaged, or mlmoe_jax does not support an option, a layer or a value in the files.
    """
    with damage_explained(path / CONFIG), open_regular(path / CONFIG) as file:
        options = json.loads(file.read(MIB))
        rank, alpha = int(options["r"]), float(options["lora_alpha"])
        problem = _find_unreadable_option(options)
    if problem:
        raise UserError(f"{path / CONFIG} has {problem}")
    name = "dora" if options.get("use_dora") else "lora"
    tensors, classifier = _by_layer(path, read_tensors(path / TENSORS))
    targets = tuple(layer for layer in _NAMES if f"{layer}/a" in tensors)
    parts = ("a", "b", "magnitude") if name == "dora" else ("a", "b")
    if odd := sorted(tensors.keys() ^ {f"{layer}/{part}" for layer in targets for part in parts}):
        raise UserError(f"{path / TENSORS} does not fit {CONFIG}: {odd[0]} is missing or unexpected")
    settings = {
        "rank": rank,
        "alpha": alpha,
        "targets": targets,
        "rank_stabilized": bool(options.get("use_rslora")),
    }
    return PeftAdapter(path, name, settings, tensors, classifier)


def _find_unreadable_option(options: Mapping[str, Any]) -> str:
    """Describe the first option of PEFT that the adapters of mlmoe_jax do not support; "" if all are supported."""
    if options["peft_type"] != "LORA":
        return f"peft_type={options['peft_type']}, and only LORA can be read, with use_rslora and use_dora"
    for name, value in options.items():
        if name not in _HARMLESS and value and value not in _NEUTRAL.get(name, ()):
            return f"{name}={json.dumps(value)}, which our adapters cannot represent"
    return ""


def _by_layer(path: Path, stored: Mapping[str, np.ndarray]) -> tuple[dict, dict]:
    """Return the `tensors` and the `classifier` of a `PeftAdapter` from the tensors of a file.

    Raises UserError if a tensor is not finite or belongs to an unknown layer.
    """
    rows: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    classifier = {}
    for name, tensor in stored.items():
        require_finite(path / TENSORS, name, tensor)
        value = tensor.T.astype(np.float32)
        match = _TENSOR.fullmatch(name)
        if match and match["layer"] in _LAYERS:
            rows[f"{_LAYERS[match['layer']]}/{_PARTS[match['part']]}"][int(match["block"])] = value
        elif match := _CLASSIFIER.fullmatch(name):
            classifier["kernel" if match["part"] == "weight" else "bias"] = value
        else:
            raise UserError(f"tensor {name} in {path / TENSORS} belongs to no layer that our adapters change")
    return _stack_blocks(path, rows), classifier


def _stack_blocks(path: Path, rows: Mapping[str, Mapping[int, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack the tensors of all blocks along a new first axis.

    Args:
      path: the folder, for the error.
      rows: name of a tensor -> index of a block -> array.

    Returns:
      name of a tensor -> array [L,…] for L blocks.

    Raises:
      UserError: a block has no such tensor, or its shape differs from the other blocks.
    """
    depth = 1 + max((block for values in rows.values() for block in values), default=-1)
    tensors = {}
    for name, values in rows.items():
        if len(values) < depth or len({value.shape for value in values.values()}) > 1:
            raise UserError(f"{path / TENSORS} adapts {name} not in all {depth} blocks alike, as our adapters do")
        tensors[name] = np.stack([values[block] for block in range(depth)])
    return tensors


def fill_from_peft(model: Classifier, adapter: PeftAdapter) -> list[str]:
    """Fill the adapter of a model from PEFT's files, and the classifier if possible.

    The classifier is filled if the files have one and the head is a linear classifier of the normalized class token.

    Args:
      model: a model that has the adapter and a filled backbone. It is changed in place.
      adapter: the adapter from the files.

    Returns:
      The paths of the filled parameters.

    Raises:
      UserError: shapes differ. Or the classifier of the files has another number of labels, or reads more than the
        class token.
    """
    own, filled = model.adapters[adapter.name], []
    for name, value in adapter.tensors.items():
        layer, part = name.split("/")
        if part == "magnitude":
            lengths = _all_lengths(model.backbone, layer)
            value = value - lengths if value.shape == lengths.shape else value
        variable = getattr(getattr(own, layer), part)
        if variable.shape != value.shape:
            raise UserError(
                f"{adapter.path / TENSORS} does not fit the backbone: {name} has shape {value.shape} instead of "
                f"{variable.shape}"
            )
        variable.set_value(jnp.asarray(value))
        filled.append(f"adapters/{adapter.name}/{name}")
    if adapter.classifier and _reads_class_token(model):
        filled += _fill_classifier(model, adapter)
    return filled


def _fill_classifier(model: Classifier, adapter: PeftAdapter) -> list[str]:
    """Fill the linear classifier of the class token, and return the paths of the filled parameters."""
    width, own = model.backbone.shape.width, model.head.classifier
    kernel, bias = adapter.classifier.get("kernel"), adapter.classifier.get("bias")
    if kernel is None or bias is None or kernel[:width].shape != own.kernel.shape or bias.shape != own.bias.shape:
        raise UserError(f"the classifier in {adapter.path / TENSORS} does not fit the backbone and the labels")
    if kernel[width:].any():
        raise UserError(
            f"the classifier in {adapter.path / TENSORS} reads the mean of the patches too; remove it from the file, "
            "and a new one is trained"
        )
    own.kernel.set_value(jnp.asarray(kernel[:width]))
    own.bias.set_value(jnp.asarray(bias))
    return ["head/classifier/kernel", "head/classifier/bias"]


def _reads_class_token(model: Classifier) -> bool:
    return isinstance(model.head, LinearHead) and model.head.pool == "cls" and model.final_norm


def _lengths(vit: ViT, index: int, layer: str) -> np.ndarray:
    """Return the L2 norms f32[out] of the columns of a layer's kernel in block `index`."""
    kernel, _ = layer_weights(vit, layer_path(index, layer))
    return np.linalg.norm(np.asarray(kernel, np.float32), axis=0)


def _all_lengths(vit: ViT, layer: str) -> np.ndarray:
    """Return the L2 norms f32[L,out] of the columns of a layer's kernel in each of the L blocks."""
    return np.stack([_lengths(vit, index, layer) for index in range(vit.shape.depth)])


# ---------------------------------------------------------------------------------------------------------- writing
def peft_files(model: Classifier, config: ConfigDict) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the content of `adapter_config.json`, and the float32 tensors of `adapter_model.safetensors` by name.

    A linear classifier of the class token is exported as the classifier of transformers. Other heads are not exported.
    The tensor names are the names in transformers 5.

    Raises:
      UserError: the model has prompts, has other adapters than one LoRA or DoRA, or has a backbone that transformers
        does not have.
    """
    if problem := _why_unwritable(model, config):
        raise UserError(problem)
    [name], shape = model.adapters, model.backbone.shape
    settings, (module, blocks) = config.model.adapters[name], _transformers_names(shape)
    layers = {layer: _NAMES[layer][0] for layer in settings.targets}
    if shape.mlp == "swiglu" and "fc2" in layers:
        layers["fc2"] = "mlp.down_proj"
    tensors = _classifier_tensors(model, shape.width if module == "vit" else 2 * shape.width)
    prefix = f"{_PREFIX}{module}." if tensors else _PREFIX
    for layer, layer_name in layers.items():
        for index in range(shape.depth):
            for part, value in _update_parts(model, name, layer, index).items():
                tensors[f"{prefix}{blocks}.{index}.{layer_name}.{part}"] = _tensor(value)
    published = catalog.entry(config.model.backbone.name).weights
    options = {
        "peft_type": "LORA",
        "base_model_name_or_path": (published and published.repository) or None,
        "task_type": None,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilized,
        "use_dora": name == "dora",
        "target_modules": sorted(layers.values()),
        "modules_to_save": ["classifier"] if prefix != _PREFIX else None,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    return options, tensors


def _why_unwritable(model: Classifier, config: ConfigDict) -> str:
    """Return why a model cannot be stored in PEFT's files; "" if it can."""
    adapters, shape = list(model.adapters), model.backbone.shape
    if adapters not in (["lora"], ["dora"]) or config.model.prompts.kind != "none":
        return "PEFT's files hold one LoRA or DoRA and no prompts; choose another --format"
    if shape.rotary_base is not None or shape.pre_norm or not shape.class_token or shape.mlp not in ("gelu", "swiglu"):
        return "PEFT's files are written for DINOv2 and for ViTs of transformers, and this is another backbone"
    if shape.mlp == "swiglu" and "fc1" in config.model.adapters[adapters[0]].targets:
        return "transformers has two layers for fc1 of this backbone; PEFT's files cannot hold its update"
    return ""


def _transformers_names(shape: ViTShape) -> tuple[str, str]:
    """Return two names in transformers 5: of the backbone in a model with a classifier, and of its list of blocks."""
    if shape.layer_scale is None and not shape.registers:
        return "vit", "layers"
    return "dinov2_with_registers" if shape.registers else "dinov2", "encoder.layer"


def _update_parts(model: Classifier, name: str, layer: str, index: int) -> dict[str, jax.Array | np.ndarray]:
    """Return the adapter's arrays for a layer of block `index`, as a dict: PEFT's name of the array -> array."""
    update = getattr(model.adapters[name], layer)
    parts = {"lora_A.weight": update.a[index], "lora_B.weight": update.b[index]}
    if name == "dora":
        parts["lora_magnitude_vector"] = update.magnitude[index] + _lengths(model.backbone, index, layer)
    return parts


def _classifier_tensors(model: Classifier, inputs: int) -> dict[str, np.ndarray]:
    """Return `weight` and `bias` of the classifier of transformers; {} if the head reads more than the class token.

    Args:
      model: the model.
      inputs: number of inputs of the classifier. If it also reads the mean of the patches (2D inputs), the weights of
        that mean are 0.
    """
    if not _reads_class_token(model):
        return {}
    kernel = np.asarray(model.head.classifier.kernel[...], np.float32)
    kernel = np.pad(kernel, ((0, inputs - len(kernel)), (0, 0)))
    bias = model.head.classifier.bias[...]
    return {f"{_PREFIX}classifier.weight": _tensor(kernel), f"{_PREFIX}classifier.bias": _tensor(bias)}


def _tensor(value: jax.Array | np.ndarray) -> np.ndarray:
    """Return an array as float32 with reversed axes, which is the axis order of PyTorch."""
    return np.ascontiguousarray(np.asarray(value, np.float32).T)
