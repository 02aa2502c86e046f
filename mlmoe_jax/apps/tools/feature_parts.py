"""`mlmoe features --images=…`: write the features of a corpus in parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from mlmoe_jax.apps.tools.feature_files import require_pretrained
from mlmoe_jax.apps.tools.part_files import plain
from mlmoe_jax.apps.tools.part_options import PartOptions
from mlmoe_jax.apps.tools.parts import write_parts
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.split import SkippedImages, unlabeled
from mlmoe_jax.errors import DONE
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.runtime.array_types import Arrays
from mlmoe_jax.runtime.files import MIB
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.storage import atomic_file
from mlmoe_jax.runtime.table import Outcome

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_BYTES = 64 * MIB  # of features in a group of rows, which is in memory while it is written
COLUMNS = {"cls": "features", "patches": "patches"}  # by the kind of features


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
    return write_parts(lambda images: Features(FeatureExtractor.from_config(config, labels=1)), options)


class Features:
    """The features of a backbone, see `PartSource`."""

    task, done, describe, exit_code = "features", "read", None, DONE

    def __init__(self, extractor: FeatureExtractor):
        self.extractor, self.kinds = extractor, extractor.kinds()
        self.decoding = Decoding.from_config(extractor.config.data)
        self.settings: dict[str, Any] = {**extractor.settings, "features": self.kinds}

    def batch_size(self, images: int) -> int:
        return self.extractor.batch_size

    def compute(
        self, images: Images, rows: Sequence[int], batch_size: int, progress: Progress
    ) -> Iterator[tuple[int, ImageFeatures]]:
        split = unlabeled(images)
        data = self.extractor.config.data
        loader = build_loader(data, split, batch_size=batch_size, labels=False, rows=rows)
        for batch in self.extractor.compute(loader, progress):
            for at, row in enumerate(batch["id"].tolist()):
                if batch["mask"][at]:
                    features = {kind: batch[kind][at] for kind in self.kinds}
                    yield row, ImageFeatures(split.ids[row], features)
                else:
                    [(_, name, error)] = SkippedImages(split, [row]).table()
                    yield row, ImageFeatures(name, error=error)

    def write(self, path: epath.Path, results: Iterable[ImageFeatures]) -> None:
        """Write a table with the columns image, error (null if the image was read), and a list of floats per kind."""
        import pyarrow as pa
        from pyarrow import parquet

        sizes = {kind: math.prod(shape) for kind, (shape, _) in self.kinds.items()}
        fields = {COLUMNS[kind]: pa.list_(pa.float32(), size) for kind, size in sizes.items()}
        schema = pa.schema({"image": pa.string(), **fields, "error": pa.string()})
        rows, most = iter(results), max(1, GROUP_BYTES // (4 * sum(sizes.values())))
        with (
            atomic_file(path) as partial,
            parquet.ParquetWriter(str(partial), schema, use_dictionary=["error"]) as writer,
        ):
            while group := list(itertools.islice(rows, most)):
                writer.write_table(self._table(group, schema))

    def _table(self, group: Sequence[ImageFeatures], schema: pa.Schema) -> pa.Table:
        import pyarrow as pa

        columns: dict[str, list] = {
            "image": [plain(row.image) for row in group],
            "error": [plain(row.error) or None for row in group],
        }
        for kind in self.kinds:
            columns[COLUMNS[kind]] = [row.features and row.features[kind].astype(np.float32).ravel() for row in group]
        return pa.table(columns, schema)
