"""Weights from a file into a module, by a rule table that must account for every tensor."""

import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load_file

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.catalog import CATALOG
from mlmoe_jax.pretrained.rules import query
from mlmoe_jax.pretrained.rules.base import BACKBONE, Rule, Source
from mlmoe_jax.pretrained.torch_file import SUFFIXES as TORCH_SUFFIXES
from mlmoe_jax.pretrained.torch_file import read_torch_file
from mlmoe_jax.pretrained.weights import find_weights
from mlmoe_jax.runtime.registry import Registry

# The first layout that a file's names are of is taken: whole models before the backbones that they hold.
RULES: Registry[tuple[Source, ...]] = Registry(
    "rules file",
    {
        "mlvpt": "mlmoe_jax.pretrained.rules.mlvpt:SOURCES",
        "query": "mlmoe_jax.pretrained.rules.query:SOURCES",
        "graph": "mlmoe_jax.pretrained.rules.graph:SOURCES",
        "vit": "mlmoe_jax.pretrained.rules.vit:SOURCES",
        "cnn": "mlmoe_jax.pretrained.rules.cnn:SOURCES",
        "efficientnet": "mlmoe_jax.pretrained.rules.efficientnet:SOURCES",
    },
)
SOURCES = tuple(source for file in RULES for source in RULES[file])
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
    allows to be missing, which were left as they are; and whether labels are in alphabetical order, see Source.
    """

    source: str
    loaded: tuple[str, ...]
    reshaped: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    sorted_labels: bool = False


@dataclass(frozen=True)
class Mapped:
    """A file in our terms: its values by path, which of them may be reshaped, and the names that no rule took.

    wrapper: what stood before all its names.
    """

    path: Path
    source: Source
    wrapper: str
    values: dict[str, np.ndarray]
    may_reshape: frozenset[str]
    unused: tuple[str, ...]


@dataclass(frozen=True)
class _Piece:
    """What one tensor gives to a value, its places along the rule's axes, and its name in the file."""

    rule: Rule
    places: tuple[int, ...]
    name: str
    value: np.ndarray


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

    The layout is recognised from the tensor names unless `source` says it. A backbone takes its part of a file that
    holds a whole model. Every value must be given a tensor of its shape, and every tensor must be used, but for those
    that the layout lets go. Raises UserError listing what does not fit; the module is then unchanged.
    """
    path = find_weights(path_or_name) if path_or_name in CATALOG else Path(path_or_name)
    whole = any(target.startswith(BACKBONE) for target in _variables(module))
    return fill(module, map_file(path, whole=whole, source=source))


def map_file(path: Path, *, whole: bool, source: Source | None = None) -> Mapped:
    """Read a weights file in our terms: for a whole model or its head, or for a backbone alone.

    The layout is recognised from the tensor names unless `source` says it. Raises UserError for a file that cannot be
    read, a layout or a backbone that is not known, and a file without a head where one is wanted, or with nothing else.
    """
    tensors = read_tensors(path)
    query.refuse_unknown_backbone(tensors)
    if source is None:
        source = _recognise(tensors, path)
        if source.head_alone and not whole:
            raise UserError(f"{path} ({source.name} layout) holds a head and no backbone; give it as config.init_from")
    if whole and not (source.whole or source.head_alone):
        raise UserError(
            f"{path} ({source.name} layout) does not hold a whole model; a backbone is named with "
            "--config.model.backbone.weights"
        )
    if source.whole and not whole:
        source = source.of_backbone()
    return _apply_rules(path, tensors, source)


def fill(module: nnx.Module, mapped: Mapped) -> LoadReport:
    """Give a module the values of a file; UserError lists what does not fit, and the module is then unchanged."""
    source, variables = mapped.source, _variables(module)
    shapes = {target: variable.shape for target, (_, variable) in variables.items()}
    values, reshaped = _reshape(mapped, shapes)
    if wrong := _mistakes(values, shapes, mapped):
        listed = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise UserError(f"{mapped.path} ({source.name} layout) does not fit the model: {listed}")
    filled = {
        place: variable.replace(jnp.asarray(values[target], variable.dtype))
        for target, (place, variable) in variables.items()
        if target in values
    }
    nnx.update(module, nnx.from_flat_state(filled))
    missing = sorted(set(shapes) - set(values))
    loaded = tuple(sorted(values))
    return LoadReport(source.name, loaded, reshaped, mapped.unused, tuple(missing), source.sorted_labels)


def _variables(module: nnx.Module) -> dict[str, tuple[tuple, nnx.Variable]]:
    """Return the parameters and batch statistics of a module with their places, by path."""
    state = nnx.state(module, (nnx.Param, nnx.BatchStat))
    return {"/".join(map(str, place)): (place, variable) for place, variable in nnx.to_flat_state(state)}


def recognise(names: Collection[str]) -> Source | None:
    """Return the layout that tensor names are of, or None where it is not known."""
    return next((source for source in SOURCES if _wrapper(names, source) is not None), None)


def _recognise(tensors: dict[str, np.ndarray], path: Path) -> Source:
    if source := recognise(tensors):
        return source
    some = ", ".join(sorted(tensors)[:3])
    raise UserError(f"{path} has a layout that is not known here; its tensors begin with {some or 'nothing'}")


def _wrapper(names: Collection[str], source: Source) -> str | None:
    """Return what stands before all names of a file of this layout; None for a file that is not of it."""
    found = [name.removesuffix(source.marker) for name in names if name.endswith(source.marker)]
    return min((wrapper for wrapper in found if _WRAPPERS.fullmatch(wrapper)), key=len, default=None)


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _apply_rules(path: Path, tensors: dict[str, np.ndarray], source: Source) -> Mapped:
    """Turn every tensor whose name begins with what wraps all of them into the values that the rules make of it."""
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    wrapper, unused = _wrapper(tensors, source) or "", []
    for name, tensor in tensors.items():
        for rule in source.rules if name.startswith(wrapper) else ():
            if match := re.fullmatch(rule.pattern, name.removeprefix(wrapper)):
                places = tuple(int(match.expand(at)) if isinstance(at, str) else at for at in rule.at)
                try:
                    pieces[match.expand(rule.target)].append(_Piece(rule, places, name, rule.transform(tensor)))
                except (ValueError, IndexError) as error:
                    text = f"tensor {name} of shape {tensor.shape} is not of the {source.name} layout"
                    raise UserError(text) from error
                break
        else:
            unused.append(name)
    values = {target: _join(target, parts) for target, parts in pieces.items()}
    may_reshape = frozenset(target for target, parts in pieces.items() if parts[0].rule.reshape)
    return Mapped(path, source, wrapper, values, may_reshape, tuple(unused))


def _join(target: str, pieces: list[_Piece]) -> np.ndarray:
    """Return the value that the tensors of one target make together."""
    pieces.sort(key=lambda piece: piece.places)
    by_place = {piece.places: piece.value for piece in pieces}
    if len(by_place) < len(pieces):
        raise UserError(f"more than one tensor would become {target}: {', '.join(piece.name for piece in pieces)}")
    try:
        return join(by_place, pieces[0].rule.axes)
    except ValueError as error:
        shapes = ", ".join(str(piece.value.shape) for piece in pieces)
        raise UserError(f"the tensors that make {target} have shapes that do not fit together: {shapes}") from error


def join(pieces: dict[tuple[int, ...], np.ndarray], axes: tuple[int, ...]) -> np.ndarray:
    """Put arrays together that are given by their places along `axes`; ValueError where they do not fit."""
    if not axes:
        return pieces[()]
    rows: dict[int, dict[tuple[int, ...], np.ndarray]] = defaultdict(dict)
    for places, value in pieces.items():
        rows[places[0]][places[1:]] = value
    return np.concatenate([join(rows[place], axes[1:]) for place in sorted(rows)], axis=axes[0])


def _reshape(mapped: Mapped, shapes: dict[str, tuple]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Give the shapes of the module to the values that may be reshaped; return all, and which were."""
    reshaped = tuple(
        target
        for target in sorted(set(mapped.values) & set(shapes) & mapped.may_reshape)
        if mapped.values[target].shape != shapes[target] and mapped.values[target].size == np.prod(shapes[target])
    )
    return mapped.values | {target: mapped.values[target].reshape(shapes[target]) for target in reshaped}, reshaped


def _mistakes(values: dict[str, np.ndarray], shapes: dict[str, tuple], mapped: Mapped) -> list[str]:
    """Return what keeps the values from filling a module of these shapes."""
    source = mapped.source
    lacking = sorted(set(shapes) - set(values))
    wrong = [f"no tensor for {target}" for target in lacking if not _matches(source.optional, target)]
    wrong += [f"{target} is not a parameter of this model" for target in sorted(set(values) - set(shapes))]
    wrong += [
        f"tensor {name} is unknown"
        for name in mapped.unused
        if not _matches(source.ignored, name) and not _matches(source.ignored, name.removeprefix(mapped.wrapper))
    ]
    for target in sorted(set(values) & set(shapes)):
        value = values[target]
        if value.shape != shapes[target]:
            wrong.append(f"{target} has shape {value.shape} instead of {shapes[target]}")
        elif not jnp.issubdtype(value.dtype, jnp.floating):
            wrong.append(f"{target} is made of {value.dtype} and not of floating-point numbers")
    return wrong
