"""Make the model card of a shared model from the template card.md, with metadata for the Hugging Face hub.

Names of labels and data sets are untrusted, so they are escaped.
"""

import re
from pathlib import Path

import numpy as np
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from ml_collections import ConfigDict

from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.report.training import intervals, why_rough
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.evaluation.measure import headlines
from mlmoe_jax.evaluation.metrics import multilabel
from mlmoe_jax.evaluation.results import Results
from mlmoe_jax.models.adapters.catalog import active_adapters, describe_adapters
from mlmoe_jax.models.attributes import assign
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.runs.folder import FROZEN, RunFolder
from mlmoe_jax.runtime.hub import Address
from mlmoe_jax.runtime.text import percent
from mlmoe_jax.runtime.version import __version__

_TEMPLATE = Path(__file__).with_name("card.md")
_MOST_LABELS = 1000  # rows of the table
_LAYOUTS = (
    "csv",
    "jsonl",
    "folders",
    "coco_json",
    "packed",
    "keywords",
    *FORMATS,
)  # data.name of layouts of own images
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&!$])")


def write_card(run: RunFolder, folder: RunFolder, address: Address, license_name: str) -> str:
    """Return the text of the model card of a run, which must have results.

    `folder` has all files of the shared model except the card. `address` is the address of the model on the hub,
    and `license_name` a license identifier of the Hugging Face hub, such as apache-2.0; "" = not chosen.
    """
    files, shared, name = RunFiles(run), RunFiles(folder), address.repository.partition("/")[2]
    config, space = shared.config, shared.label_space
    results = {split: entry.metrics for split, entry in files.results.items()}
    card = ModelCard.from_template(
        _metadata(name, config, results, files.main, license_name),
        template_path=str(_TEMPLATE),
        version=__version__,
        plain=_plain,
        name=name,
        address=address,
        license=license_name,
        config=config,
        adapters=describe_adapters(config),
        weights=catalog.entry(config.model.backbone.name).weights,
        published=not shared.has(FROZEN),
        fingerprint=shared.backbone["fingerprint"],
        space=space,
        data=_data_set(config),
        main=files.main,
        splits=list(results),
        metrics_table=_metrics_table(files, results),
        rough=why_rough(files),
        thresholds=files.thresholds,
        label_table=_label_table(files, space),
        most=_MOST_LABELS,
    )
    return f"{card}\n"


def _data_set(config: ConfigDict) -> str:
    """Return the name of the data set. For a layout of the user's own files, return "a data set of the owner"."""
    return "a data set of the owner" if config.data.name in _LAYOUTS else config.data.name


def _metrics_table(files: RunFiles, results: Results) -> list[list[str]]:
    """Return one row per metric: its name, and its value in percent on each split.

    The value on the main split is followed by its 95 % interval.
    """
    ends = intervals(files)

    def cell(split: str, name: str) -> str:
        value = percent(results[split].get(name))
        if split != files.main or name not in ends:
            return value
        return f"{value} ({' to '.join(percent(end, 1) for end in ends[name])})"

    return [[_plain(name), *(cell(split, name) for split in results)] for name in headlines(results)]


def _metadata(name: str, config: ConfigDict, results: Results, main: str, license_name: str) -> ModelCardData:
    kinds = [config.model.head.kind, *active_adapters(config)]
    measured = [
        EvalResult(
            task_type="image-classification",
            task_name="Multi-label image classification",
            dataset_name=_data_set(config),
            dataset_type=re.sub(r"[^a-z0-9_-]+", "-", config.data.name.lower()),
            dataset_split=main,
            metric_type=metric,
            metric_value=round(100 * results[main][metric], 2),
            metric_name=f"{metric}, %",
        )
        for metric in headlines(results)
        if np.isfinite(results[main].get(metric, np.nan))
    ]
    return ModelCardData(
        license=license_name or "other",
        license_name=None if license_name else "not-chosen",
        library_name="mlmoe_jax",
        pipeline_tag="image-classification",
        base_model=catalog.entry(config.model.backbone.name).repository,
        tags=["mlmoe_jax", "jax", "flax", "multi-label", *kinds, config.model.backbone.name],
        metrics=headlines(results),
        model_name=name,
        eval_results=measured or None,
    )


def _label_table(files: RunFiles, space: LabelSpace) -> list[list[str]]:
    """Return the rows of the table of labels.

    The cells are the name, the number of training images with the label, the AP on the main split, the threshold, and
    the recall at the threshold. AP and recall are in percent.
    """
    ap = recall = np.full(len(space.names), np.nan)
    limits = files.thresholds.limits(space.names)
    if files.corrected:
        entries = files.corrected.entries(files.config.data.difficult_eval)
        positive = entries.positive & entries.valid
        ap = entries.per_class["AP"]
        assigned = assign(entries.scores, limits, space.tree.attributes)
        recall = multilabel.ratio((positive & assigned).sum(axis=0), positive.sum(axis=0))
    columns = zip(space.names, space.positives, ap, limits, recall, strict=True)
    return [
        [_plain(name), f"{count:,}", percent(ap), f"{limit:.3g}" if np.isfinite(limit) else "never", percent(share)]
        for name, count, ap, limit, share in columns
    ]


def _plain(text: object) -> str:
    """Return an untrusted text as one line, with the special characters of Markdown and HTML escaped."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split())).replace("\\<", "&lt;").replace("\\>", "&gt;")
