"""`mlmoe features --images=…`: write the features of a corpus in parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from mlmoe_jax.apps.tools.feature_files import require_pretrained
from mlmoe_jax.apps.tools.part_files import plain
from mlmoe_jax.apps.tools.part_options import PartOptions
from mlmoe_jax.apps.tools.parts import PartSource, write_parts
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.features import Kinds
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.split import SkippedImages, unlabeled
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.runtime.array_types import Arrays
from mlmoe_jax.runtime.batches import even_batch
from mlmoe_jax.runtime.files import MIB
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.storage import atomic_file
from mlmoe_jax.runtime.table import Outcome

GROUP_BYTES = 64 * MIB  # of features in a group of rows, which is in memory while it is written
_COLUMNS = {"cls": "features", "patches": "patches"}  # by the kind of features


@dataclass(frozen=True)
class ImageFeatures:
    """The features of an image by kind, None if it could not be read, and then the reason."""

    image: str
    features: Arrays | None = None
    error: str = ""


def write_feature_parts(config: ConfigDict, options: PartOptions) -> Outcome:
    """Write the features that the head of a config reads to a folder of parts, see `write_parts`."""
    require_pretrained(config)
    config = config.copy_and_resolve_references()
    config.data.bad_images = "skip"
    return write_parts(lambda images: _open_source(FeatureExtractor.from_config(config, labels=1)), options)


def _open_source(extractor: FeatureExtractor) -> PartSource:
    kinds = extractor.kinds()
    return PartSource(
        "features",
        "read",
        {**extractor.settings, "features": kinds},
        Decoding.from_config(extractor.config.data),
        partial(even_batch, most=extractor.batch_size, devices=extractor.mesh.size),
        partial(compute_features, extractor),
        partial(write_feature_part, kinds),
    )


def compute_features(
    extractor: FeatureExtractor, images: Images, rows: Sequence[int], *, batch_size: int, progress: Progress
) -> Iterator[tuple[int, ImageFeatures]]:
    """Yield (row, features) of images as `Predictor.label_rows` yields labels."""
    split, kinds = unlabeled(images), extractor.kinds()
    loader = build_loader(extractor.config.data, split, batch_size=batch_size, labels=False, rows=rows)
    for batch in extractor.compute(loader, progress):
        for at, row in enumerate(batch["id"].tolist()):
            if batch["mask"][at]:
                yield row, ImageFeatures(split.ids[row], {kind: batch[kind][at] for kind in kinds})
            else:
                [(_, name, error)] = SkippedImages(split, [row]).table()
                yield row, ImageFeatures(name, error=error)


def write_feature_part(kinds: Kinds, path: epath.Path, results: Iterable[ImageFeatures]) -> None:
    """Write a table with the columns image, error (null if the image was read), and a list of floats per kind."""
    import pyarrow as pa
    from pyarrow import parquet

    sizes = {kind: math.prod(shape) for kind, (shape, _) in kinds.items()}
    lists = {_COLUMNS[kind]: pa.list_(pa.float32(), size) for kind, size in sizes.items()}
    schema = pa.schema({"image": pa.string(), **lists, "error": pa.string()})
    rows, most = iter(results), max(1, GROUP_BYTES // (4 * sum(sizes.values())))
    with atomic_file(path) as file, parquet.ParquetWriter(str(file), schema, use_dictionary=["error"]) as writer:
        while group := list(itertools.islice(rows, most)):
            columns = {
                _COLUMNS[kind]: [row.features and row.features[kind].astype(np.float32).ravel() for row in group]
                for kind in kinds
            }
            columns["image"] = [plain(row.image) for row in group]
            columns["error"] = [plain(row.error) or None for row in group]
            writer.write_table(pa.table(columns, schema))
