"""Multi-label image classification with frozen backbones, group prompts and mixtures of experts.

    import mlmoe_jax as mm

The names in `__all__` are the public API, with examples in `docs/api.md`; all else is internal and may move. Importing
the package imports none of its libraries: each name imports what it needs when it is used.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.version import __version__

if TYPE_CHECKING:
    from flax import nnx
    from ml_collections import ConfigDict

    from mlmoe_jax.data.labels.grouping import group_labels
    from mlmoe_jax.data.labels.space import LabelSpace
    from mlmoe_jax.evaluation.metrics import multilabel as metrics
    from mlmoe_jax.inference.predict import Predictor
    from mlmoe_jax.models import losses
    from mlmoe_jax.models.build import Classifier

__all__ = [
    "Predictor",
    "UserError",
    "__version__",
    "build_model",
    "evaluate",
    "group_labels",
    "load_backbone",
    "load_config",
    "losses",
    "metrics",
    "train",
]

# Public name -> the module that it is, or "module:attribute".
_LAZY = {
    "Predictor": "mlmoe_jax.inference.predict:Predictor",
    "group_labels": "mlmoe_jax.data.labels.grouping:group_labels",
    "losses": "mlmoe_jax.models.losses",
    "metrics": "mlmoe_jax.evaluation.metrics.multilabel",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mlmoe_jax' has no attribute '{name}'; its public names are {', '.join(__all__)}")
    module, _, attribute = _LAZY[name].partition(":")
    found = importlib.import_module(module)
    if attribute:
        found = getattr(found, attribute)
    globals()[name] = found  # the next time it is found without asking here
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


def load_config(reference: str | os.PathLike, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """Load a config file, set keys of it, and check the whole.

    Args:
      reference: what `--config=` takes: the path of a file or the name of one in `configs/`, with arguments after a
        colon, such as "linear_probe:dataset=digits".
      overrides: dotted key -> value, such as {"train.epochs": 3}. A text is read as the type of the key's default.

    Raises:
      UserError: no such file, argument or key, a value of another type, or settings that do not fit together.
    """
    import mlmoe_jax.config as configuration
    from mlmoe_jax.config.overrides import as_pairs

    loaded = configuration.load_config(os.fspath(reference), as_pairs(overrides))
    configuration.validate(loaded)
    return loaded


def train(config: ConfigDict, workdir: str | os.PathLike) -> dict[str, dict[str, float]]:
    """Train in a run folder, or resume the training that it holds, and evaluate.

    Like `--mode=train`, it also writes sample images for the report if `report.samples` is above 0.

    Args:
      config: of `load_config`.
      workdir: a local folder, or an address such as gs://bucket/run; it is made if it does not exist.

    Returns:
      split -> metric -> value, as a fraction.

    Raises:
      UserError: a config, data set or run folder that does not fit.
      KeyboardInterrupt: after Ctrl-C or SIGTERM, once a checkpoint is saved; the same call then resumes.
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
    """Evaluate the trained model of a run folder on its test splits, and write the results to `eval/` in the folder.

    Like `--mode=eval`, it also writes sample images for the report if `report.samples` is above 0.

    Args:
      workdir: the folder of a run.
      overrides: dotted key -> value, as in `load_config`, of keys that may differ from the training, such as
        {"data.test_splits": ["val"]}.
      checkpoint: "best", the values that training selected; "latest", those at the end of the newest checkpoint; or a
        step, for the values that were selected when its checkpoint was saved.

    Returns:
      split -> metric -> value, as a fraction.

    Raises:
      UserError: a folder without a trained model, a key of what was trained, or data with other labels.
    """
    from mlmoe_jax.config.overrides import as_pairs
    from mlmoe_jax.evaluation.evaluate import evaluate_run
    from mlmoe_jax.runs.folder import RunFolder

    return evaluate_run(RunFolder(workdir), as_pairs(overrides), which=checkpoint)


def build_model(config: ConfigDict, labels: Sequence[str] | LabelSpace | int, *, weights: bool = True) -> Classifier:
    """Build the Flax NNX model of a config: `model(image f32[B,H,W,3]) -> Prediction`, with `logits` f32[B,K].

    Prompts and head have the initial values of the config's seed.

    Args:
      config: of `load_config`.
      labels: the names of the K labels, or only their number. Methods that use statistics of the training labels
        (groups, graphs, frequencies) then get placeholders; a `LabelSpace`, such as `predictor.run.label_space`, has
        the real ones.
      weights: load the pretrained backbone that the config names; otherwise it is random too.

    Raises:
      UserError: no labels, a head or prompts that do not fit the backbone, or weights that cannot be found.
    """
    from mlmoe_jax.runs.assemble import initial_model

    space = _label_space(labels, config.model.prompts.num_groups)
    return initial_model(config, space, load_backbone=weights)


def load_backbone(name: str, *, weights: str | os.PathLike = "auto") -> nnx.Module:
    """Load a backbone: `backbone(image f32[B,H,W,3], prompts=None, *, read=("cls",), norm=True) -> Features`.

    `read` names the features to compute: "cls" f32[B,D], "patches" f32[B,N,D], and with prompts "prompts" f32[B,P,D].
    `backbone.preprocess` holds the preprocessing that it was trained with: `image_size` in pixels, and the `mean` and
    `std` of each channel for values in 0…1.

    Args:
      name: a name of the catalogue, such as "vit_digits" or "dinov2_vitb14".
      weights: "auto", the published file, downloaded once; "none", random; or the path of a weights file.

    Raises:
      UserError: an unknown name, or weights that cannot be found or do not fit.
    """
    from flax import nnx

    from mlmoe_jax.data.prepare import Preprocess
    from mlmoe_jax.models.backbones import catalog
    from mlmoe_jax.models.initial_values import draw_missing
    from mlmoe_jax.runs.assemble import load_pretrained

    entry = catalog.entry(name)

    def build() -> nnx.Module:
        return entry.shape.build(rngs=nnx.Rngs(0))

    backbone = nnx.eval_shape(build)
    load_pretrained(backbone, name, os.fspath(weights))
    draw_missing(backbone, build)
    backbone.preprocess = Preprocess(entry.image_size, entry.mean, entry.std)
    return backbone


def _label_space(labels: Sequence[str] | LabelSpace | int, groups: int) -> LabelSpace:
    from mlmoe_jax.data.labels.space import LabelSpace, synthetic_label_space

    if isinstance(labels, LabelSpace):
        return labels
    count = labels if isinstance(labels, int) else len(labels)
    if isinstance(labels, str) or count < 1:
        raise UserError(f"labels is {labels!r}; give the names of the labels as a list, or their number")
    space = synthetic_label_space(count, groups)
    return space if isinstance(labels, int) else replace(space, names=tuple(labels))
