"""`mlmoe features --images=…`: write the features of a corpus in parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
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
from mlmoe_jax.inference.feature_extractor import FeatureExtractor, ImageFeatures
from mlmoe_jax.runtime.files import MIB
from mlmoe_jax.runtime.storage import atomic_file
from mlmoe_jax.runtime.table import Outcome

GROUP_BYTES = 64 * MIB  # of features in a group of rows, which is in memory while it is written
_COLUMNS = {"cls": "features", "patches": "patches"}  # by the kind of features


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
        extractor.even_batch,
        extractor.row_features,
        partial(write_feature_part, kinds),
    )


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
