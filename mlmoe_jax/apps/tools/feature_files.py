"""`mlmoe features`: write the features of a data set to files, for classifiers outside this package."""

import contextlib
import io
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import warn_unused
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.models.adapters.catalog import describe_adapters
from mlmoe_jax.runtime.storage import Folder, atomic_file
from mlmoe_jax.runtime.table import Outcome

CLASSES = "classes.txt"


def write_features(config: ConfigDict, output: str) -> Outcome:
    """Write the features, names and labels of all splits of a config to the folder `output`.

    `classes.txt` lists the K classes. Each split with N images has these files:

        SPLIT.ids.txt        the ids of the images
        SPLIT.labels.npy     label codes i8[N,K], see data.label_codes
        SPLIT.cls.npy        f32[N,D], class tokens or pooled features, if the head of the config reads them
        SPLIT.patches.npy    f32[N,h,w,D], patch features, if the head of the config reads them

    With `data.bad_images=skip`, the features of unreadable images are nan. Raises UserError as `require_pretrained`.
    """
    require_pretrained(config)
    folder, data = Folder(output), config.data
    folder.require_creatable()
    splits = open_splits(data, [data.val_split, *data.test_splits], seed=config.seed)
    warn_unused(splits.values())
    classes = splits[data.train_split].classes
    require_no_classes(folder, classes)
    extractor = FeatureExtractor.from_config(config, len(classes))
    _write_lines(folder, CLASSES, classes)
    for split in splits.values():
        _write_split(folder, split, extractor)
    return Outcome([f"features: {folder}"], {"features": str(folder)})


def require_no_classes(folder: Folder, classes: Sequence[str]) -> None:
    """Raise UserError if a folder has a list of other classes, as of a labeling tool, which would be replaced."""
    if (folder / CLASSES).exists() and folder.read_text(CLASSES).split("\n") != [*classes, ""]:
        raise UserError(f"{folder} has a {CLASSES} of other classes, which would be replaced; name another --output")


def require_pretrained(config: ConfigDict) -> None:
    """Raise UserError if a config has prompts or other adapters, which would be untrained."""
    if adapters := describe_adapters(config):
        raise UserError(f"mlmoe features needs a backbone without {adapters}; take a config such as linear_probe")


def _write_split(folder: Folder, split: Split, extractor: FeatureExtractor) -> None:
    _write_lines(folder, f"{split.name}.ids.txt", split.ids)
    labels = io.BytesIO()
    np.save(labels, split.labels)
    folder.write_bytes(f"{split.name}.labels.npy", labels.getvalue())
    with contextlib.ExitStack() as stack:
        files = {}
        for kind, (shape, _) in extractor.kinds().items():
            partial = stack.enter_context(atomic_file(folder / f"{split.name}.{kind}.npy"))
            files[kind] = stack.enter_context(open(partial, "wb"))
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(split), *shape)}
            np.lib.format.write_array_header_1_0(files[kind], header)
        for batch in extractor.batches(split):
            for kind, file in files.items():
                values = batch[kind].astype(np.float32)
                values[batch["mask"] == 0] = np.nan
                file.write(values.tobytes())


def _write_lines(folder: Folder, name: str, lines: Sequence[str]) -> None:
    folder.write_bytes(name, "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
