"""The model card of a shared model: card.md, filled in, with metadata that the Hugging Face hub reads.

Names of labels and data sets are untrusted, so they are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from ml_collections import ConfigDict

from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.report.training import intervals, why_rough
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.evaluation.measure import headlines
from mlmoe_jax.evaluation.metrics import multilabel
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, Results, SplitScores, read_results
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.registries import active_adapters, describe_adapters
from mlmoe_jax.pretrained.hub import FILE, Address
from mlmoe_jax.runs.folder import FROZEN, RunFolder
from mlmoe_jax.runs.thresholds import Thresholds
from mlmoe_jax.runtime.text import percent, quantity
from mlmoe_jax.runtime.version import __version__

_TEMPLATE = Path(__file__).with_name("card.md")
_MOST_LABELS = 1000  # rows of the table
_LAYOUTS = ("csv", "jsonl", "folders", "coco_json", "packed", *FORMATS)  # data.name of layouts of own images
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&!$])")


def write_card(
    run: RunFolder, folder: RunFolder, address: Address, config: ConfigDict, space: LabelSpace, license_name: str = ""
) -> str:
    """Return the text of the model card of a run with results.

    Args:
      run: the run folder.
      folder: the folder with the further shared files.
      address: the address of the model on the hub.
      config: the shared config.
      space: the labels.
      license_name: an identifier of the hub; "" = not chosen.
    """
    files, results = RunFiles(run), read_results(run)
    card = ModelCard.from_template(
        _metadata(address, config, results, files.main_split.name, license_name),
        template_path=str(_TEMPLATE),
        version=__version__,
        name=_plain(address.repository.partition("/")[2]),
        address=address,
        license=license_name,
        published=not (folder / FROZEN).exists(),
        fingerprint=folder.read_json("backbone.json")["fingerprint"],
        **_describe_model(config, space),
        **_describe_results(files, results, config, space),
    )
    return f"{card}\n"


def _describe_model(config: ConfigDict, space: LabelSpace) -> dict[str, Any]:
    """Return the fields of the card about the model and its training data."""
    backbone = catalog.entry(config.model.backbone.name)
    return {
        "labels": quantity(len(space.names), "label"),
        "head": config.model.head.kind,
        "adapters": describe_adapters(config),
        "backbone": config.model.backbone.name,
        "source": backbone.address or backbone.package or "part of mlmoe_jax",
        "backbone_license": _plain(backbone.license),
        "data": _plain(_data_set(config)),
        "images": quantity(space.images, "image"),
        "size": config.data.image_size,
    }


def _describe_results(files: RunFiles, results: Results, config: ConfigDict, space: LabelSpace) -> dict[str, Any]:
    """Return the fields of the card about the results, thresholds and calibration."""
    main, scored, (_, ends) = files.main_split.name, files.scored, intervals(files)
    label_table = _label_table(space, files.thresholds, files.corrected, config.data.difficult_eval)
    return {
        "threshold": f"{config.eval.threshold:g}",
        "out_of_fold": OUT_OF_FOLD in results,
        "on_test": config.eval.select_on == "test",
        "splits": [_plain(split) for split in results],
        "metrics_table": _metrics_table(results, main, ends),
        "ranges": bool(ends),
        "rough": _plain(why_rough(files)),
        "fitted": _plain(files.thresholds.source.get("split", "")),
        "calibrated": _plain(files.thresholds.calibration.get("split", "")),
        "main": _plain(main) if scored is None else f"{_plain(main)}, {quantity(len(scored), 'image')}",
        "label_table": label_table[:_MOST_LABELS],
        "more": len(space.names) > _MOST_LABELS,
    }


def _data_set(config: ConfigDict) -> str:
    """Return the name of the data set. A layout of own files has none."""
    return "a data set of the owner" if config.data.name in _LAYOUTS else config.data.name


def _metrics_table(results: Results, main: str, ends: Mapping[str, tuple[float, float]]) -> list[list[str]]:
    """Return the main metrics of each split in percent, for the main split with intervals."""

    def cell(split: str, name: str) -> str:
        value = percent(results[split].get(name, np.nan))
        interval = " to ".join(percent(end, 1) for end in ends.get(name, ())) if split == main else ""
        return f"{value} ({interval})" if interval else value

    return [[_plain(name), *(cell(split, name) for split in results)] for name in headlines(results)]


def _metadata(address: Address, config: ConfigDict, results: Results, main: str, license_name: str) -> ModelCardData:
    base = FILE.fullmatch(catalog.entry(config.model.backbone.name).address)
    kinds = [config.model.head.kind, *active_adapters(config)]
    measured = [
        EvalResult(
            task_type="image-classification",
            task_name="Multi-label image classification",
            dataset_name=_data_set(config),
            dataset_type=re.sub(r"[^a-z0-9_-]+", "-", config.data.name.lower()),
            dataset_split=main,
            metric_type=name,
            metric_value=round(100 * results[main][name], 2),
            metric_name=f"{name}, %",
        )
        for name in headlines(results)
        if np.isfinite(results[main].get(name, np.nan))
    ]
    return ModelCardData(
        license=license_name or "other",
        license_name=None if license_name else "not-chosen",
        library_name="mlmoe_jax",
        pipeline_tag="image-classification",
        base_model=base["repo"] if base else None,
        tags=["mlmoe_jax", "jax", "flax", "multi-label", *kinds, config.model.backbone.name],
        metrics=headlines(results),
        model_name=address.repository.partition("/")[2],
        eval_results=measured or None,
    )


def _label_table(
    space: LabelSpace, thresholds: Thresholds, scored: SplitScores | None, difficult: str
) -> list[list[str]]:
    """Return the labels with their training images, AP on a split, thresholds, and recall at the thresholds."""
    ap = recall = np.full(len(space.names), np.nan)
    limits = thresholds.limits(space.names)
    if scored is not None:
        entries = scored.entries(difficult)
        positive = entries.positive & entries.valid
        ap = entries.per_class["AP"]
        recall = multilabel.ratio((positive & (scored.scores >= limits)).sum(axis=0), positive.sum(axis=0))
    columns = zip(space.names, space.positives, ap, limits, recall, strict=True)
    return [
        [_plain(name), f"{count:,}", percent(ap), f"{limit:.3g}" if np.isfinite(limit) else "never", percent(share)]
        for name, count, ap, limit, share in columns
    ]


def _plain(text: object) -> str:
    """Return an untrusted text on one line, escaped for Markdown and HTML."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split())).replace("\\<", "&lt;").replace("\\>", "&gt;")
