"""Load weights from a file into a module, by a table of rules that must cover every tensor."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.params import named_variables
from mlmoe_jax.pretrained.rules.base import BACKBONE, Layout, Rule
from mlmoe_jax.pretrained.rules.cnn_names import CNN_LAYOUTS
from mlmoe_jax.pretrained.rules.head_names import HEAD_LAYOUTS
from mlmoe_jax.pretrained.rules.prompt_names import PROMPT_LAYOUTS
from mlmoe_jax.pretrained.rules.vit_names import VIT_LAYOUTS
from mlmoe_jax.pretrained.torch_file import SUFFIXES as TORCH_SUFFIXES
from mlmoe_jax.pretrained.torch_file import read_torch_file
from mlmoe_jax.pretrained.torch_pickle import Unreadable
from mlmoe_jax.runtime.array_types import Arrays
from mlmoe_jax.runtime.files import damage_explained, open_regular
from mlmoe_jax.runtime.formats import read_npz

# The first layout that matches the names in a file is used, so whole models precede the backbones that they contain.
LAYOUTS: tuple[Layout, ...] = (*PROMPT_LAYOUTS, *HEAD_LAYOUTS, *VIT_LAYOUTS, *CNN_LAYOUTS)
# Possible prefixes of all names of a model: its position in a training state, DataParallel, and the name of the
# backbone in MoCo v3, in a classifier of Hugging Face, or in a model with a text tower.
_WRAPPERS = re.compile(
    r"(?:opt/target/|state_dict\.|model\.|module\.|base_encoder\.|vision_model\.|vision_encoder\."
    r"|vit\.|dinov2\.|dinov2_with_registers\.|dinov3_vit\.|resnet\.|convnext\.)*"
)
Pieces = dict[tuple[int, ...], np.ndarray]  # of a parameter, by their positions along several axes
_SUFFIXES = (".safetensors", ".npz", *TORCH_SUFFIXES)


@dataclass(frozen=True)
class LoadReport:
    """The result of loading weights.

    Attributes:
      loaded: paths of the parameters and statistics that the file has filled.
      unused: names of the tensors of the file that were not used.
      missing: paths of optional parameters that the file does not have. Their values have not changed.
      sorted_labels: whether the head's outputs are in alphabetical order of the labels, see `Layout`.
    """

    layout: str
    loaded: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    sorted_labels: bool = False


@dataclass(frozen=True)
class MappedFile:
    """The tensors of a weights file, converted and assigned to parameter paths.

    Attributes:
      wrapper: the common prefix of all tensor names in the file, which the rules do not contain.
      values: parameter path -> array.
      may_reshape: paths of the parameters whose arrays may be reshaped to the shape of the parameter.
      unused: names of the tensors that match no rule.
    """

    path: Path
    layout: Layout
    wrapper: str
    values: Arrays
    may_reshape: frozenset[str]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path} ({self.layout.name} layout)"


def read_tensors(path: Path) -> Arrays:
    """Return all tensors of a weights file by name; UserError if it cannot be read."""
    if not path.name.endswith(_SUFFIXES):
        raise UserError(f"weights are read from {', '.join(_SUFFIXES)} files, not from {path.name}")
    try:
        with damage_explained(path), open_regular(path) as file:
            if path.suffix == ".npz":
                return read_npz(file)
            return load_file(path) if path.suffix == ".safetensors" else read_torch_file(file)
    except Unreadable as error:
        raise UserError(f"cannot read weights from {path}: {error}") from error


def require_finite(path: Path, name: str, tensor: np.ndarray) -> None:
    """Raise UserError if a tensor contains inf or nan."""
    if jnp.issubdtype(tensor.dtype, jnp.floating) and not np.isfinite(tensor).all():
        raise UserError(f"tensor {name} in {path} has non-finite numbers; use an undamaged file")


def load_weights(module: nnx.Module, path: Path) -> LoadReport:
    """Fill the parameters and batch statistics of a module from a file, in place.

    The file must have a tensor of the right shape for every parameter that is not optional in the layout. Every tensor
    must be used, unless the layout ignores it. If `module` is a backbone and the file has a whole model, only the
    backbone is read. Raises UserError with the mismatches if the file does not fit. The module is then unchanged.
    """
    whole_model = any(target.startswith(BACKBONE) for target in named_variables(module, nnx.Param, nnx.BatchStat))
    return fill(module, map_file(path, whole_model=whole_model))


def map_file(path: Path, *, whole_model: bool) -> MappedFile:
    """Read a weights file, and assign its tensors to parameter paths. The layout is recognized by the tensor names.

    `whole_model` is True to fill a whole model or its head, False to fill a backbone alone.

    Raises:
      UserError: the file cannot be read, or its layout is unknown. Or the file has no head although `whole_model` is
        True, or only a head although `whole_model` is False.
    """
    tensors = read_tensors(path)
    layout = recognize(tensors)
    if layout is None:
        names = ", ".join(sorted(tensors)[:3]) or "none"
        raise UserError(f"{path} has an unknown layout; its first tensors are {names}")
    problem = ""
    if layout.is_head and not whole_model:
        problem = "holds a head and no backbone; set config.init_from to it"
    elif whole_model and not (layout.is_whole_model or layout.is_head):
        problem = "does not hold a whole model; set config.model.backbone.weights to it if it is a backbone"
    if problem:
        raise UserError(f"{path} ({layout.name} layout) {problem}")
    return apply_rules(path, tensors, layout.backbone_only() if layout.is_whole_model and not whole_model else layout)


def fill(module: nnx.Module, mapped: MappedFile) -> LoadReport:
    """Fill the parameters of a module from a mapped file, in place.

    Raises UserError with a list of the mismatches if the file does not fit. The module is then unchanged.
    """
    variables = named_variables(module, nnx.Param, nnx.BatchStat)
    shapes = {target: variable.shape for target, (_, variable) in variables.items()}
    values = dict(mapped.values)
    for target in mapped.may_reshape & set(shapes):
        if values[target].size == math.prod(shapes[target]):
            values[target] = values[target].reshape(shapes[target])
    if mismatches := _find_mismatches(values, shapes, mapped):
        raise UserError(f"{mapped} does not fit the model: {'; '.join(mismatches[:6])}")
    filled = {
        # numpy converts the values, because JAX would compile a program for each shape
        place: variable.replace(jax.device_put(np.asarray(values[target], variable.dtype)))
        for target, (place, variable) in variables.items()
        if target in values
    }
    nnx.update(module, nnx.from_flat_state(filled))
    missing = tuple(sorted(set(shapes) - set(values)))
    return LoadReport(mapped.layout.name, tuple(sorted(values)), mapped.unused, missing, mapped.layout.sorted_labels)


def recognize(names: Collection[str], layouts: Sequence[Layout] = LAYOUTS) -> Layout | None:
    """Return the layout to which the tensor names of a file belong, or None if there is no such layout."""
    return next((layout for layout in layouts if find_wrapper(names, layout) is not None), None)


def find_wrapper(names: Collection[str], layout: Layout) -> str | None:
    """Return the prefix, such as "module.", that tensor names in a file have before the names of a layout.

    The result is "" if there is no prefix, and None if the file does not have this layout.
    """
    wrappers = [name.removesuffix(layout.marker) for name in names if name.endswith(layout.marker)]
    wrappers = [wrapper for wrapper in wrappers if all(f"{wrapper}{name}" in names for name in layout.required)]
    return min((wrapper for wrapper in wrappers if _WRAPPERS.fullmatch(wrapper)), key=len, default=None)


def apply_rules(path: Path, tensors: Arrays, layout: Layout) -> MappedFile:
    """Convert tensors by the rules of a layout. Tensors whose names lack the common prefix are listed as unused."""
    pieces: dict[str, Pieces] = defaultdict(dict)
    rules: dict[str, Rule] = {}
    wrapper, unused = find_wrapper(tensors, layout) or "", []
    for name, tensor in tensors.items():
        found = find_rules(layout, name.removeprefix(wrapper)) if name.startswith(wrapper) else []
        if not found:
            unused.append(name)
            continue
        require_finite(path, name, tensor)
        for rule, match in found:
            target = match.expand(rule.target)
            index = tuple(int(match.expand(number)) if isinstance(number, str) else number for number in rule.index)
            if index in pieces[target]:
                raise UserError(f"more than one tensor would become {target}, such as {name}")
            pieces[target][index] = _convert(rule, name, tensor, layout)
            rules[target] = rule
    try:
        values = {target: join_pieces(parts, rules[target].axes) for target, parts in pieces.items()}
    except ValueError as error:
        raise UserError(f"{path} has tensors of shapes that do not fit together: {error}") from error
    may_reshape = frozenset(target for target, rule in rules.items() if rule.reshape)
    return MappedFile(path, layout, wrapper, values, may_reshape, tuple(unused))


def find_rules(layout: Layout, name: str) -> list[tuple[Rule, re.Match[str]]]:
    """Return the first rule of a layout that matches a tensor name, and all other rules with the same pattern.

    Each comes with its match. The list is empty if no rule matches.
    """
    first = next((rule.pattern for rule in layout.rules if re.fullmatch(rule.pattern, name)), None)
    found = [rule for rule in layout.rules if rule.pattern == first]
    return [(rule, re.fullmatch(rule.pattern, name)) for rule in found]


def _convert(rule: Rule, name: str, tensor: np.ndarray, layout: Layout) -> np.ndarray:
    """Return a tensor converted by a rule; UserError if its shape does not fit."""
    try:
        return rule.transform(tensor)
    except (ValueError, IndexError) as error:
        text = f"tensor {name} of shape {tensor.shape} does not fit the {layout.name} layout"
        raise UserError(text) from error


def join_pieces(pieces: Pieces, axes: tuple[int, ...]) -> np.ndarray:
    """Concatenate arrays along one or several axes to one array; without axes, return the only one.

    Args:
      pieces: index -> array. An index has the position of the array along each of `axes`.

    Raises:
      ValueError: the shapes do not fit together.
    """
    if not axes:
        return pieces[()]
    rows: dict[int, Pieces] = defaultdict(dict)
    for index, value in pieces.items():
        rows[index[0]][index[1:]] = value
    return np.concatenate([join_pieces(rows[number], axes[1:]) for number in sorted(rows)], axis=axes[0])


def _find_mismatches(values: Arrays, shapes: dict[str, tuple], mapped: MappedFile) -> list[str]:
    """Return one phrase for each parameter path at which `values` and the shapes of a model differ."""
    layout = mapped.layout
    lacking = sorted(set(shapes) - set(values))
    found = [f"no tensor for {target}" for target in lacking if not _matches(layout.optional, target)]
    found += [f"{target} is not a parameter of this model" for target in sorted(set(values) - set(shapes))]
    for name in mapped.unused:
        if not _matches(layout.ignored, name) and not _matches(layout.ignored, name.removeprefix(mapped.wrapper)):
            found.append(f"tensor {name} is unknown")
    for target in sorted(set(values) & set(shapes)):
        value = values[target]
        if value.shape != shapes[target]:
            found.append(f"{target} has shape {value.shape} instead of {shapes[target]}")
        elif not jnp.issubdtype(value.dtype, jnp.floating):
            found.append(f"{target} is of type {value.dtype} instead of a floating-point type")
    return found


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)
