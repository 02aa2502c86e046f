"""Load the text tower of a backbone, with only those rows of its table of tokens that the texts need.

The table of SigLIP 2 has 256,000 rows, two thirds of the parameters of its smallest tower.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from flax import nnx

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.text.tower import TOKEN_TABLE, TextShape, TextTower
from mlmoe_jax.pretrained.load import apply_rules, fill, read_tensors, recognize
from mlmoe_jax.pretrained.rules.text_names import TEXT_LAYOUTS


def load_text_tower(shape: TextShape, path: Path, tokens: np.ndarray) -> tuple[TextTower, np.ndarray]:
    """Return a text tower that has only the tokens of some texts, and these texts in the token numbers of this tower.

    The file may have the vision tower too. `tokens` i32[n,t] are the texts in numbers of the whole vocabulary. The
    tower has a table of the V tokens that occur in them, in the same order, so the returned texts i32[n,t] have numbers
    from 0 to V − 1. Raises UserError if the file cannot be read, or does not have this tower.
    """
    stored = read_tensors(path)
    layout = recognize(stored, TEXT_LAYOUTS)
    if layout is None:
        first = ", ".join(sorted(stored)[:3]) or "none"
        raise UserError(f"{path} has no text tower of a known layout; its first tensors are {first}")
    mapped = apply_rules(path, stored, layout)
    rows, places = np.unique(tokens, return_inverse=True)
    if (table := mapped.values.get(TOKEN_TABLE)) is not None:
        if table.ndim != 2 or len(table) != shape.vocabulary:
            expected = f"which should have {shape.vocabulary} rows"
            raise UserError(f"{path} has a table of tokens of shape {table.shape}, {expected}")
        mapped.values[TOKEN_TABLE] = table[rows]
    tower = nnx.eval_shape(lambda: replace(shape, vocabulary=len(rows)).build(rngs=nnx.Rngs(0)))
    fill(tower, mapped)
    return tower, places.reshape(tokens.shape).astype(np.int32)
