"""Weights from a file into a module, by a rule table that must account for every tensor."""

import re
import zipfile
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from mlmoe_jax.errors import UserError
from mlmoe_jax.pretrained.catalog import CATALOG, find_weights
from mlmoe_jax.pretrained.rules.base import Rule, Source
from mlmoe_jax.pretrained.rules.mlvpt import ML_VPT_DINOV2
from mlmoe_jax.pretrained.rules.vit import HUGGING_FACE_DINOV2, OWN, TIMM

SOURCES = (OWN, ML_VPT_DINOV2, TIMM, HUGGING_FACE_DINOV2)
# What numpy and safetensors raise on damaged files, and on types that numpy does not have.
_UNREADABLE = (
    SafetensorError,
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    TypeError,
    AttributeError,
    OSError,
    EOFError,
)


@dataclass(frozen=True)
class LoadReport:
    """What loading did: the layout it recognised, the parameters it filled, those among them whose tensor had another
    shape with the same elements, and the tensors of the file that the layout lets go unused.
    """

    source: str
    loaded: tuple[str, ...]
    reshaped: tuple[str, ...]
    unused: tuple[str, ...]


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a .safetensors or .npz file; UserError says what is wrong with one that cannot be read."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                return dict(stored)
        if path.suffix == ".safetensors":
            return load_file(path)
    except FileNotFoundError as error:
        raise UserError(f"there is no weights file {path}") from error
    except _UNREADABLE as error:
        raise UserError(f"cannot read weights from {path}: {str(error).partition('. ')[0]}") from error
    raise UserError(f"weights are read from .safetensors and .npz files, not from {path.name}")


def load_weights(module: nnx.Module, path_or_name: str | Path, *, source: Source | None = None) -> LoadReport:
    """Fill the parameters of a module from a file, or from the published file of a catalogue name.

    The layout is recognised from the tensor names unless `source` says it. Every parameter must be given a tensor of
    its shape, and every tensor must be used or be one that the layout lets go. Raises UserError listing what does not
    fit; the module is then unchanged.
    """
    path = find_weights(path_or_name) if path_or_name in CATALOG else Path(path_or_name)
    tensors = read_tensors(path)
    source = source or _recognise(tensors, path)
    variables = {"/".join(map(str, place)): v for place, v in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    mapped, may_reshape, unused = _apply_rules(tensors, source)
    reshaped = tuple(
        target
        for target in sorted(set(mapped) & set(variables) & may_reshape)
        if mapped[target].shape != variables[target].shape and mapped[target].size == variables[target].size
    )
    mapped |= {target: mapped[target].reshape(variables[target].shape) for target in reshaped}

    wrong = [f"no tensor for {target}" for target in sorted(set(variables) - set(mapped))]
    wrong += [f"{target} is not a parameter of this model" for target in sorted(set(mapped) - set(variables))]
    wrong += [f"tensor {name} is unknown" for name in unused if not _matches(source.ignored, name)]
    wrong += [
        f"{target} has shape {mapped[target].shape} instead of {variables[target].shape}"
        for target in sorted(set(mapped) & set(variables))
        if mapped[target].shape != variables[target].shape
    ]
    if wrong:
        listed = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise UserError(f"{path} ({source.name} layout) does not fit the model: {listed}")
    filled = {
        _place(target): variable.replace(jnp.asarray(mapped[target], variable.dtype))
        for target, variable in variables.items()
    }
    nnx.update(module, nnx.from_flat_state(filled))
    return LoadReport(source.name, tuple(sorted(mapped)), reshaped, tuple(unused))


def _place(target: str) -> tuple[str | int, ...]:
    return tuple(int(key) if key.isdigit() else key for key in target.split("/"))


def _recognise(tensors: dict[str, np.ndarray], path: Path) -> Source:
    for source in SOURCES:
        if source.marker in tensors:
            return source
    some = ", ".join(sorted(tensors)[:3])
    raise UserError(f"{path} has a layout that is not known here; its tensors begin with {some or 'nothing'}")


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _apply_rules(tensors: dict[str, np.ndarray], source: Source) -> tuple[dict[str, np.ndarray], set[str], list[str]]:
    """Return {parameter path: tensor}, the paths that may be reshaped, and the names that no rule took."""
    parts: dict[str, list[tuple[Rule, np.ndarray]]] = defaultdict(list)
    unused = []
    for name, tensor in tensors.items():
        for rule in source.rules:
            if match := re.fullmatch(rule.pattern, name):
                try:
                    parts[match.expand(rule.target)].append((rule, rule.transform(tensor)))
                except (ValueError, IndexError) as error:
                    text = f"tensor {name} of shape {tensor.shape} is not of the {source.name} layout"
                    raise UserError(text) from error
                break
        else:
            unused.append(name)
    joined, may_reshape = {}, set()
    for target, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0].part or 0)
        rule, tensor = pieces[0]
        try:
            joined[target] = tensor if rule.part is None else np.concatenate([t for _, t in pieces], axis=rule.axis)
        except ValueError as error:
            shapes = ", ".join(str(t.shape) for _, t in pieces)
            raise UserError(f"the tensors that make {target} have shapes that do not fit together: {shapes}") from error
        may_reshape |= {target} if rule.reshape else set()
    return joined, may_reshape, unused
