"""`mlmoe predict --output=FOLDER/`: label a corpus in parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np

from mlmoe_jax.apps.tools.part_options import PartOptions
from mlmoe_jax.apps.tools.parts import PartSource, digest, write_parts
from mlmoe_jax.apps.tools.predict_files import describe_labels
from mlmoe_jax.apps.tools.result_rows import ResultRows
from mlmoe_jax.config.table import KEYS, keys_read
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.images import Images
from mlmoe_jax.errors import UserError, success
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.models.params import fingerprint
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.runtime.version import __version__


def label_parts(
    open_predictor: Callable[[], Predictor],
    options: PartOptions,
    *,
    batch_size: int | None = None,
    top_k: int | None = None,
    gates: bool = False,
) -> Outcome:
    """Label images, and write their rows to a folder of parts, see `write_parts`.

    The keyword arguments are as in `predict_files`. Raises UserError if they do not fit together, or the labels depend
    on all images.
    """

    def open_source(images: Images) -> PartSource:
        predictor = open_predictor()
        rows = ResultRows.of(predictor, top_k, of_videos=images.of_videos)
        _require_possible(predictor, rows, options.kind, gates=gates)
        return PartSource(
            "predict",
            "labeled",
            describe_settings(predictor, top_k, gates),
            Decoding.from_config(predictor.run.config.data),
            partial(predictor.even_batch, most=batch_size),
            partial(predictor.label_rows, top_k=top_k, gates=gates),
            rows.write_part,
            describe_labels,
            success(predictor.run.outdated),
        )

    return write_parts(open_source, options)


def _require_possible(predictor: Predictor, rows: ResultRows, kind: str, *, gates: bool) -> None:
    if predictor.ranked:
        raise UserError(
            "an untrained model compares all images to assign labels, which parts cannot; set a threshold, as with "
            "--config.eval.threshold=0.1, or write one file, --output=FILE.csv"
        )
    predictor.check_options(rows.top_k, gates)
    if gates and kind != "jsonl":
        raise UserError("--gates needs JSON lines; add --format=jsonl")
    rows.require_columns(kind)


def describe_settings(predictor: Predictor, top_k: int | None, gates: bool) -> dict[str, Any]:
    """Return what the rows depend on beside the images, as JSON. With equal settings, equal devices give equal rows."""
    run = predictor.run
    calibration, preprocess = run.scores.calibration, run.preprocess
    keys = [key for stage in ("image", "score") for key in keys_read(stage) if KEYS[key].on_resume != "free"]
    return {
        "version": __version__,
        "weights": fingerprint({**run.values, **run.frozen}),
        "model": digest([run.config.model.to_json()]),
        "preprocessing": [preprocess.image_size, *map(float, (*preprocess.mean, *preprocess.std))],
        "label names": list(predictor.names),
        "--rename and --leave-out": digest(map(str, predictor.output.sources)),
        "thresholds": digest(map(str, predictor.thresholds)),
        "calibration": digest(map(str, np.ravel([calibration.scale, calibration.offset]))),
        "--top-k": top_k,
        "--gates": gates,
        **{key: reduce(getattr, key.split("."), run.config) for key in keys},
    }
