"""Your own images with the labels of a labeling tool: one file, or one folder of text files, per split.

`data.table` is its path below `data.root` and can contain {split}; otherwise it is the training split, from which
`data.val_fraction` can be held out. CVAT's subsets and a field `split` in the data of a Label Studio task are splits
too. Paths of images are relative to `data.images`. Images that nobody has labeled are left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import UNKNOWN
from mlmoe_jax.data.sources.formats import FORMATS
from mlmoe_jax.data.sources.rows import Row
from mlmoe_jax.data.sources.source import Source, data_folder
from mlmoe_jax.data.sources.tables import collect_labels, image_folder, listed_split, read_classes, select_rows
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import quantity


def open_labels(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open a split of the format `data.name`. Its images are in the order of the file.

    Args:
      data_config: `config.data`.
      split: name of the split.
      classes: the ordered class names, if data.classes is empty. If it is None, the file lists the classes, or they are
        all names in it, sorted.

    Raises:
      UserError: the file is missing or damaged, no image is labeled, an image is listed twice, or a label is not one of
        the classes.
    """
    form, table = FORMATS[data_config.name], data_config.table
    root = data_folder(data_config, f"the labels {table}")
    path = root / table.replace("{split}", split)
    if not path.exists():
        raise UserError(f"there is no {path} for split {split}; correct data.table, which is {table}")
    if data_config.classes:
        file = root / data_config.classes
        classes = form.read_classes(file, data_config) if form.read_classes else read_classes(file)
    with damage_explained(path):
        rows, own = form.read(path, data_config, image_folder(data_config, split))
        if own and (not all(isinstance(name, str) for name in own) or len(set(own)) < len(own)):
            raise ValueError("its classes should be different names")
        selected = select_rows(_labeled(rows, path), path, split, data_config)
        names, files, labels, *_ = collect_labels(selected, path, classes or own or None)
    return listed_split(data_config, split, names, labels, files, path)


def _labeled(rows: Iterable[Row], path: Path) -> Iterator[Row]:
    """Yield the rows of labeled images, then log how many are not; UserError if there is no labeled image."""
    labeled = unlabeled = 0
    for row in rows:
        if not all(isinstance(name, str) for name in (row.image, *row.labels)):
            raise ValueError("the names of images and labels should be text")
        if row.rest == UNKNOWN:
            unlabeled += 1
            continue
        labeled += 1
        yield row
    if unlabeled and not labeled:
        raise UserError(
            f"{path} has no labeled image ({quantity(unlabeled, 'image')} without labels); label some first"
        )
    if unlabeled:
        status(f"{quantity(unlabeled, 'image')} of {path} without labels are left out")


LABELING_TOOL = Source(open_labels)
