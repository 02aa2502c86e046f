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
from mlmoe_jax.pretrained.load import read_tensors
from mlmoe_jax.runtime.files import MIB, open_regular

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
    """An adapter that PEFT has written.

    Attributes:
      path: its folder.
      name: the adapter in our catalog, `lora` or `dora`.
      settings: the settings of `model.adapters.NAME` that the files determine.
      tensors: `LAYER/a`, `LAYER/b` and `LAYER/magnitude`, f32[L,…] with a row per block, in our orientation. The
        magnitude is PEFT's, the length of a column.
      classifier: `kernel` f32[D,K] or f32[2D,K], and `bias` f32[K]; {} if the file has none.
    """

    path: Path
    name: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    classifier: Mapping[str, np.ndarray]


def is_peft(path: Path) -> bool:
    """Return whether a path is a folder of PEFT."""
    return (path / CONFIG).is_file()


# ---------------------------------------------------------------------------------------------------------- reading
def read_peft(path: Path) -> PeftAdapter:
    """Read the adapter in a folder of PEFT.

    Raises:
      UserError: a file is missing or damaged, or the adapter has an option, a layer or a value that we cannot
        represent.
    """
    options = _read_options(path)
    tensors, classifier = _by_layer(path, read_tensors(path / TENSORS))
    rank, targets = int(options["r"]), tuple(layer for layer in _NAMES if f"{layer}/a" in tensors)
    dora = bool(options.get("use_dora"))
    expected = {f"{layer}/{part}" for layer in targets for part in ("a", "b", *(["magnitude"] if dora else []))}
    if odd := sorted(tensors.keys() ^ expected):
        raise UserError(f"{path / TENSORS} does not fit {CONFIG}: {odd[0]} is missing or unexpected")
    for name, value in tensors.items():
        if not name.endswith("magnitude") and value.shape[2 if name.endswith("/a") else 1] != rank:
            raise UserError(f"{path / TENSORS} does not fit {CONFIG}: {name} has not the rank r={rank}")
    settings = {"rank": rank, "alpha": float(options["lora_alpha"]), "targets": targets}
    settings["rank_stabilized"] = bool(options.get("use_rslora"))
    return PeftAdapter(path, "dora" if dora else "lora", settings, tensors, classifier)


def _read_options(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path / CONFIG) as file:
            options = json.loads(file.read(MIB))
        kind, rank, alpha = options["peft_type"], options["r"], options["lora_alpha"]
        if not (isinstance(kind, str) and type(rank) is int and rank > 0 and isinstance(alpha, int | float)):
            raise ValueError("a value has the wrong type")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path / CONFIG}: {error}; export the adapter with PEFT again") from error
    if kind != "LORA":
        raise UserError(
            f"{path / CONFIG} has peft_type={kind}, and only LORA can be read, with use_rslora and use_dora"
        )
    for name, value in options.items():
        if name not in _HARMLESS and value and value not in _NEUTRAL.get(name, ()):
            raise UserError(f"{path / CONFIG} has {name}={json.dumps(value)}, which our adapters cannot represent")
    return options


def _by_layer(path: Path, stored: Mapping[str, np.ndarray]) -> tuple[dict, dict]:
    """Return tensors and classifier as in PeftAdapter."""
    rows: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    classifier = {}
    for name, tensor in stored.items():
        if not np.isfinite(tensor).all():
            raise UserError(f"tensor {name} in {path / TENSORS} has non-finite numbers; use an undamaged file")
        match, ours = _TENSOR.fullmatch(name), _CLASSIFIER.fullmatch(name)
        if match and match["layer"] in _LAYERS:
            place = f"{_LAYERS[match['layer']]}/{_PARTS[match['part']]}"
            rows[place][int(match["block"])] = tensor.T.astype(np.float32)
        elif ours:
            classifier["kernel" if ours["part"] == "weight" else "bias"] = tensor.T.astype(np.float32)
        else:
            raise UserError(f"tensor {name} in {path / TENSORS} belongs to no layer that our adapters change")
    depth = 1 + max((block for values in rows.values() for block in values), default=-1)
    tensors = {}
    for name, values in rows.items():
        if len(values) < depth or len({value.shape for value in values.values()}) > 1:
            raise UserError(f"{path / TENSORS} adapts {name} not in all {depth} blocks alike, as our adapters do")
        tensors[name] = np.stack([values[block] for block in range(depth)])
    return tensors, classifier


def fill_from_peft(model: Classifier, adapter: PeftAdapter, labels: int) -> list[str]:
    """Fill the adapter of a model, and the classifier if the files and the model have one on the class token.

    Args:
      model: a model with the adapter and with a filled backbone, which changes.
      adapter: the adapter.
      labels: number of labels.

    Returns:
      The paths of the filled values.

    Raises:
      UserError: shapes differ, or the classifier has other labels or reads more than the class token.
    """
    own, filled = model.adapters[adapter.name], []
    for name, value in adapter.tensors.items():
        layer, part = name.split("/")
        if part == "magnitude":
            lengths = [_lengths(model.backbone, index, layer) for index in range(model.backbone.shape.depth)]
            value = value - np.stack(lengths) if value.shape == np.shape(lengths) else value
        variable = getattr(getattr(own, layer), part)
        if variable.shape != value.shape:
            raise UserError(
                f"{adapter.path / TENSORS} does not fit the backbone: {name} has shape {value.shape} instead of "
                f"{variable.shape}"
            )
        variable.set_value(jnp.asarray(value))
        filled.append(f"adapters/{adapter.name}/{name}")
    if adapter.classifier and _reads_class_token(model):
        filled += _fill_classifier(model, adapter, labels)
    return filled


