"""The model card of a shared model: card.md, filled in, with metadata that the Hugging Face hub reads.

Names of labels and data sets are escaped, since anybody may have chosen them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from ml_collections import ConfigDict

from mlmoe_jax.data.batch import targets
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.evaluation.evaluate import headlines
from mlmoe_jax.evaluation.metrics import multilabel
from mlmoe_jax.evaluation.results import Results, SplitScores
from mlmoe_jax.models.adapters.catalog import adapters_of, described
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.pretrained.hub import FILE, Address
from mlmoe_jax.runs.folder import FROZEN, RunFolder
from mlmoe_jax.runs.thresholds import Thresholds
from mlmoe_jax.runtime.text import counted, percent
from mlmoe_jax.runtime.version import __version__

_TEMPLATE = Path(__file__).with_name("card.md")
_MOST_LABELS = 1000  # rows of the table
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&!$])")


def write_card(
    folder: RunFolder,
    address: Address,
    config: ConfigDict,
    space: LabelSpace,
    *,
    results: Results,
    scores: Mapping[str, SplitScores],
    thresholds: Thresholds,
    license_name: str = "",
) -> str:
    """Return the text of the model card of a shared model, whose other files are in `folder`.

    results, scores: of the run. thresholds: by label. license_name: an identifier of the hub; "" = none was chosen.
    """
    model = config.model
    main = next((name for name in config.data.test_splits if name in results), next(iter(results)))
    entry, fitted, published = (
        catalog.entry(model.backbone.name),
        thresholds.source.get("split"),
        not (folder / FROZEN).exists(),
    )
    where = f"the published weights of the backbone ({entry.address or entry.package or 'part of mlmoe_jax'}) are "
    card = ModelCard.from_template(
        _metadata(address, config, results, main, license_name),
        template_path=str(_TEMPLATE),
        name=_plain(address.repository.partition("/")[2]),
        version=__version__,
        labels=counted(len(space.names), "label"),
        head=model.head.kind,
        adapters=f" with {described(config)}" if described(config) else "",
        backbone=model.backbone.name,
        data=_plain(config.data.name),
        images=counted(space.images, "image"),
        size=config.data.image_size,
        address=address,
        frozen=f"{where}found or downloaded on first use" if published else "frozen.safetensors has the frozen weights",
        fingerprint=folder.read_json("backbone.json")["fingerprint"],
        threshold=f"{config.eval.threshold:g}",
        selected="; selected on test, as published" if config.eval.select_on == "test" else "",
        splits=[_plain(split) for split in results],
        metrics_table=[
            [_plain(name), *(percent(metrics.get(name, np.nan)) for metrics in results.values())]
            for name in headlines(results)
        ],
        thresholds=f"thresholds were fitted on {_plain(fitted)}" if fitted else "thresholds were not fitted",
        main=", ".join([_plain(main), *([counted(len(scores[main]), "image")] if main in scores else [])]),
        label_table=_label_table(space, thresholds, scores.get(main), config.data.difficult_eval),
        more="" if len(space.names) <= _MOST_LABELS else f"\n`labels.txt` has all {len(space.names):,} labels.\n",
        terms=_terms(license_name, _plain(entry.licence), published),
    )
    return f"{card}\n"


def _metadata(address: Address, config: ConfigDict, results: Results, main: str, license_name: str) -> ModelCardData:
    base = FILE.fullmatch(catalog.entry(config.model.backbone.name).address)
    kinds = [config.model.head.kind, *adapters_of(config)]
    measured = [
        EvalResult(
            task_type="image-classification",
            task_name="Multi-label image classification",
            dataset_name=config.data.name,
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


def _terms(license_name: str, licence: str, published: bool) -> str:
    """Return the license of the trained values, and the license of the backbone (if known)."""
    chosen = f"The trained values are under `{license_name}`." if license_name else "The owner has not chosen one yet."
    if published:
        return f"{chosen} The backbone is not part of this repository{f' and is under {licence}' if licence else ''}."
    of = f", which is published under {licence}" if licence else ""
    return f"{chosen} `frozen.safetensors` has weights of the backbone{of}."


def _label_table(
    space: LabelSpace, thresholds: Thresholds, scored: SplitScores | None, difficult: str
) -> list[list[str]]:
    """Return the labels with their training images, AP on a split, and thresholds."""
    precision = np.full(len(space.names), np.nan)
    if scored is not None:
        label, mask = targets(scored.codes[scored.read], difficult)
        precision = multilabel.per_class(scored.scores[scored.read], label, mask=mask)["AP"]
    columns = zip(space.names, space.positives, precision, thresholds.of(space.names), strict=True)
    rows = [
        [_plain(name), f"{count:,}", percent(ap), f"{cut:.3g}" if np.isfinite(cut) else "never"]
        for name, count, ap, cut in columns
    ]
    return rows[:_MOST_LABELS]


def _plain(text: object) -> str:
    """Return a text of somebody else that Markdown and HTML show as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split())).replace("\\<", "&lt;").replace("\\>", "&gt;")
