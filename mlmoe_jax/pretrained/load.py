"""Weights from a file into a module, by a rule table that must account for every tensor."""

import re
import zipfile
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load_file

from mlmoe_jax.errors import UserError
from mlmoe_jax.pretrained.catalog import CATALOG, find_weights
from mlmoe_jax.pretrained.rules import cnn, mlvpt, vit
from mlmoe_jax.pretrained.rules.base import Rule, Source
from mlmoe_jax.pretrained.torch_file import SUFFIXES as TORCH_SUFFIXES
from mlmoe_jax.pretrained.torch_file import read_torch_file

SOURCES = (vit.OWN, *mlvpt.SOURCES, *vit.SOURCES, *cnn.SOURCES)
# What may stand before all names of a model: its place in a training state, DataParallel, and the name that MoCo v3 or
# a classifier of Hugging Face's gives its backbone.
_WRAPPERS = re.compile(
    r"(?:opt/target/|state_dict\.|model\.|module\.|base_encoder\.|vit\.|dinov2\.|dinov2_with_registers\.)*"
)
_TYPES = {
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
    **{f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)},
    "BF16": ml_dtypes.bfloat16,
    "BOOL": np.bool_,
}
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
    """What loading did: the layout it recognised, the values it filled, those among them whose tensor had another
    shape with the same elements, the tensors of the file that the layout lets go unused, and the values that it
    allows to be missing, which were left as they are.
    """

    source: str
    loaded: tuple[str, ...]
    reshaped: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class _Mapped:
    """A file in our terms: its values by path, the paths that may be reshaped, the names that no rule took."""

    values: dict[str, np.ndarray]
    may_reshape: set[str]
    unused: list[str]


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a weights file; UserError says what is wrong with one that cannot be read."""
    if path.name.endswith(TORCH_SUFFIXES):
        return read_torch_file(path)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                return dict(stored)
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
    except FileNotFoundError as error:
        raise UserError(f"there is no weights file {path}") from error
    except _UNREADABLE as error:
        raise UserError(f"cannot read weights from {path}: {str(error).partition('. ')[0]}") from error
    suffixes = ", ".join((".safetensors", ".npz", *TORCH_SUFFIXES[:-1]))
    raise UserError(f"weights are read from {suffixes} and {TORCH_SUFFIXES[-1]} files, not from {path.name}")


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (KeyError, AttributeError):  # its reader for numpy does not know bfloat16
        tensors = deserialize(path.read_bytes())
        if strange := {tensor["dtype"] for _, tensor in tensors} - set(_TYPES):
            raise ValueError(f"numbers of type {', '.join(sorted(strange))} are not read") from None
        return {name: np.frombuffer(t["data"], _TYPES[t["dtype"]]).reshape(t["shape"]) for name, t in tensors}


def load_weights(module: nnx.Module, path_or_name: str | Path, *, source: Source | None = None) -> LoadReport:
    """Fill the parameters and batch statistics of a module from a file, or from that of a catalogue name.

    The layout is recognised from the tensor names unless `source` says it. Every value must be given a tensor of its
    shape, and every tensor must be used, but for those that the layout lets go. Raises UserError listing what does
    not fit; the module is then unchanged.
    """
    path = find_weights(path_or_name) if path_or_name in CATALOG else Path(path_or_name)
    tensors = read_tensors(path)
    source = source or _recognise(tensors, path)
    wrapper = _wrapper(tensors, source) or ""
    state = nnx.state(module, (nnx.Param, nnx.BatchStat))
    variables = {"/".join(map(str, place)): (place, v) for place, v in nnx.to_flat_state(state)}
    shapes = {target: variable.shape for target, (_, variable) in variables.items()}
    mapped = _apply_rules(tensors, source, wrapper)
    values, reshaped = _reshape(mapped, shapes)
    if wrong := _mistakes(values, shapes, mapped.unused, source, wrapper):
        listed = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise UserError(f"{path} ({source.name} layout) does not fit the model: {listed}")
    filled = {
        place: variable.replace(jnp.asarray(values[target], variable.dtype))
        for target, (place, variable) in variables.items()
        if target in values
    }
    nnx.update(module, nnx.from_flat_state(filled))
    missing = sorted(set(shapes) - set(values))
    return LoadReport(source.name, tuple(sorted(values)), reshaped, tuple(mapped.unused), tuple(missing))


def _recognise(tensors: dict[str, np.ndarray], path: Path) -> Source:
    for source in SOURCES:
        if _wrapper(tensors, source) is not None:
            return source
    some = ", ".join(sorted(tensors)[:3])
    raise UserError(f"{path} has a layout that is not known here; its tensors begin with {some or 'nothing'}")


def _wrapper(tensors: dict[str, np.ndarray], source: Source) -> str | None:
    """Return what stands before all names of a file of this layout; None for a file that is not of it."""
    found = [name.removesuffix(source.marker) for name in tensors if name.endswith(source.marker)]
    return min((wrapper for wrapper in found if _WRAPPERS.fullmatch(wrapper)), key=len, default=None)


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _apply_rules(tensors: dict[str, np.ndarray], source: Source, wrapper: str) -> _Mapped:
    """Turn every tensor whose name begins with `wrapper` into the values that the rules make of it."""
    parts: dict[str, list[tuple[Rule, str, np.ndarray]]] = defaultdict(list)
    unused = []
    for name, tensor in tensors.items():
        for rule in source.rules if name.startswith(wrapper) else ():
            if match := re.fullmatch(rule.pattern, name.removeprefix(wrapper)):
                try:
                    parts[match.expand(rule.target)].append((rule, name, rule.transform(tensor)))
                except (ValueError, IndexError) as error:
                    text = f"tensor {name} of shape {tensor.shape} is not of the {source.name} layout"
                    raise UserError(text) from error
                break
        else:
            unused.append(name)
    values = {target: _join(target, pieces) for target, pieces in parts.items()}
    return _Mapped(values, {target for target, pieces in parts.items() if pieces[0][0].reshape}, unused)


def _join(target: str, pieces: list[tuple[Rule, str, np.ndarray]]) -> np.ndarray:
    """Return the value that the tensors of one target make together."""
    pieces.sort(key=lambda piece: piece[0].part or 0)
    rules, names, tensors = zip(*pieces, strict=True)
    if len({rule.part or 0 for rule in rules}) < len(rules):
        raise UserError(f"more than one tensor would become {target}: {', '.join(names)}")
    if rules[0].part is None:
        return tensors[0]
    try:
        return np.concatenate(tensors, axis=rules[0].axis)
    except ValueError as error:
        shapes = ", ".join(str(tensor.shape) for tensor in tensors)
        raise UserError(f"the tensors that make {target} have shapes that do not fit together: {shapes}") from error


def _reshape(mapped: _Mapped, shapes: dict[str, tuple]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Give the shapes of the module to the values that may be reshaped; return all, and which were."""
    reshaped = tuple(
        target
        for target in sorted(set(mapped.values) & set(shapes) & mapped.may_reshape)
        if mapped.values[target].shape != shapes[target] and mapped.values[target].size == np.prod(shapes[target])
    )
    return mapped.values | {target: mapped.values[target].reshape(shapes[target]) for target in reshaped}, reshaped


def _mistakes(
    values: dict[str, np.ndarray], shapes: dict[str, tuple], unused: list[str], source: Source, wrapper: str
) -> list[str]:
    """Return what keeps the values from filling a module of these shapes."""
    lacking = sorted(set(shapes) - set(values))
    wrong = [f"no tensor for {target}" for target in lacking if not _matches(source.optional, target)]
    wrong += [f"{target} is not a parameter of this model" for target in sorted(set(values) - set(shapes))]
    wrong += [
        f"tensor {name} is unknown"
        for name in unused
        if not _matches(source.ignored, name) and not _matches(source.ignored, name.removeprefix(wrapper))
    ]
    for target in sorted(set(values) & set(shapes)):
        value = values[target]
        if value.shape != shapes[target]:
            wrong.append(f"{target} has shape {value.shape} instead of {shapes[target]}")
        elif not jnp.issubdtype(value.dtype, jnp.floating):
            wrong.append(f"{target} is made of {value.dtype} and not of floating-point numbers")
    return wrong