def _fill_classifier(model: Classifier, adapter: PeftAdapter, labels: int) -> list[str]:
    width, (kernel, bias) = model.backbone.shape.width, (adapter.classifier.get(name) for name in ("kernel", "bias"))
    if kernel is None or bias is None or bias.shape != (kernel.shape[-1],) or len(kernel) not in (width, 2 * width):
        raise UserError(f"the classifier in {adapter.path / TENSORS} does not fit the backbone")
    if len(bias) != labels:
        raise UserError(f"{adapter.path / TENSORS} classifies {len(bias)} labels, but the data has {labels}")
    if kernel[width:].any():
        raise UserError(
            f"the classifier in {adapter.path / TENSORS} reads the mean of the patches too; remove it from the file, "
            "and a new one is trained"
        )
    model.head.classifier.kernel.set_value(jnp.asarray(kernel[:width]))
    model.head.classifier.bias.set_value(jnp.asarray(bias))
    return ["head/classifier/kernel", "head/classifier/bias"]


def _reads_class_token(model: Classifier) -> bool:
    return isinstance(model.head, LinearHead) and model.head.pool == "cls" and model.final_norm


def _lengths(vit: ViT, index: int, layer: str) -> np.ndarray:
    kernel, _ = layer_weights(vit, layer_path(index, layer))
    return np.linalg.norm(np.asarray(kernel, np.float32), axis=0)


# ---------------------------------------------------------------------------------------------------------- writing
def peft_files(model: Classifier, config: ConfigDict) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the content of `adapter_config.json`, and the tensors f32 of `adapter_model.safetensors`.

    A linear classifier on the class token becomes the classifier of transformers; other heads are not part of the
    files. The names are of transformers 5.

    Raises:
      UserError: the model has prompts, another adapter than one LoRA or DoRA, or a backbone without such names.
    """
    [*names], shape = model.adapters, model.backbone.shape
    if len(names) != 1 or names[0] not in ("lora", "dora") or config.model.prompts.kind != "none":
        raise UserError("PEFT's files hold one LoRA or DoRA and no prompts; choose another --format")
    kind = _kind(shape)
    name, settings = names[0], config.model.adapters[names[0]]
    targets = tuple(settings.targets)
    if shape.mlp == "swiglu" and "fc1" in targets:
        raise UserError("transformers has two layers for fc1 of this backbone; PEFT's files cannot hold its update")
    spelled = {layer: _NAMES[layer][0] for layer in targets} | ({"fc2": "mlp.down_proj"} if shape.mlp != "gelu" else {})
    classified = _reads_class_token(model)
    start = f"{_PREFIX}{kind.module}." if classified else _PREFIX
    tensors: dict[str, np.ndarray] = {}
    for layer in targets:
        update = getattr(model.adapters[name], layer)
        for index in range(shape.depth):
            values = {"lora_A.weight": update.a[index], "lora_B.weight": update.b[index]}
            if name == "dora":
                values["lora_magnitude_vector"] = update.magnitude[index] + _lengths(model.backbone, index, layer)
            key = f"{start}{kind.layers}.{index}.{spelled[layer]}"
            tensors |= {f"{key}.{part}": _tensor(value) for part, value in values.items()}
    if classified:
        kernel = np.asarray(model.head.classifier.kernel[...], np.float32)
        kernel = np.pad(kernel, ((0, kind.classified - len(kernel)), (0, 0)))  # zeros for the mean of the patches
        tensors |= {f"{_PREFIX}classifier.weight": _tensor(kernel)}
        tensors |= {f"{_PREFIX}classifier.bias": _tensor(model.head.classifier.bias[...])}
    address = re.match(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/", catalog.entry(config.model.backbone.name).address)
    options = {
        "peft_type": "LORA",
        "base_model_name_or_path": address[1] if address else None,
        "task_type": None,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilized,
        "use_dora": name == "dora",
        "target_modules": sorted(spelled[layer] for layer in targets),
        "modules_to_save": ["classifier"] if classified else None,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    return options, tensors


@dataclass(frozen=True)
class _Kind:
    module: str
    layers: str
    classified: int


def _kind(shape: ViTShape) -> _Kind:
    """Return the names of a backbone in transformers, and the number of inputs of its classifier."""
    if shape.rotary_base is not None or shape.pre_norm or not shape.class_token or shape.mlp not in ("gelu", "swiglu"):
        raise UserError(
            "PEFT's files are written for DINOv2 and for ViTs of transformers, and this is another backbone"
        )
    if shape.layer_scale is None and not shape.registers:
        return _Kind("vit", "layers", shape.width)
    return _Kind("dinov2_with_registers" if shape.registers else "dinov2", "encoder.layer", 2 * shape.width)


def _tensor(value: jax.Array | np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(value, np.float32).T)
