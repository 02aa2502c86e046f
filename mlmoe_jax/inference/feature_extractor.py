"""Compute the features of a backbone once, either to train on features instead of images or to write them to files."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.features import FeatureTable, Kinds, open_feature_table
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.data.split import SkippedImages, Split, unlabeled
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.apply import make_feature_step
from mlmoe_jax.models.params import fingerprint
from mlmoe_jax.runs.assemble import Parts, assemble, preprocess_for
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.array_types import Arrays
from mlmoe_jax.runtime.batches import even_batch, run_batches
from mlmoe_jax.runtime.progress import Progress, megabytes, status
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.sharding import shard_tree
from mlmoe_jax.runtime.version import __version__


@dataclass(frozen=True)
class ImageFeatures:
    """The features of an image by kind, None if it could not be read, and then the reason."""

    image: str
    features: Arrays | None = None
    error: str = ""


class FeatureExtractor:
    """The backbone of a model. It computes the features that the head takes as input, without augmentation."""

    def __init__(self, config: ConfigDict, parts: Parts, preprocess: Preprocess, mesh: Mesh):
        """Create the extractor and place the backbone on the mesh. Values of the head may be ShapeDtypeStructs."""
        self.config, self.preprocess, self.mesh = config, preprocess, mesh
        backbone = {path: value for path, value in parts.values.items() if path.startswith("backbone/")}
        self.values = shard_tree(backbone, mesh)
        self.step = make_feature_step(parts.definition, preprocess, mesh)
        self.batch_size = config.eval.batch_size * mesh.size
        fixed = {path: value for path, value in backbone.items() if path not in parts.trainable}
        data, model = config.data, config.model
        self.settings = {  # what features depend on besides the images, as JSON
            "version": __version__,
            "platform": jax.default_backend(),
            "backbone": [model.backbone.name, fingerprint(fixed)],
            "numbers": [model.dtype, model.matmul_precision, model.kernels],
            "preprocess": [
                [preprocess.image_size, *preprocess.mean, *preprocess.std],
                *(data.resize, data.crop_fraction, *data.fill),
            ],
            "decoding": [data.reduced_decoding, data.bad_images, asdict(Decoding.from_config(data))],
        }

    @classmethod
    def from_config(cls, config: ConfigDict, labels: int) -> FeatureExtractor:
        """Return the extractor for the pretrained backbone of a config; UserError if its weights cannot be read."""
        parts = assemble(config, synthetic_label_space(labels, config.model.prompts.num_groups))
        return cls(config, parts, preprocess_for(config), setup_jax(config, training=False))

    def kinds(self) -> Kinds:
        """Return name -> (shape, dtype), per image, of the features that the head takes as input."""
        batch = self.preprocess.batch_shapes(1)
        outputs = jax.eval_shape(self.step, self.values, batch)
        return {kind: (value.shape[1:], str(value.dtype)) for kind, value in outputs.items() if kind not in batch}

    def batches(self, split: Split) -> Iterator[Arrays]:
        """Yield the features of all images of a split, batch by batch, in the order of the split.

        A batch of n images has an array [n,…] per feature, `id` i32[n], the rows of the split, and `mask` f32[n], which
        is 0 for images that cannot be read if `data.bad_images` is "skip".
        """
        size = self.batch_size
        progress = Progress(f"features of {split.name}", -(-len(split) // size), size)
        return self.compute(build_loader(self.config.data, split, batch_size=size, labels=False), progress)

    def even_batch(self, images: int) -> int:
        """Return `batches.even_batch` for batches of about `batch_size` images on the devices of the mesh."""
        return even_batch(images, self.batch_size, self.mesh.size)

    def row_features(
        self, images: Images, rows: Sequence[int], *, batch_size: int, progress: Progress
    ) -> Iterator[tuple[int, ImageFeatures]]:
        """Yield (row, features) of images as `Predictor.label_rows` yields labels."""
        split, kinds = unlabeled(images), self.kinds()
        loader = build_loader(self.config.data, split, batch_size=batch_size, labels=False, rows=rows)
        for batch in self.compute(loader, progress):
            for at, row in enumerate(batch["id"].tolist()):
                if batch["mask"][at]:
                    yield row, ImageFeatures(split.ids[row], {kind: batch[kind][at] for kind in kinds})
                else:
                    [(_, name, error)] = SkippedImages(split, [row]).table()
                    yield row, ImageFeatures(name, error=error)

    def compute(self, loader: Iterator[Arrays], progress: Progress) -> Iterator[Arrays]:
        """Yield the features of the batches of a loader as `batches` does."""
        step = functools.partial(self.step, self.values)
        for output in run_batches(step, loader, self.mesh, advice="lower eval.batch_size", progress=progress):
            real = output["id"] >= 0  # not padding
            yield {kind: values[real] for kind, values in output.items()}

    def cached(self, split: Split) -> Split:
        """Return the split with features in place of images. Features that the cache lacks are computed and stored."""
        stored = self.config.data.cache_features
        table = open_feature_table(split.images, split.ids, self.kinds(), stored, self.settings)
        decoding = Decoding.from_config(self.config.data)
        lacking = table.missing(lambda row: not split.images.problem(row, decoding))
        missing = sorted(set().union(*distributed.gather(lacking)))  # all processes together compute them
        size = f"{len(split):,} images, {megabytes(len(split) * table.row_bytes)} as {stored} in {table.folder}"
        status(f"features of {split.name}, without augmentation: {size}{'' if missing else ', already there'}")
        if missing:
            self._fill(table, missing, split)
        return replace(split, features=table)

    def _fill(self, table: FeatureTable, missing: list[int], split: Split) -> None:
        """Compute the `missing` parts of a feature table and write them. One batch may hold images of several parts."""
        rows = {part: table.list_rows(part) for part in missing}
        batches = self.batches(split.take(np.concatenate(list(rows.values())), split.name))
        pending: list[Arrays] = []
        for part, part_rows in rows.items():
            size = len(part_rows)
            while sum(len(batch["mask"]) for batch in pending) < size:
                pending.append(next(batches))
            joined = {kind: np.concatenate([batch[kind] for batch in pending]) for kind in pending[0]}
            pending = [{kind: values[size:] for kind, values in joined.items()}]
            features = {kind: joined[kind][:size] for kind in table.kinds}
            table.write(part, features, joined["mask"][:size] > 0)
        batches.close()


def require_frozen(parts: Parts) -> None:
    """Raise UserError if a parameter of the backbone is trainable. Training would make cached features invalid."""
    if tuned := sorted(path for path in parts.trainable if path.startswith("backbone/")):
        raise UserError(
            f"data.cache_features needs a frozen backbone, but {len(tuned)} of its parameters train, such as "
            f"{tuned[0]}; set data.cache_features=no, or freeze them in config.trainable"
        )
