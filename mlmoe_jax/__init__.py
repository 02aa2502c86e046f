"""Multi-label image classification with frozen backbones, group prompts and mixtures of experts.

    import mlmoe_jax as mm

The names in `__all__` are the public API, with examples in `docs/api.md`. All other names are internal and may change.
`import mlmoe_jax` imports no other library. The modules behind a name are imported when the name is first used.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.version import __version__

if TYPE_CHECKING:
    import jax
    import numpy as np
    from flax import nnx
    from ml_collections import ConfigDict

    from mlmoe_jax.data.labels.grouping import group_labels
    from mlmoe_jax.data.labels.space import LabelSpace
    from mlmoe_jax.data.split import Split
    from mlmoe_jax.evaluation.metrics import multilabel as metrics
    from mlmoe_jax.inference.batch_labeler import BatchLabeler
    from mlmoe_jax.inference.inputs import read_images
    from mlmoe_jax.inference.predictor import Predictor
    from mlmoe_jax.models import losses
    from mlmoe_jax.models.block_features import block_features
    from mlmoe_jax.models.build import Classifier
    from mlmoe_jax.models.outputs import Prompts
    from mlmoe_jax.runs.restore import Run

__all__ = [
    "BatchLabeler",
    "Predictor",
    "Prompts",
    "UserError",
    "__version__",
    "block_features",
    "build_model",
    "evaluate",
    "group_labels",
    "load_backbone",
    "load_batches",
    "load_config",
    "losses",
    "make_loss",
    "metrics",
    "open_run",
    "open_split",
    "read_images",
    "train",
    "trainable_filter",
]

# Public name -> the module that it is, or "module:attribute".
_LAZY = {
    "BatchLabeler": "mlmoe_jax.inference.batch_labeler:BatchLabeler",
    "Predictor": "mlmoe_jax.inference.predictor:Predictor",
    "Prompts": "mlmoe_jax.models.outputs:Prompts",
    "block_features": "mlmoe_jax.models.block_features:block_features",
    "group_labels": "mlmoe_jax.data.labels.grouping:group_labels",
    "losses": "mlmoe_jax.models.losses",
    "metrics": "mlmoe_jax.evaluation.metrics.multilabel",
    "read_images": "mlmoe_jax.inference.inputs:read_images",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mlmoe_jax' has no attribute '{name}'")
    value = pkgutil.resolve_name(_LAZY[name])
    globals()[name] = value  # the next access does not call __getattr__
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_config(reference: str | os.PathLike, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """Load a config file, override keys, and validate the result.

    Args:
      reference: the value of `--config=`: the path of a config file, or the name of a file in `configs/`. Arguments of
        the file follow a colon, as in "linear_probe:dataset=digits".
      overrides: dotted key -> value, such as {"train.epochs": 3}. A string is parsed as the type of the key's default.

    Returns:
      The config.

    Raises:
      UserError: a file, argument or key does not exist, a value has the wrong type, or settings are incompatible.
    """
    import mlmoe_jax.config as configuration
    from mlmoe_jax.config.loading import override_pairs

    loaded = configuration.load_config(os.fspath(reference), override_pairs(overrides))
    configuration.validate(loaded)
    return loaded


def train(config: ConfigDict, workdir: str | os.PathLike) -> dict[str, dict[str, float]]:
    """Train a model in a run folder and evaluate it, as `mlmoe train` does.

    If the run folder has a checkpoint, the training resumes from it.

    Args:
      config: the result of `load_config`. It is not changed.
      workdir: the run folder: a local folder, or an address such as gs://bucket/run. It is created if it does not
        exist.

    Returns:
      A nested dict: split -> metric -> value. Values are fractions, not percentages.

    Raises:
      UserError: the config is invalid, the data set cannot be used, or the folder holds a run with a different config.
      KeyboardInterrupt: after Ctrl-C or SIGTERM, once a checkpoint is saved. Another call of `train` resumes from it.
    """
    from mlmoe_jax.inference.explain import write_requested_samples
    from mlmoe_jax.runs.folder import RunFolder
    from mlmoe_jax.training import loop

    folder = RunFolder(workdir)
    try:
        results = loop.train(config, folder)
    except loop.Stopped as stopped:
        raise KeyboardInterrupt(str(stopped)) from stopped
    write_requested_samples(folder, config)
    return results


def evaluate(
    workdir: str | os.PathLike, overrides: Mapping[str, Any] | None = None, *, checkpoint: str = "best"
) -> dict[str, dict[str, float]]:
    """Evaluate the trained model of a run folder on its test splits, as `mlmoe eval` does.

    The results are also written to the run folder. They replace earlier results of these splits.

    Args:
      workdir: the run folder.
      overrides: dotted key -> value, as in `load_config`, such as {"data.test_splits": ["val"]}. Only keys that do not
        change the trained model are allowed.
      checkpoint: the values to evaluate. "best": the values that training selected. "latest": the values of the newest
        checkpoint, moving averages if the run has them. "raw": its values without averaging. A step as a string: the
        values that were selected when the checkpoint of this step was saved.

    Returns:
      A nested dict: split -> metric -> value. Values are fractions, not percentages.

    Raises:
      UserError: the folder has no trained model, a key would change the trained model, or the labels of the data differ
        from the labels of the model.
    """
    from mlmoe_jax.config.loading import override_pairs
    from mlmoe_jax.evaluation.evaluate import evaluate_run
    from mlmoe_jax.runs.folder import RunFolder

    return evaluate_run(RunFolder(workdir), override_pairs(overrides), which=checkpoint)


def open_run(
    workdir: str | os.PathLike, overrides: Mapping[str, Any] | None = None, *, checkpoint: str = "best"
) -> Run:
    """Restore the trained model of a run folder.

    Args:
      workdir: the run folder; or hf:user/name, a model on the Hugging Face Hub; or demo:photographs.
      overrides: dotted key -> value, as in `load_config`. Only keys that do not change the trained model are allowed.
      checkpoint: the values to restore, as in `evaluate`.

    Returns:
      The run. Its main members are `model()`, which returns a Flax NNX module, `config`, `label_space`, and
      `preprocess(image)`, which converts images u8[B,H,W,3] to the input of the model.

    Raises:
      UserError: the folder has no trained model, or a key would change the trained model.
    """
    from mlmoe_jax.config.loading import override_pairs
    from mlmoe_jax.runs import restore
    from mlmoe_jax.runs.shared_model import run_folder
    from mlmoe_jax.runtime.files import is_read_only

    own = not is_read_only(workdir)
    return restore.open_run(run_folder(workdir), override_pairs(overrides), which=checkpoint, own=own)


def build_model(
    config: ConfigDict, labels: Sequence[str] | LabelSpace | Split | int, *, weights: bool = True
) -> Classifier:
    """Build the Flax NNX model of a config, with untrained prompts and an untrained head.

    Args:
      config: the result of `load_config`. The initial values of the prompts and the head depend on its `seed`.
      labels: the labels of the model, as a training split from `open_split`, a `LabelSpace` such as `run.label_space`,
        a list of the K names, or the number K. Names or a number carry no statistics of training labels (groups,
        graphs, frequencies). Methods that need these statistics then use placeholders.
      weights: load the pretrained weights of the backbone. If False, the backbone has random weights.

    Returns:
      The model: `model(image f32[B,H,W,3])` returns a `Prediction`, whose `logits` are f32[B,K].

    Raises:
      UserError: there are no labels, the head or prompts do not fit the backbone, or the weights are missing.
    """
    from mlmoe_jax.runs.assemble import initial_model

    space = _label_space(labels, config)
    return initial_model(config, space, load_backbone=weights)


def load_backbone(name: str, *, weights: str | os.PathLike = "auto") -> nnx.Module:
    """Load a backbone as a Flax NNX module.

    Args:
      name: the name of a backbone in the catalog, such as "vit_digits" or "dinov2_vitb14".
      weights: "auto" for the published weights, which are downloaded once; "none" for random weights; or the path of a
        weights file.

    Returns:
      The backbone: `backbone(image f32[B,H,W,3], prompts=None, *, read=("cls",), norm=True) -> Features`. The argument
      `read` names the features to compute: "cls" f32[B,D], "patches" f32[B,N,D] and, if `prompts` are given, "prompts"
      f32[B,P,D]. The attribute `backbone.preprocess` describes the input that the weights were trained on: `image_size`
      in pixels, and the channel `mean` and `std` of pixel values in 0…1.

    Raises:
      UserError: the name is unknown, or the weights are missing or do not fit the backbone.
    """
    from flax import nnx

    from mlmoe_jax.data.prepare import Preprocess
    from mlmoe_jax.models.backbones import catalog
    from mlmoe_jax.models.params import draw_missing
    from mlmoe_jax.runs.assemble import load_pretrained

    entry = catalog.entry(name)

    def build() -> Any:
        return entry.shape.build(rngs=nnx.Rngs(0))

    backbone: Any = nnx.eval_shape(build)
    load_pretrained(backbone, name, os.fspath(weights))
    draw_missing(backbone, build)
    backbone.preprocess = Preprocess(entry.image_size, entry.mean, entry.std)
    return backbone


def open_split(config: ConfigDict, split: str = "") -> Split:
    """Open a split of the data set of a config. Images are read only when they are used.

    Input that no split uses, such as rows without labels, is logged as a warning.

    Args:
      config: the result of `load_config`.
      split: the name of the split. "" means the training split.

    Returns:
      The split. Its main attributes are:
        classes: the names of the K labels.
        labels: i8[N,K], the label codes: 1 positive, 0 negative, -1 unknown, 2 difficult.
        ids: the name of each image.
        images: the images; `images.read(row)` returns u8[h,w,3].

    Raises:
      UserError: the data set is missing or damaged, or has no such split.
    """
    from mlmoe_jax.data.sources.open import open_splits
    from mlmoe_jax.data.split_checks import warn_unused

    name = split or config.data.train_split
    opened = open_splits(config.data, [name], seed=config.seed)[name]
    warn_unused([opened])
    return opened


def load_batches(
    config: ConfigDict, split: Split, *, batch_size: int, training: bool = False, first_step: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Return an iterator over the batches of a split.

    Args:
      config: the result of `load_config`. Its section `data` sets how images are resized, and its section `augment` how
        they are augmented.
      split: the result of `open_split`.
      batch_size: the number of images per batch, B.
      training: if True, images are shuffled with the seed of the config and augmented on the host, and the iterator
        never ends. If False, each image occurs once, in the order of the split, and the last batch is padded.
      first_step: the number of batches to skip at the start, to resume a training.

    Returns:
      An iterator over dicts: `image` u8[B,H,W,3], `label` f32[B,K], `label_mask` f32[B,K], `mask` f32[B] and `id`
      i32[B], the row of the image in the split. Padding has `mask` 0 and `id` -1.

    Raises:
      UserError: raised by the iterator if an image cannot be read, unless `data.bad_images` is "skip".
    """
    from mlmoe_jax.data.pipeline import build_loader

    augment = config.augment if training else None
    options = {"augment": augment, "seed": config.seed, "first_step": first_step, "process": (0, 1)}  # whole batches
    return build_loader(config.data, split, batch_size=batch_size, **options)


