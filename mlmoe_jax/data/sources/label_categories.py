"""Categories of labels, such as places and species: a CSV that `data.categories` names, with a category per label.

label,category
beach,place
gull,species
"""

from __future__ import annotations

from collections.abc import Sequence

from mlmoe_jax.data.names import first_repeated
from mlmoe_jax.data.sources.tables import read_columns
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike, damage_explained, read_text
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import abbreviate, compose, quantity


def read_categories(path: PathLike, names: Sequence[str]) -> tuple[str, ...]:
    """Return the category of each of the labels `names`.

    Raises UserError if the file is missing or damaged, names a label twice, or has no category for a label.
    """
    with damage_explained(path):
        rows = read_columns(read_text(path), ("label", "category"), path)
        pairs = [tuple(compose(cell).strip() for cell in cells) for _, cells in rows]
    if repeated := first_repeated(label for label, _ in pairs):
        raise UserError(f"{path} names the label '{repeated}' twice; delete one of the lines")
    category = dict(pairs)
    if lacking := [name for name in names if not category.get(name)]:
        raise UserError(
            f"{path} has no category for {quantity(len(lacking), 'label')}: {abbreviate(lacking)}; add them"
        )
    if further := sorted(category.keys() - set(names)):
        status(f"{path} has {quantity(len(further), 'label')} that the data has not: {abbreviate(further)}")
    return tuple(category[name] for name in names)
