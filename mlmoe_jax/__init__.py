"""Multi-label image classification with frozen backbones, group prompts and mixtures of experts.

    import mlmoe_jax as mm

The names in `__all__` are the public API, with examples in `docs/api.md`; any other name is internal and may move.
Importing the package imports no libraries: each name imports what it needs when it is used.
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
    from mlmoe_jax.inference.inputs import read_images
    from mlmoe_jax.inference.predictor import Predictor
    from mlmoe_jax.models import losses
    from mlmoe_jax.models.block_features import block_features
    from mlmoe_jax.models.build import Classifier
    from mlmoe_jax.models.outputs import Prompts
    from mlmoe_jax.runs.restore import Run

__all__ = [
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
    """Load a config file, set keys, and check the result.

    Args:
      reference: the value of `--config=`: the path of a file or the name of a file in `configs/`, with arguments after
        a colon, such as "linear_probe:dataset=digits".
      overrides: dotted key -> value, such as {"train.epochs": 3}. A string is parsed as the type of the key's default.

    Raises:
      UserError: a file, argument or key does not exist, a value has another type, or settings do not fit together.
    """
    import mlmoe_jax.config as configuration
    from mlmoe_jax.config.loading import override_pairs

    loaded = configuration.load_config(os.fspath(reference), override_pairs(overrides))
    configuration.validate(loaded)
    return loaded


def train(config: ConfigDict, workdir: str | os.PathLike) -> dict[str, dict[str, float]]:
    """Train in a run folder, or resume its training, and evaluate, as `--mode=train` does.

    Args:
      config: result of `load_config`; it is not changed.
      workdir: a local folder, or an address such as gs://bucket/run; it is created if it does not exist.

    Returns:
      split -> metric -> value, as a fraction.

    Raises:
      UserError: the config, the data set or the run folder does not fit.
      KeyboardInterrupt: after Ctrl-C or SIGTERM, once a checkpoint is saved; calling `train` again then resumes.
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
    """Evaluate the trained model of a run folder on its test splits, as `--mode=eval` does.

    The results are written to the run folder, and replace those of the same splits.

    Args:
      workdir: the run folder.
      overrides: dotted key -> value, as in `load_config`, of keys that may differ from the training, such as
        {"data.test_splits": ["val"]}.
      checkpoint: "best", the values that training selected; "latest", the values of the newest checkpoint; or a step,
        for the values that were selected when the checkpoint of the step was saved.

    Returns:
      split -> metric -> value, as a fraction.

    Raises:
      UserError: the folder has no trained model, a key would change the trained model, or the data has other labels.
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
      workdir: the run folder, a model on the hub, hf:user/name, or demo:photographs.
      overrides: dotted key -> value, as in `load_config`, of keys that may differ from the training.
      checkpoint: as in `evaluate`.

    Returns:
      the run, with `model()`, a Flax NNX module, `config`, `label_space` and `preprocess(image u8[B,H,W,3])`.

    Raises:
      UserError: the folder has no trained model, or a key would change the trained model.
    """
    from mlmoe_jax.config.loading import override_pairs
    from mlmoe_jax.runs import restore
    from mlmoe_jax.runs.shared_model import run_folder

    return restore.open_run(run_folder(workdir), override_pairs(overrides), which=checkpoint)


def build_model(
    config: ConfigDict, labels: Sequence[str] | LabelSpace | Split | int, *, weights: bool = True
) -> Classifier:
    """Build the Flax NNX model of a config: `model(image f32[B,H,W,3]) -> Prediction`, with `logits` f32[B,K].

    Args:
      config: result of `load_config`; prompts and head have the initial values of its seed.
      labels: a training split of `open_split`, or a `LabelSpace`, such as `run.label_space`; or only the names of the
        K labels, or their number. In place of statistics of the training labels (groups, graphs, frequencies), methods
        then use placeholders.
      weights: load the pretrained backbone of the config; otherwise it is random too.

    Raises:
      UserError: there are no labels, the head or prompts do not fit the backbone, or the weights are missing.
    """
    from mlmoe_jax.runs.assemble import initial_model

    space = _label_space(labels, config)
    return initial_model(config, space, load_backbone=weights)