def make_loss(config: ConfigDict, labels: np.ndarray | None = None) -> Callable[..., jax.Array]:
    """Return the training loss of a config, with all terms and penalties.

    Args:
      config: the result of `load_config`.
      labels: i8[N,K], the label codes of the training split. They are needed if the loss depends on the training labels
        or on the epoch.

    Returns:
      A function `loss(prediction, batch, step=0) -> f32[]`. The `batch` is a dict with `label` f32[B,K], `label_mask`
      f32[B,K] (0 = unknown) and `mask` f32[B] (0 = padding).

    Raises:
      UserError: the loss needs `labels`, and they are None.
    """
    from mlmoe_jax.training.objective import Objective, training_labels

    if labels is None and config.loss.kind == "bce" and not config.loss.positive_weight:
        raise UserError("loss.positive_weight=0 weights positives by the training labels; pass the labels to make_loss")
    if config.loss.prior:
        raise UserError("loss.prior is by names of labels, which make_loss does not know; leave it empty")
    objective = Objective(config.loss, None if labels is None else training_labels(config, labels))
    return lambda prediction, batch, step=0: objective(prediction, batch, step=step)[0]


def trainable_filter(config: ConfigDict) -> Callable[[tuple, Any], bool]:
    """Return a Flax NNX filter that selects the trainable parameters of a config. All other parameters are frozen.

    Use it as in `nnx.split(model, trainable_filter(config), ...)`.

    Raises:
      UserError: raised by the filter if no rule of `config.trainable` matches a parameter.
    """
    from flax import nnx

    from mlmoe_jax.models.rules import assign
    from mlmoe_jax.runs.assemble import trainable_rules

    rules = trainable_rules(config)

    def trains(path: tuple, value: Any) -> bool:
        name = "/".join(map(str, path))
        return assign(rules, [name])[name]

    return nnx.filterlib.All(nnx.Param, trains)


def _label_space(labels: Sequence[str] | LabelSpace | Split | int, config: ConfigDict) -> LabelSpace:
    from mlmoe_jax.data.labels.space import LabelSpace, synthetic_label_space
    from mlmoe_jax.data.split import Split
    from mlmoe_jax.training.training_data import label_space_for

    if isinstance(labels, LabelSpace):
        return labels
    if isinstance(labels, Split):
        return label_space_for(config, labels)
    count = labels if isinstance(labels, int) else len(labels)
    if isinstance(labels, str) or count < 1:
        raise UserError(f"labels is {labels!r}; give the names of the labels as a list, or their number")
    space = synthetic_label_space(count, config.model.prompts.num_groups)
    return space if isinstance(labels, int) else replace(space, names=tuple(labels))
