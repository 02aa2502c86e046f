"""Load the text tower of a backbone, with only those rows of its table of tokens that the texts need.

The table of SigLIP 2 has 256,000 rows, two thirds of the parameters of its smallest tower.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors import safe_open

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.text.tower import TOKEN_TABLE, TextShape, TextTower
from mlmoe_jax.pretrained.load import apply_rules, fill, find_rules, find_wrapper, read_tensors, recognize
from mlmoe_jax.pretrained.rules.base import Layout
from mlmoe_jax.pretrained.rules.text_names import TEXT_LAYOUTS
from mlmoe_jax.runtime.files import damage_explained, open_regular


def load_text_tower(shape: TextShape, path: Path, tokens: np.ndarray) -> tuple[TextTower, np.ndarray]:
    """Return a text tower that knows only the tokens of some texts, and these texts in its numbers.

    Args:
      shape: the published architecture.
      path: the file with the weights. It may have the vision tower too.
      tokens: i32[n,t], the texts, in numbers of the whole vocabulary.

    Returns:
      The tower, with a table of V tokens, and i32[n,t], the texts in numbers from 0 to V − 1. V tokens occur in the
      texts, in the order of the whole vocabulary.

    Raises:
      UserError: the file cannot be read, or does not have this tower.
    """
    rows, places = np.unique(tokens, return_inverse=True)
    layout, tensors = _read(path, rows, shape.vocabulary)
    tower = nnx.eval_shape(lambda: replace(shape, vocabulary=len(rows)).build(rngs=nnx.Rngs(0)))
    fill(tower, apply_rules(path, tensors, layout))
    return tower, places.reshape(tokens.shape).astype(np.int32)


def _read(path: Path, rows: np.ndarray, vocabulary: int) -> tuple[Layout, dict[str, np.ndarray | None]]:
    """Return the layout of a file and its tensors by name, with these rows of the table of tokens.

    Tensors that belong to no text tower are None. Of a safetensors file, they are not read.

    Raises UserError if the table does not have `vocabulary` rows.
    """
    with _opened(path) as (names, read):
        layout = recognize(names, TEXT_LAYOUTS)
        if layout is None:
            first = ", ".join(sorted(names)[:3]) or "none"
            raise UserError(f"{path} has no text tower of a known layout; its first tensors are {first}")
        tensors, wrapper = dict.fromkeys(names), find_wrapper(names, layout) or ""
        for name in names:
            targets = [rule.target for rule, _ in find_rules(layout, name.removeprefix(wrapper))]
            if TOKEN_TABLE in targets:
                tensors[name] = _take(path, read(name), rows, vocabulary)
            elif targets:
                tensors[name] = read(name)[...]
        return layout, tensors


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[str], Callable[[str], Any]]]:
    """Open a weights file for the names of its tensors, and a function that returns a tensor or a slice of the file."""
    if path.suffix != ".safetensors":
        tensors = read_tensors(path)
        yield list(tensors), tensors.__getitem__
        return
    with damage_explained(path), open_regular(path), safe_open(path, framework="numpy") as file:
        yield list(file.keys()), file.get_slice


def _take(path: Path, table: Any, rows: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return rows of the table of tokens [V,D], an array or a slice of a file. Raises UserError if V is another."""
    shape = table.shape if isinstance(table, np.ndarray) else tuple(table.get_shape())
    if len(shape) != 2 or shape[0] != vocabulary:
        raise UserError(f"{path} has a table of tokens of shape {shape}, which should have {vocabulary} rows")
    return np.concatenate([table[row : row + 1] for row in rows.tolist()])
