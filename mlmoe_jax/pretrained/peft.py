"""LoRA, rsLoRA and DoRA in the files of PEFT, `adapter_config.json` and `adapter_model.safetensors`.

The base model of such a file is a DINOv2 or a ViT of Hugging Face's transformers, with or without its classifier.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.adapter_merge import layer_weights
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.layers.deltas import layer_path
from mlmoe_jax.pretrained.load import MappedFile, apply_rules, fill, read_tensors
from mlmoe_jax.pretrained.rules.base import Layout, Rule, linear_rules
from mlmoe_jax.runtime.array_types import Arrays
from mlmoe_jax.runtime.files import MIB, damage_explained, open_regular
from mlmoe_jax.runtime.storage import atomic_folder

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
_PARTS = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_magnitude_vector": "magnitude"}
_PREFIX = "base_model.model."
_BLOCK = re.compile(rf"{re.escape(_PREFIX)}(?:\w+\.)?(?:encoder\.)?layers?\.(\d{{1,4}})")


_LAYOUT = Layout(
    "peft",
    TENSORS,  # no tensor: the folder is recognized by its files
    (
        # The tensors of a layer as f32[1,…] in the axis order of Flax, stacked over the blocks.
        *(
            Rule(
                rf"{_BLOCK.pattern}\.(?:{'|'.join(map(re.escape, names))})\.{re.escape(end)}",
                f"{layer}/{part}",
                lambda tensor: tensor.T.astype(np.float32)[None],
                index=(r"\1",),
                axes=(0,),
            )
            for layer, names in _NAMES.items()
            for end, part in _PARTS.items()
        ),
        *linear_rules(rf"{re.escape(_PREFIX)}classifier", "classifier"),
    ),
)

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

    Raises UserError if a file is missing or damaged, or has an option, a layer or a value that mlmoe_jax does not
    support.
    """
    with damage_explained(path / CONFIG), open_regular(path / CONFIG) as file:
        options = json.loads(file.read(MIB))
        rank, alpha = int(options["r"]), float(options["lora_alpha"])
        problem = _find_unreadable_option(options)
    if problem:
        raise UserError(f"{path / CONFIG} has {problem}")
    name = "dora" if options.get("use_dora") else "lora"
    tensors, classifier = _by_layer(path)
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


def _by_layer(path: Path) -> tuple[Arrays, Arrays]:
    """Return the `tensors` and the `classifier` of a `PeftAdapter` in a folder.

    Raises UserError if a tensor is not finite, belongs to an unknown layer, or is not there in all blocks.
    """
    file = path / TENSORS
    stored = read_tensors(file)
    mapped = apply_rules(file, stored, _LAYOUT)
    if mapped.unused:
        raise UserError(f"tensor {mapped.unused[0]} in {file} belongs to no layer that our adapters change")
    blocks = [int(match[1]) for match in map(_BLOCK.match, stored) if match]
    depth, tensors, classifier = 1 + max(blocks, default=-1), {}, {}
    for name, value in mapped.values.items():
        if name.startswith("classifier/"):
            classifier[name.removeprefix("classifier/")] = value
        elif len(value) == depth:
            tensors[name] = value
        else:
            raise UserError(f"{file} adapts {name} not in all {depth} blocks alike, as our adapters do")
    return tensors, classifier


def fill_from_peft(model: Classifier, adapter: PeftAdapter) -> list[str]:
    """Fill the adapter of a model from PEFT's files, in place, and return the paths of the filled parameters.

    The backbone must already have its weights, because the magnitudes of DoRA depend on them. The classifier is filled
    if the files have a classifier and the head is a linear classifier of the normalized class token.

    Raises:
      UserError: shapes differ. Or the classifier of the files has another number of labels, or reads more than the
        class token.
    """
    tensors = dict(adapter.tensors)
    for layer in adapter.settings["targets"] if adapter.name == "dora" else ():
        lengths, name = _lengths(model.backbone, layer), f"{layer}/magnitude"
        if tensors[name].shape == lengths.shape:
            tensors[name] = tensors[name] - lengths
    filled = _fill(model.adapters[adapter.name], f"adapters/{adapter.name}", adapter, tensors)
    if adapter.classifier and _reads_class_token(model):
        classifier, width = dict(adapter.classifier), model.backbone.shape.width
        kernel = classifier.get("kernel", np.zeros((0, 0)))
        if kernel[width:].any():
            raise UserError(
                f"the classifier in {adapter.path / TENSORS} reads the mean of the patches too; remove it from the "
                "file, and a new one is trained"
            )
        filled += _fill(model.head.classifier, "head/classifier", adapter, classifier | {"kernel": kernel[:width]})
    return filled


