"""The model card of a shared model: README.md with metadata that the Hugging Face hub reads.

Names of labels and data sets are escaped, since anybody may have chosen them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.batch import targets
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.evaluation.evaluate import headlines
from mlmoe_jax.evaluation.metrics import multilabel
from mlmoe_jax.evaluation.results import Results, SplitScores
from mlmoe_jax.models.adapters.catalog import adapters_of, described
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.pretrained.hub import Address
from mlmoe_jax.pretrained.web import HUB
from mlmoe_jax.runs.folder import FROZEN, RunFolder
from mlmoe_jax.runs.thresholds import Thresholds
from mlmoe_jax.runtime.text import counted, percent
from mlmoe_jax.runtime.version import __version__

_MOST_LABELS = 1000  # rows of the table
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&!$])")

_CARD = """---
{metadata}
---

# {name}

Multi-label image classification with mlmoe_jax {version}: for each of {labels}, the probability that it applies to an
image. The head is `{head}`{adapters}, on the backbone `{backbone}`. Trained on {images} of {data} at {size} × {size}
pixels.

## Use

```bash
python -m mlmoe_jax.main --mode=predict --workdir={address} --images=photos/
python -m mlmoe_jax.main --mode=serve --workdir={address}
python -m mlmoe_jax.main --config=configs/own_csv.py:root=my_images --init-from={address}
```

```python
import mlmoe_jax as mm

predictor = mm.Predictor.from_run("{address}")
print(predictor("photo.jpg").labels)
```

This repository has the trained values; {frozen}.
Only weights with the fingerprint `{fingerprint}` are accepted.

## Results

In percent, at the threshold {threshold:g} where one is needed{selected}. `results.json` has all metrics.

{results}

## Intended use and limits

It tells which of the labels below apply to a photograph of the kind that it was trained on. A label is assigned if its
probability reaches its threshold; {thresholds}.

- It knows no other labels, and answers for any image, also for one that is unlike its training data.
- Nothing makes its probabilities calibrated; `results.json` has the calibration errors.
- Labels that occur together in training raise one another's scores; `cooccurrence/…` in `results.json` measures this.
- Measure on images of your own before you rely on it, and do not let it alone decide about people.

## Labels

AP is the average precision on {split}, with a dash for labels without positive images there.

{table}
{more}
## License

{license}
"""


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
    model, main = config.model, _main_split(config, results)
    entry = catalog.entry(model.backbone.name)
    published = not (folder / FROZEN).exists()
    where = f"the published weights of the backbone ({entry.address or entry.package or 'part of mlmoe_jax'}) are "
    chosen = f"The trained values are under `{license_name}`." if license_name else "The owner has not chosen one yet."
    fitted = thresholds.source.get("split")
    return _CARD.format(
        metadata=_metadata(address, config, results, main, license_name),
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
        threshold=config.eval.threshold,
        selected="; selected on test, as published" if config.eval.select_on == "test" else "",
        results=_results_table(results),
        thresholds=f"thresholds were fitted on {_plain(fitted)}" if fitted else "thresholds were not fitted",
        split=", ".join([_plain(main), *(counted(len(scores[name]), "image") for name in scores if name == main)]),
        table=_label_table(space, thresholds, scores.get(main), config.data.difficult_eval),
        more=_more(len(space.names)),
        license=f"{chosen} The backbone is not part of this repository"
        f"{f' and is under {_plain(entry.licence)}' if entry.licence else ''}."
        if published
        else f"{chosen} `frozen.safetensors` has weights of the backbone{_of(entry.licence)}.",
    )


def _of(licence: str) -> str:
    return f", which is published under {_plain(licence)}" if licence else ""


def _main_split(config: ConfigDict, results: Results) -> str:
    return next((name for name in config.data.test_splits if name in results), next(iter(results)))


def _metadata(address: Address, config: ConfigDict, results: Results, main: str, license_name: str) -> str:
    """Return the YAML at the top of the card."""
    from huggingface_hub import EvalResult, ModelCardData

    base = HUB.fullmatch(catalog.entry(config.model.backbone.name).address)
    kinds = [config.model.head.kind, *adapters_of(config)]
    data = {"dataset_name": config.data.name, "dataset_type": re.sub(r"[^a-z0-9_-]+", "-", config.data.name.lower())}
    measured = [
        EvalResult(
            task_type="image-classification",
            task_name="Multi-label image classification",
            **data,
            dataset_split=split,
            metric_type=name,
            metric_value=round(100 * metrics[name], 2),
            metric_name=f"{name}, %",
        )
        for split, metrics in results.items()
        for name in headlines(results)
        if split == main and np.isfinite(metrics.get(name, np.nan))
    ]
    metadata = ModelCardData(
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
    return metadata.to_yaml().strip()


def _results_table(results: Results) -> str:
    rows = [
        [_plain(name), *(percent(metrics.get(name, np.nan)) for metrics in results.values())]
        for name in headlines(results)
    ]
    return _table(["metric", *map(_plain, results)], rows)


def _label_table(space: LabelSpace, thresholds: Thresholds, scored: SplitScores | None, difficult: str) -> str:
    """Return the labels with their training images, AP on a split and thresholds as a Markdown table."""
    precision = np.full(len(space.names), np.nan)
    if scored is not None:
        label, mask = targets(scored.codes[scored.read], difficult)
        precision = multilabel.per_class(scored.scores[scored.read], label, mask=mask)["AP"]
    cuts = thresholds.of(space.names)
    rows = [
        [_plain(name), f"{count:,}", percent(ap), f"{cut:.3g}" if np.isfinite(cut) else "never"]
        for name, count, ap, cut in zip(space.names, space.positives, precision, cuts, strict=True)
    ]
    return _table(["label", "training images", "AP, %", "threshold"], rows[:_MOST_LABELS])


def _more(labels: int) -> str:
    return "" if labels <= _MOST_LABELS else f"\n`labels.txt` has all {labels:,} labels.\n"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: object) -> str:
    """Return a text of somebody else that Markdown and HTML show as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split())).replace("\\<", "&lt;").replace("\\>", "&gt;")
