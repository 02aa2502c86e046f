"""The files of a corpus that is labeled in parts: one table for each part, as Parquet, CSV or JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from etils import epath

from mlmoe_jax.apps.tools.predict_files import ResultRows
from mlmoe_jax.inference.predictor import LabeledImage
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.formats import unescape_cell
from mlmoe_jax.runtime.storage import OutputTarget, atomic_file


def write_part(rows: ResultRows, path: epath.Path, results: Iterable[LabeledImage]) -> None:
    """Write the file of a part atomically. Its suffix is one of PART_FORMATS."""
    kind = path.suffix[1:]
    if kind != "parquet":
        rows.write(OutputTarget(path, kind), results)
        return
    with atomic_file(path) as partial:
        _write_parquet(str(partial), rows, results)


def _write_parquet(path: str, rows: ResultRows, results: Iterable[LabeledImage]) -> None:
    """Write a table with the columns image, labels (a list), error (null if the image was read), and a float per label.

    With `rows.of_videos`, video and time are columns too. With `rows.top_k`, scores is one column, with a list like
    labels. The labels and scores of an unreadable image are null.
    """
    import pyarrow as pa
    from pyarrow import parquet

    texts, scores = [], []
    for result in results:
        labels = None if result.error else result.labels
        place = {name: plain(value) if isinstance(value, str) else value for name, value in rows.place(result).items()}
        texts.append({**place, "labels": labels, "error": plain(result.error) or None})
        scores.append(_scores(result, rows))
    kinds = {"image": pa.string(), "labels": pa.list_(pa.string()), "error": pa.string()}
    if rows.of_videos:
        kinds |= {"video": pa.string(), "time": pa.float64()}
    kinds |= dict.fromkeys(rows.attributes, pa.string())
    columns = {name: pa.array([text[name] for text in texts], kind) for name, kind in kinds.items()}
    if rows.top_k is None:
        unread = np.array([text["error"] is not None for text in texts])
        columns |= {
            name: pa.array(values, mask=unread) for name, values in zip(rows.names, np.stack(scores, 1), strict=True)
        }
    else:
        columns["scores"] = pa.array(scores, pa.list_(pa.float32()))
    parquet.write_table(pa.table(columns), path, use_dictionary=["labels.list.element", "error"])


def _scores(result: LabeledImage, rows: ResultRows) -> np.ndarray | None:
    """Return the scores f32[K] of a result, zeros if it has none; with `rows.top_k` only for its labels, or None."""
    if rows.top_k is None:
        values = (result.scores or dict.fromkeys(rows.names, 0.0)).values()
    elif result.error:
        return None
    else:
        values = map(result.scores.__getitem__, result.labels)
    return np.fromiter(values, np.float32)


def plain(name: str) -> str:
    r"""Return a name as it is in Parquet, which is UTF-8: bytes of a path that are not are escaped, as in \udcff."""
    return name.encode(errors="backslashreplace").decode()


def read_names(path: epath.Path) -> list[str]:
    """Return the names of the images in the file of a part, in `plain` text; UserError if it is damaged."""
    with damage_explained(path):
        return list(map(plain, _read_names(path)))


def _read_names(path: epath.Path) -> Iterator[str]:
    with path.open("rb") as file:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            yield from parquet.read_table(file, columns=["image"]).column(0).to_pylist()
            return
        lines = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        if path.suffix == ".csv":
            yield from (unescape_cell(row[0]) for row in islice(csv.reader(lines, strict=True), 1, None))
        else:
            decode = json.JSONDecoder().raw_decode
            yield from (decode(line, line.index(":") + 2)[0] for line in lines)
