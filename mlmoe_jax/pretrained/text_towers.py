"""Find and load the text tower of a backbone, with only those rows of its table of tokens that the texts need.

The table of SigLIP 2 has 256,000 rows, two thirds of the parameters of its smallest tower.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors import safe_open

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.text.catalog import text_entry
from mlmoe_jax.models.text.tower import TOKEN_TABLE, TextShape, TextTower
from mlmoe_jax.pretrained.download import Unreachable, fetch
from mlmoe_jax.pretrained.load import apply_rules, fill, find_rules, read_tensors, recognize
from mlmoe_jax.pretrained.rules.base import Layout
from mlmoe_jax.pretrained.rules.text_names import TEXT_LAYOUTS
from mlmoe_jax.pretrained.weights import find_weights
from mlmoe_jax.runtime.files import cache_folder, damage_explained, open_regular


def find_text_weights(backbone: str) -> Path:
    """Return the path of the file with the text tower of a backbone. Download the file if necessary.

    Raises UserError if the backbone has no text tower, or if the file is not available.
    """
    entry = text_entry(backbone)
    if entry.file == catalog.entry(backbone).file:
        return find_weights(backbone)
    return _fetch(f"the text tower of {backbone} is", entry.address, entry.file)


def find_tokenizer(backbone: str) -> Path:
    """Return the path of the file with the tokenizer of a backbone's text tower. Download the file if necessary.

    Raises UserError if the backbone has no text tower, or if the file is not available.
    """
    entry = text_entry(backbone)
    return _fetch(f"the tokenizer of {backbone} is", entry.tokenizer_address, entry.tokenizer)


def _fetch(subject: str, address: str, file: str) -> Path:
    try:
        return fetch(address, cache_folder() / file)
    except Unreachable as error:
        raise UserError(f"{subject} not available: {error}") from error


def load_text_tower(shape: TextShape, path: Path, tokens: np.ndarray) -> tuple[TextTower, np.ndarray]:
    """Return a text tower that knows only the tokens of some texts, and these texts in its numbers.

    Args:
      shape: the published architecture.
      path: the file with the weights. It may have the vision tower too.
      tokens: i32[n,t], the texts, in numbers of the whole vocabulary.

    Returns:
      The tower, with a table of V tokens, and i32[n,t], the texts in numbers from 0 to V − 1. V tokens occur in the
      texts, and their order is that of the whole vocabulary.

    Raises:
      UserError: the file cannot be read, or does not have this tower.
    """
    rows, places = np.unique(tokens, return_inverse=True)
    layout, tensors = _read(path, rows, shape.vocabulary)
    tower = nnx.eval_shape(lambda: replace(shape, vocabulary=len(rows)).build(rngs=nnx.Rngs(0)))
    fill(tower, apply_rules(path, tensors, layout))
    return tower, places.reshape(tokens.shape).astype(np.int32)


def _read(path: Path, rows: np.ndarray, vocabulary: int) -> tuple[Layout, dict[str, Any]]:
    """Return the layout of a file and its tensors by name, with these rows of the table of tokens.

    Of a safetensors file, the tensors of the vision tower are not read. They are None.
    """
    if path.suffix != ".safetensors":
        tensors = read_tensors(path)
        layout = _recognize(path, tensors)
        return layout, {name: _take(path, layout, name, x, rows, vocabulary) for name, x in tensors.items()}
    with damage_explained(path), open_regular(path), safe_open(path, framework="numpy") as file:
        names = list(file.keys())
        layout = _recognize(path, names)
        needed = {name: file.get_slice(name) for name in names if find_rules(layout, name)}
        tensors = {name: _take(path, layout, name, x, rows, vocabulary) for name, x in needed.items()}
        return layout, dict.fromkeys(names) | tensors


def _recognize(path: Path, names: Any) -> Layout:
    layout = recognize(names, TEXT_LAYOUTS)
    if layout is None:
        first = ", ".join(sorted(names)[:3]) or "none"
        raise UserError(f"{path} has no text tower of a known layout; its first tensors are {first}")
    return layout


def _take(path: Path, layout: Layout, name: str, tensor: Any, rows: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return a tensor, or a slice of a file, as an array; of the table of tokens [V,D] only some rows.

    Raises UserError if the table does not have `vocabulary` rows.
    """
    if not any(rule.target == TOKEN_TABLE for rule, _ in find_rules(layout, name)):
        return tensor[...]
    shape = tensor.shape if isinstance(tensor, np.ndarray) else tuple(tensor.get_shape())
    if len(shape) != 2 or shape[0] != vocabulary:
        raise UserError(f"{path} has a table of tokens of shape {shape}, which should have {vocabulary} rows")
    return np.concatenate([tensor[row : row + 1] for row in rows.tolist()])
