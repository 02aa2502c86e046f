"""Label images with the model of a run folder, without its data set and without training code."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import jax
import numpy as np
from jaxtyping import Float, Float32, Int

from mlmoe_jax.config.loading import Overrides, override_pairs
from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.pipeline import build_loader, plan_for_few_images
from mlmoe_jax.data.split import SkippedImages, Split, unlabeled
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.inputs import ImageLike, MixedImages, is_one_image
from mlmoe_jax.inference.output_names import OutputNames, read_output_names
from mlmoe_jax.inference.ranks import LEAST_IMAGES, LEAST_LABELS, LEAST_RANK, Ranks, best_ranked
from mlmoe_jax.models.attributes import assign
from mlmoe_jax.models.consistency import Scores
from mlmoe_jax.runs.decisions import Thresholds, read_thresholds, stored_thresholds
from mlmoe_jax.runs.restore import BEST, Run, open_run
from mlmoe_jax.runs.shared_model import is_untrained, run_folder
from mlmoe_jax.runtime.array_types import Arrays
from mlmoe_jax.runtime.batches import even_batch, run_batches
from mlmoe_jax.runtime.files import PathLike
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.text import quantity

_logger = logging.getLogger(__name__)

LARGEST_BATCH = 32  # default number of images per device
# Default numbers of images per device in a batch: few sizes, so that few programs are compiled, but with small sizes,
# so that one image is not padded to 32.
SIZES_PER_DEVICE = (1, 4, 16, LARGEST_BATCH)


@dataclass(frozen=True)
class LabeledImage:
    """The prediction for one image.

    Attributes:
      image: the path of the image. For an image that is not a path: "image N", N is its row number.
      labels: by default, the labels whose score reaches their threshold, in the order of the model. With `top_k`, the
        `top_k` labels with the highest scores, highest first. With `ranks`, the labels of `best_ranked`.
      scores: label -> probability, for all labels; None if the image could not be read. They are calibrated if the run
        has a calibration and `calibration.use` is true, and consistent with the label tree if `eval.consistent` is
        true.
      error: the reason why the image could not be read; "" if it was read.
      gates: name of the gate -> routing weights f32[K,E]; None if not requested or the image could not be read.
      attributes: attribute -> its most probable value, which is one of `labels` unless `top_k` or ranks assign them; ""
        if the value is left out of the output.
      ranks: label -> rank among the images, for all labels, see `inference.ranks`; None if the predictor does not rank.
      times: label -> seconds from the start of a video at which it has its score; None for an image.
    """

    image: str
    labels: tuple[str, ...] = ()
    scores: dict[str, float] | None = None
    error: str = ""
    gates: Arrays | None = field(default=None, compare=False)
    ranks: dict[str, float] | None = None
    times: dict[str, float] | None = None
    attributes: dict[str, str] = field(default_factory=dict)


class Predictor:
    """A trained model that labels images.

    Args:
      thresholds: label -> minimum probability for assigning the label.
      source: how the thresholds were fitted, as in `runs.decisions.Thresholds`; None if they were not fitted.
      version: the model version to write into predictions for labeling tools.
      ranked: whether labels are assigned by their ranks among the images of a call, not by thresholds. `from_run`
        sets it for an untrained model of label names, unless it has fitted thresholds or `eval.threshold` is set.
    """

    def __init__(
        self,
        run: Run,
        thresholds: Mapping[str, float],
        source: Mapping[str, Any] | None = None,
        version: str = "mlmoe",
        *,
        ranked: bool = False,
    ):
        self.ranked = ranked
        self.source, self.version = source or {}, version
        self.output = OutputNames.of(run.label_space.names)
        self.tree = run.label_space.tree
        tree = run.label_space.tree.consistent(run.config.eval.consistent)
        consistency = Thresholds(dict(thresholds)).consistency(run.label_space.names, tree)
        self.run = run = replace(run, scores=replace(run.scores, consistency=consistency))
        self.thresholds = consistency.limits
        self._data = run.config.data.copy_and_resolve_references()
        self._data.bad_images = "skip"
        self._data.update(plan_for_few_images(self._data.threads, self._data.workers))
        self._steps = [run.eval_step(), run.eval_step("gates")]

    @classmethod
    def from_run(cls, workdir: PathLike, overrides: Overrides = (), *, checkpoint: str = BEST) -> Predictor:
        """Return the predictor of a run folder or of a shared model; UserError if there is no trained model.

        Args:
          workdir: the run folder; or hf:user/name, a model on the Hugging Face Hub; or demo:photographs.
          overrides: changed keys under `data`, `eval`, `calibration` and `mesh`. `eval.threshold` replaces all
            thresholds of the run. `data.exif` is "apply" unless it is set here, whatever the run used: training may
            ignore the EXIF orientation of benchmark images, but camera photographs must be upright.
          checkpoint: "best", "latest", "raw" or a step, as `which` in `restore.open_run`.
        """
        folder, pairs = run_folder(workdir), override_pairs(overrides)
        if all(key != "data.exif" for key, _ in pairs):
            pairs = [*pairs, ("data.exif", "apply")]
        replaced = any(key == "eval.threshold" for key, _ in pairs)
        # before the model, which takes longer to read
        stored = (stored_thresholds(folder) or Thresholds({})) if replaced else read_thresholds(folder)
        run = open_run(folder, pairs, which=checkpoint)
        used = stored.used(run.config, run.label_space.names, replaced=replaced)
        if used.calibration:
            correction = used.correction(run.label_space.names, run.label_space.tree.attributes)
            run = replace(run, scores=Scores(correction))
            status(f"scores are corrected as fitted on {correction.fitted_on} (--config.calibration.use=false: raw)")
        ranked = is_untrained(run.config, run.notes) and not used.source and not replaced
        return cls(run, used.values, used.source, version=f"{folder.path.name} at step {run.step}", ranked=ranked)

    @property
    def names(self) -> Sequence[str]:
        """The names of the labels in results, which `rename` can change."""
        return self.output.names

    def rename(self, rename: PathLike = "", leave_out: PathLike = "") -> Predictor:
        """Return a predictor whose results have new names, see `output_names.read_output_names`.

        Args:
          rename: a file with a name and a new name per line, with a tab or a comma between.
          leave_out: a file with a name to leave out per line.
        """
        other = copy.copy(self)
        other.output = read_output_names(self.run.label_space.names, rename, leave_out)
        other.tree = other.output.prune(self.run.label_space.tree)
        other.thresholds = other.output.join(self.run.scores.consistency.limits, np.minimum)
        return other

    @overload
    def __call__(
        self, images: ImageLike, *, batch_size: int | None = None, top_k: int | None = None, gates: bool = False
    ) -> LabeledImage: ...

    @overload
    def __call__(
        self,
        images: Sequence[ImageLike],
        *,
        batch_size: int | None = None,
        top_k: int | None = None,
        gates: bool = False,
    ) -> list[LabeledImage]: ...

    def __call__(self, images, *, batch_size=None, top_k=None, gates=False):
        """Label one image or a sequence of images: paths, encoded bytes, arrays u8[h,w,3] or Pillow images.

        The keyword arguments are described in `stream`. Return a `LabeledImage` for one image, and a list of them, in
        the order of the images, for a sequence. Raises UserError if a single image cannot be read (`BadImage`). In a
        sequence, the result of an unreadable image has an `error` instead.
        """
        if is_one_image(images):
            (result,) = self([images], batch_size=batch_size, top_k=top_k, gates=gates)
            if result.error:
                raise BadImage(result.error)
            return result
        return list(self.stream(images, batch_size=batch_size, top_k=top_k, gates=gates))

    def stream(
        self,
        images: Sequence[ImageLike] | Images,
        *,
        batch_size: int | None = None,
        top_k: int | None = None,
        gates: bool = False,
        task: str = "",
    ) -> Iterator[LabeledImage]:
        """Return an iterator over the results, in the order of the images. Images are read while the model runs.

        Args:
          images: as in `__call__`, or an `Images`, whose names are made when they are needed.
          batch_size: the batch size over all devices, rounded up to a multiple of the number of devices. None = the
            smallest size in SIZES_PER_DEVICE (per device) that holds all images in one batch, or the largest size. All
            batches have the same size. The last batch is padded. The model is compiled once per batch size.
          top_k: the number of labels to assign to each image, by highest score. None = use the thresholds.
          gates: also return the routing weights of the labels.
          task: the name of the bar that shows the progress; "" shows none, and warns of images with several frames.

        Raises:
          UserError: `images` is a single image or no sequence, `top_k` or `batch_size` is out of range, or `gates` is
            True and the model has no gates. The iterator raises it if the model returns non-finite scores.
        """
        if is_one_image(images):
            raise UserError("stream takes a sequence of images; put the image in a list")
        split = unlabeled(_as_images(images))
        devices = self.run.mesh.size
        if batch_size is None:
            batch_size = fitting_size(len(images), [size * devices for size in SIZES_PER_DEVICE])
        if batch_size < 1:
            raise UserError(f"the batch size is {batch_size} and should be above 0")
        batch_size = devices * math.ceil(batch_size / devices)
        self.check_options(top_k, gates)
        if not len(images):
            return iter(())
        if not task:  # a command has warned of the frames of its files
            split.images.warn_of_frames()
        outputs = self._all_outputs(self._steps[gates], split, batch_size, task)
        if self.ranked:
            return self._ranked_results(outputs, split, top_k)
        return (result for output in outputs for _, result in self._batch_results(output, split, top_k))

    def label_rows(
        self,
        images: Images,
        rows: Sequence[int],
        *,
        batch_size: int,
        top_k: int | None = None,
        gates: bool = False,
        progress: Progress | None = None,
    ) -> Iterator[tuple[int, LabeledImage]]:
        """Yield (row, result) of the images with the row numbers `rows`, in that order, labeled by thresholds.

        Each `batch_size` rows are one batch. A row of −1 is padding, and a batch of padding alone is not computed, so
        `rows` can tell late which images are left out: a row is asked for when its image is about to be read.
        `batch_size` is over all devices, a multiple of their number. `top_k` and `gates` are as in `stream`.
        """
        split = unlabeled(images)
        data = self._data.copy_and_resolve_references()
        data.update(threads=self.run.config.data.threads, workers=self.run.config.data.workers)
        loader = build_loader(data, split, batch_size=batch_size, labels=False, rows=rows)
        for output in self._outputs(self._steps[gates], loader, progress):
            yield from self._batch_results(output, split, top_k)

    def _ranked_results(self, outputs: Iterable[dict], split: Split, top_k: int | None) -> Iterator[LabeledImage]:
        """Yield the results with ranks, after all images are scored. Too few images for ranks get labels by score."""
        outputs = list(outputs)
        ranks = Ranks.of(outputs)
        alone = len(self.names) == 1  # there is no other label with which its score can be compared
        if ranks is None:
            rule = (
                "a single label is assigned by eval.threshold"
                if alone
                else "each gets the label with the highest score"
            )
            status(f"ranks need {LEAST_IMAGES} images; of fewer, {rule}")
            top_k = top_k or (None if alone else 1)
        elif len(self.names) < LEAST_LABELS:
            _logger.warning(
                f"ranks of {quantity(len(self.names), 'label')} only order the images: some reach {LEAST_RANK}, "
                "whatever they show; look at the scores, set eval.threshold, or name what else the images show"
            )
        for output in outputs:
            for _, result in self._batch_results(output, split, top_k, ranks):
                yield result

    def embed(
        self, images: Sequence[ImageLike] | Images, *, batch_size: int, task: str = ""
    ) -> Iterator[tuple[Int[np.ndarray, " n"], Float[np.ndarray, "n k"], Float32[np.ndarray, "n d"]]]:
        """Yield rows int[n], probabilities [n,K] and pooled features f32[n,D] of the n readable images of each batch.

        The K labels are the labels of the model, also if they have new names.
        `batch_size` is over all devices, a multiple of their number. Raises UserError if the scores are not finite.
        """
        run = self.run
        for output in self._all_outputs(run.eval_step("features"), unlabeled(_as_images(images)), batch_size, task):
            read = (output["id"] >= 0) & (output["mask"] > 0)
            yield output["id"][read], run.scores(output["logits"][read]), output["features"][read]

    def even_batch(self, images: int, most: int | None = None) -> int:
        """Return `batches.even_batch` for the devices of the model. `most` of None is LARGEST_BATCH per device."""
        devices = self.run.mesh.size
        return even_batch(images, most or LARGEST_BATCH * devices, devices)

    def check_options(self, top_k: int | None, gates: bool) -> None:
        """Raise UserError if `top_k` is out of range, see `check_top_k`, or the model has no `gates`."""
        self.check_top_k(top_k)
        run = self.run
        batch = run.preprocess.batch_shapes(run.mesh.size)
        if gates and not jax.eval_shape(self._steps[True], run.values, run.frozen, batch)["gates"]:
            raise UserError(f"a model with the head {run.config.model.head.kind} has no gates")
        self.check_gates(gates)

    def check_gates(self, gates: bool) -> None:
        """Raise UserError if `gates` are requested and labels are joined."""
        if gates and self.output.are_joined:
            raise UserError("gates are of one label, and --rename joins labels; give each label another name")

    def check_top_k(self, top_k: int | None) -> None:
        """Raise UserError if `top_k` is neither None nor from 1 to K, the number of labels."""
        if top_k is not None and not 1 <= top_k <= len(self.names):
            raise UserError(f"top_k is {top_k} and should be from 1 to the {len(self.names)} labels of the model")

    def _all_outputs(self, step: Callable, split: Split, batch_size: int, task: str) -> Iterator[dict]:
        progress = Progress(task, math.ceil(len(split) / batch_size), batch_size) if task else None
        return self._outputs(step, build_loader(self._data, split, batch_size=batch_size, labels=False), progress)

    def _outputs(self, step: Callable, loader: Iterator[Arrays], progress: Progress | None) -> Iterator[dict]:
        run = self.run
        advice = "take a smaller batch (--batch-size)"
        for output in run_batches(
            lambda batch: step(run.values, run.frozen, batch), loader, run.mesh, advice=advice, progress=progress
        ):
            require_finite_logits(output["logits"][output["mask"] > 0])
            yield output

    def _batch_results(
        self, output: dict, split: Split, top_k: int | None, ranks: Ranks | None = None
    ) -> Iterator[tuple[int, LabeledImage]]:
        read = output["mask"] > 0
        for at, row in enumerate(output["id"].tolist()):
            if row < 0:  # padding
                continue
            if not read[at]:  # it could not be read; `table` finds the reason
                [(_, name, error)] = SkippedImages(split, [row]).table()
                yield row, LabeledImage(name, error=error)
                continue
            # static gates are [1,K,E]
            weights = {
                gate: self.output.join(values[at % len(values)].T).T for gate, values in output.get("gates", {}).items()
            }
            yield row, self.result(split.ids[row], output["logits"][at], top_k, weights or None, ranks)

    def result(
        self,
        name: str,
        logits: np.ndarray,
        top_k: int | None = None,
        gates: Arrays | None = None,
        ranks: Ranks | None = None,
    ) -> LabeledImage:
        """Return the prediction for one image, from its logits f32[K]; `top_k` as in `stream`.

        `gates` maps the name of a gate to the routing weights of the labels `names`; None if not requested. `ranks`
        converts logits to ranks, by which labels are then assigned; None: labels are assigned by scores.
        """
        scores = self.output.join(self.run.scores(logits))
        rank = self.output.join(ranks(logits)) if ranks else None
        labels, attributes = self.assign(scores, top_k)
        if rank is not None:
            labels = self._names_of(best_ranked(rank, top_k))
        return LabeledImage(
            name, labels, self.by_name(scores), gates=gates, ranks=self.by_name(rank), attributes=attributes
        )

    def assign(self, scores: np.ndarray, top_k: int | None) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the labels that an image gets, and attribute -> its value, "" if it is left out.

        Args:
          scores: [J], of the labels `names`.
          top_k: the number of labels, by highest score, of equal scores the first; None = as `attributes.assign`.
        """
        assigned = assign(scores, self.thresholds, self.tree.attributes)
        values = {
            item.name: next((item.value(self.names[k]) for k in item.present if assigned[k]), "")
            for item in self.tree.attributes
        }
        best = np.argsort(-scores, kind="stable")[:top_k] if top_k else np.flatnonzero(assigned)
        return self._names_of(best), values

    def _names_of(self, rows: np.ndarray) -> tuple[str, ...]:
        return tuple(self.names[k] for k in rows)

    def by_name(self, values: np.ndarray | None) -> dict[str, float] | None:
        """Return label -> value of the labels `names`; None for None."""
        return None if values is None else dict(zip(self.names, values.tolist(), strict=True))


def _as_images(images: Sequence[ImageLike] | Images) -> Images:
    return images if isinstance(images, Images) else MixedImages(images)


def require_finite_logits(logits: np.ndarray) -> None:
    """Raise UserError if a logit is not finite."""
    if not np.isfinite(logits).all():
        raise UserError("the model returns non-finite scores: its training has diverged; train it again")


def fitting_size(images: int, sizes: Sequence[int]) -> int:
    """Return the first of the increasing `sizes` that is at least `images`, or the last if all are smaller."""
    return next((size for size in sizes if size >= images), sizes[-1])


def weights_by_label(names: Sequence[str], weights: np.ndarray) -> dict[str, list[float]]:
    """Return label -> its E routing weights of f32[K,E], rounded to six digits to keep JSON files small."""
    return dict(zip(names, np.round(weights.astype(np.float64), 6).tolist(), strict=True))
