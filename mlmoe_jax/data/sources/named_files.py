"""The files beside the labels of a data set that `config.data` names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ml_collections import ConfigDict

from mlmoe_jax.data.attributes import AttributeValues, named_attributes, read_attributes
from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree, read_tree
from mlmoe_jax.data.sources.catalog import DATA_SETS
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike
from mlmoe_jax.runtime.text import compose

OF_TABLES = ("csv", "jsonl", "coco_json", *FORMATS)  # data sets whose images are listed in `data.table`


def find_root(data_config: ConfigDict) -> str:
    """Return the folder of the data set; UserError if a published data set has none."""
    published = DATA_SETS[data_config.name].published
    return str(published.folder(data_config.root)) if published else os.path.expanduser(data_config.root)


def read_label_tree(data_config: ConfigDict, names: Sequence[str]) -> LabelTree:
    """Return the tree of `data.tree` for the labels `names`, with their attributes.

    Raises UserError if a file is damaged, or the tree and the attributes contradict each other.
    """
    rules = read_tree(resolve_path(data_config, data_config.tree), names) if data_config.tree else INDEPENDENT
    tree = replace(rules, attributes=attributes_of(data_config).find(names))
    if problem := tree.find_contradiction(names):
        raise UserError(f"data.attributes cannot hold: {problem}; correct it, or data.tree")
    return tree


def attributes_of(data_config: ConfigDict) -> AttributeValues:
    """Return the attributes of `data.attributes`; UserError if it names a damaged file, or is no list of names."""
    given = data_config.attributes
    if given.endswith((".yaml", ".yml")):
        return read_attributes(resolve_path(data_config, given))
    names = [compose(name).strip() for name in given.split(",")] if given else []
    return named_attributes(dict.fromkeys(names, ()))


def require_no_table(output: PathLike | None, data_config: ConfigDict) -> None:
    """Raise UserError if an output would replace a table of the data set. A shared model has lost its data set."""
    splits = (data_config.train_split, data_config.val_split, *data_config.test_splits)
    for split in splits if output and data_config.root and data_config.name in OF_TABLES else ():
        table = resolve_path(data_config, data_config.table.replace("{split}", split))
        if os.path.isfile(output) and os.path.isfile(table) and os.path.samefile(output, table):
            raise UserError(f"--output={output} would replace the table of the data set; name another file")


def resolve_path(data_config: ConfigDict, name: str) -> str:
    """Return the path or address of the file `name`. A relative path is relative to the folder of the data set."""
    name = os.path.expanduser(name)
    return name if "://" in name else os.path.join(find_root(data_config), name)