def load_backbone(name: str, *, weights: str | os.PathLike = "auto") -> nnx.Module:
    """Load a backbone: `backbone(image f32[B,H,W,3], prompts=None, *, read=("cls",), norm=True) -> Features`.

    `read` names the features to compute: "cls" f32[B,D], "patches" f32[B,N,D], and with prompts "prompts" f32[B,P,D].
    `backbone.preprocess` holds the preprocessing that it was trained with: `image_size` in pixels, and the `mean` and
    `std` of each channel for values in 0…1.

    Args:
      name: a name of the catalog, such as "vit_digits" or "dinov2_vitb14".
      weights: "auto", the published file, downloaded once; "none", random; or the path of a weights file.

    Raises:
      UserError: the name is unknown, or the weights are missing or do not fit.
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
    """Open a split of the data set of a config; images are read when they are used.

    Args:
      config: result of `load_config`.
      split: the name of the split; by default the training split.

    Returns:
      the split: `classes`, the names of the K labels; `labels` i8[N,K], 1 positive, 0 negative, -1 unknown and 2
      difficult; `ids`, the name of each image; `images.read(row)` u8[h,w,3].

    Raises:
      UserError: the data set is missing or damaged, or has no such split.
    """
    from mlmoe_jax.data.sources.open import open_splits

    name = split or config.data.train_split
    return open_splits(config.data, [name], seed=config.seed)[name]


def load_batches(
    config: ConfigDict, split: Split, *, batch_size: int, training: bool = False, first_step: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Read a split in batches: `image` u8[B,H,W,3], `label` and `label_mask` f32[B,K], `mask` f32[B] and `id` i32[B].

    Args:
      config: result of `load_config`; its section `data` says how images are resized, `augment` how they are augmented.
      split: result of `open_split`.
      batch_size: B.
      training: shuffle by the config's seed, repeat without end, and augment, all on the host. Otherwise each image
        comes once, in order, and the last batch is padded with `mask` 0 and `id` -1.
      first_step: the number of batches to leave out, to resume.

    Raises:
      UserError: raised by the iterator if an image cannot be read, unless `data.bad_images` is "skip".
    """
    from mlmoe_jax.data.pipeline import build_loader

    augment = config.augment if training else None
    options = {"augment": augment, "seed": config.seed, "first_step": first_step}
    return build_loader(config.data, split, batch_size=batch_size, **options)


def make_loss(config: ConfigDict, labels: np.ndarray | None = None) -> Callable[..., jax.Array]:
    """Return the training loss of a config: `loss(prediction, batch, step=0) -> f32[]`, with all terms and penalties.

    `batch` has `label` f32[B,K], `label_mask` f32[B,K] (0 = unknown) and `mask` f32[B] (0 = padding).

    Args:
      config: result of `load_config`.
      labels: the label codes i8[N,K] of the training split, for a loss that depends on them or on the epoch of `step`.

    Raises:
      UserError: the loss needs labels, and there are none.
    """
    from mlmoe_jax.training.objective import Objective, training_objective

    if labels is None and config.loss.kind == "bce" and not config.loss.positive_weight:
        raise UserError("loss.positive_weight=0 weights positives by the training labels; pass the labels to make_loss")
    objective = Objective(config.loss) if labels is None else training_objective(config, labels)
    return lambda prediction, batch, step=0: objective(prediction, batch, step=step)[0]


def trainable_filter(config: ConfigDict) -> Callable[[tuple, Any], bool]:
    """Return a filter of Flax NNX for the trainable parameters of a config; other parameters are frozen.

    `nnx.split(model, trainable_filter(config), ...)` separates them.

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