def _fill(module: nnx.Module, place: str, adapter: PeftAdapter, tensors: Arrays) -> list[str]:
    """Fill the part of a model at the path `place`, and return the paths of the filled parameters."""
    report = fill(module, MappedFile(adapter.path / TENSORS, _LAYOUT, "", tensors, frozenset(), ()))
    return [f"{place}/{name}" for name in report.loaded]


def _reads_class_token(model: Classifier) -> bool:
    return isinstance(model.head, LinearHead) and model.head.pool == "cls" and model.final_norm


def _lengths(vit: ViT, layer: str) -> np.ndarray:
    """Return the L2 norms f32[L,out] of the columns of a layer's kernel in each of the L blocks."""
    kernels = (layer_weights(vit, layer_path(index, layer))[0] for index in range(vit.shape.depth))
    return np.stack([np.linalg.norm(np.asarray(kernel, np.float32), axis=0) for kernel in kernels])


# ---------------------------------------------------------------------------------------------------------- writing
def write_peft(path: Path, model: Classifier, config: ConfigDict) -> tuple[int, bool]:
    """Write the LoRA or DoRA of a model as a new folder of PEFT, with float32 tensors and the names of transformers 5.

    A linear classifier of the class token is written as the classifier of transformers. Other heads are not written.
    Return the number of tensors, and whether the classifier is among them. Raises UserError if the model has prompts,
    other adapters than one LoRA or DoRA, or a backbone that transformers does not have.
    """
    if problem := _why_unwritable(model, config):
        raise UserError(problem)
    [name], shape = model.adapters, model.backbone.shape
    module, blocks = _transformers_names(shape)
    layers = {layer: _NAMES[layer][0] for layer in config.model.adapters[name].targets}
    if shape.mlp == "swiglu" and "fc2" in layers:
        layers["fc2"] = "mlp.down_proj"
    tensors = _classifier_tensors(model, shape.width if module == "vit" else 2 * shape.width)
    classifies = bool(tensors)
    prefix = f"{_PREFIX}{module}." if classifies else _PREFIX
    for layer, layer_name in layers.items():
        for end, values in _update_parts(model, name, layer).items():
            for index, value in enumerate(values):
                tensors[f"{prefix}{blocks}.{index}.{layer_name}.{end}"] = _tensor(value)
    options = _make_options(config, name, layers.values(), classifies=classifies)
    with atomic_folder(path) as partial:
        (partial / CONFIG).write_text(json.dumps(options, indent=2) + "\n")
        save_file(tensors, partial / TENSORS, {"format": "pt"})
    return len(tensors), classifies


def _make_options(config: ConfigDict, name: str, layers: Iterable[str], *, classifies: bool) -> dict[str, Any]:
    """Return the content of adapter_config.json for the adapter `name`, which changes `layers` of transformers."""
    settings = config.model.adapters[name]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": catalog.entry(config.model.backbone.name).repository,
        "task_type": None,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilized,
        "use_dora": name == "dora",
        "target_modules": sorted(layers),
        "modules_to_save": ["classifier"] if classifies else None,
        "bias": "none",
        "fan_in_fan_out": False,
    }


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
    """Return the names in transformers 5 of the backbone in a classification model, and of its list of blocks."""
    if shape.layer_scale is None and not shape.registers:
        return "vit", "layers"
    return "dinov2_with_registers" if shape.registers else "dinov2", "encoder.layer"


def _update_parts(model: Classifier, name: str, layer: str) -> Arrays:
    """Return the arrays of the adapter `name` for a layer: PEFT's name of the array -> f32[L,…] for L blocks."""
    update = getattr(model.adapters[name], layer)
    parts = {end: np.asarray(getattr(update, part)[...]) for end, part in _PARTS.items() if hasattr(update, part)}
    if name == "dora":
        parts["lora_magnitude_vector"] = parts["lora_magnitude_vector"] + _lengths(model.backbone, layer)
    return parts


def _classifier_tensors(model: Classifier, inputs: int) -> Arrays:
    """Return `weight` and `bias` of the classifier of transformers; {} if the head reads more than the class token.

    `inputs` is the number of inputs of the classifier in transformers: D, or 2D if it also reads the mean of the
    patches. The weights for this mean are then 0.
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
