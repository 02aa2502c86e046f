"""The rows of predictions in a CSV, JSON lines or Parquet file, for one file and for each part of a corpus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from etils import epath

from mlmoe_jax.apps.tools.part_files import plain
from mlmoe_jax.apps.tools.select_images import SELECTION_COLUMNS
from mlmoe_jax.data.containers.video import Moment, find_moment
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.predictor import LabeledImage, Predictor, weights_by_label
from mlmoe_jax.runtime.formats import join_names, row_writer
from mlmoe_jax.runtime.storage import OutputTarget, atomic_file, open_output

MOST_COLUMNS = 30  # in a message


@dataclass(frozen=True)
class ResultRows:
    """The format of the rows of predictions in a CSV, JSON lines or Parquet file.

    The columns of a CSV file are image, labels (the assigned labels, see `formats.join_names`), error, and one column
    of scores per label. With `top_k`, the columns are image, error, label_1, score_1, label_2, score_2, …, by
    decreasing score. A JSON line has the keys image and error for an unreadable image, and otherwise image, labels,
    scores (label -> probability) and, if requested, gates (gate -> label -> weights). With `top_k`, labels and scores
    have only the `top_k` labels with the highest scores, by decreasing score. Parquet has the columns of CSV, in which
    labels are a list, and error, labels and scores are null if there are none. With `top_k`, scores are a list too.

    If labels are ranked (`beside` is rank), a CSV file has one more column per label, such as "rank sea". With `top_k`,
    the columns of the labels are label_1, score_1, rank_1, …. A JSON line also has the key ranks (label -> rank).
    Labels are then in the order of the ranks. For one row per video, `beside` is time. With a selection (path of an
    image -> its values of SELECTION_COLUMNS), SELECTION_COLUMNS are columns or keys after image. If there are frames
    `of_videos`, so are video and time, which are empty for other images; and so is the value of each of `attributes`.
    A file of parts has neither.
    """

    names: Sequence[str]
    top_k: int | None = None
    selection: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    beside: str = ""
    of_videos: bool = False
    attributes: Sequence[str] = ()

    @classmethod
    def of(cls, predictor: Predictor, *options: Any, **named: Any) -> ResultRows:
        """Return the format for the labels and attributes of a predictor. The options are those after `names`."""
        return cls(predictor.names, *options, attributes=[item.name for item in predictor.tree.attributes], **named)

    def write(self, target: OutputTarget, results: Iterable[LabeledImage]) -> None:
        """Write one row per result. UserError if a label has the name of another column."""
        self.require_columns(target.kind)
        if target.kind == "parquet":
            self._write_parquet(target, results)
            return
        with open_output(target) as file:
            if target.kind == "jsonl":
                for result in results:
                    print(json.dumps(self.document(result), allow_nan=False), file=file)
            else:
                write_row = row_writer(file)
                write_row(self.heading())
                for result in results:
                    write_row(self.cells(result))

    def write_part(self, path: epath.Path, results: Iterable[LabeledImage]) -> None:
        """Write the file of a part atomically. Its suffix is one of PART_FORMATS."""
        self.write(OutputTarget(path, path.suffix[1:]), results)

    def require_columns(self, kind: str) -> None:
        """Raise UserError if a label has the name of another column of a file of this kind."""
        heading = self.heading()
        if kind != "jsonl" and len(set(heading)) < len(heading):
            shown = ", ".join(heading[:MOST_COLUMNS]) + ", …" * (len(heading) > MOST_COLUMNS)
            raise UserError(
                f"a label has the name of another column of the {kind.upper()} ({shown}); write JSON lines, with "
                "--output=….jsonl or --format=jsonl, or use --top-k"
            )

    def place(self, result: LabeledImage) -> dict[str, Any]:
        """Return the image of a result, and its values in the columns that follow."""
        place: dict[str, Any] = {"image": result.image}
        if self.of_videos:
            moment = find_moment(result.image) or Moment(None, None)
            place |= moment._asdict()
        values = {name: result.attributes.get(name, "") for name in self.attributes}
        return {**place, **self.selection.get(result.image, {}), **values}

    # ----------------------------------------------------------------------------------------------------------- CSV
    def heading(self) -> list[str]:
        """Return the column names of a CSV file."""
        moment, chosen = Moment._fields if self.of_videos else (), SELECTION_COLUMNS if self.selection else ()
        image = ["image", *moment, *chosen, *self.attributes]
        if self.top_k is None:
            beside = [f"{self.beside} {name}" for name in self.names if self.beside]
            return [*image, "labels", "error", *self.names, *beside]
        columns = ("label", "score", *filter(None, [self.beside]))
        return [*image, "error", *(f"{column}_{place}" for place in range(1, self.top_k + 1) for column in columns)]

    def cells(self, result: LabeledImage) -> list[Any]:
        """Return the cells of a result in a CSV file."""
        image, tables = self.place(result).values(), self._tables(result)
        if self.top_k is None:
            cells = [table.get(name, "") for table in tables for name in self.names]
            return [*image, join_names(result.labels), result.error, *cells]
        best = [cell for name in result.labels for cell in (name, *(table.get(name, "") for table in tables))]
        return [*image, result.error, *(best or [""] * self.top_k * (1 + len(tables)))]

    def _tables(self, result: LabeledImage) -> list[dict[str, Any]]:
        """Return label -> score and, if there are numbers beside the scores, label -> such a number, as in CSV.

        A score has six decimal places, or six significant digits if it may be far below 0.000001.
        """
        digits = ".6g" if self.beside == "rank" else ".6f"
        tables: list[dict[str, Any]] = [{name: f"{value:{digits}}" for name, value in (result.scores or {}).items()}]
        if self.beside:
            tables.append({name: round(value, 3) for name, value in (result.ranks or result.times or {}).items()})
        return tables

    # ---------------------------------------------------------------------------------------------------- JSON lines
    def document(self, result: LabeledImage) -> dict[str, Any]:
        """Return the JSON object of a result in a JSON lines file."""
        place = self.place(result)
        if result.error:
            place["error"] = result.error
        if result.scores is None:
            return place
        scores, beside = result.scores, result.ranks or result.times or {}
        if self.top_k is not None:
            scores, beside = ({name: table[name] for name in result.labels if table} for table in (scores, beside))
        row = {**place, "labels": result.labels, "scores": scores}
        if beside:
            row[f"{self.beside}s"] = beside
        if result.gates is not None:
            row["gates"] = {gate: weights_by_label(self.names, weights) for gate, weights in result.gates.items()}
        return row

    # ------------------------------------------------------------------------------------------------------- Parquet
    def _write_parquet(self, target: OutputTarget, results: Iterable[LabeledImage]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        texts, scores = [], []
        for result in results:  # which take much more memory than their scores
            texts.append(self._texts(result))
            scores.append(self._scores(result))
        columns = {name: pa.array([text[name] for text in texts], kind) for name, kind in self._kinds().items()}
        if self.top_k is None:
            unread = np.array([text["error"] is not None for text in texts])
            by_name = zip(self.names, np.stack(scores, 1), strict=True)
            columns |= {name: pa.array(values, mask=unread) for name, values in by_name}
        else:
            columns["scores"] = pa.array(scores, pa.list_(pa.float32()))
        with atomic_file(target.path) as file:
            parquet.write_table(pa.table(columns), str(file), use_dictionary=["labels.list.element", "error"])

    def _kinds(self) -> dict[str, Any]:
        """Return name -> type of the columns without scores."""
        import pyarrow as pa

        text = pa.string()
        kinds = {"image": text, "labels": pa.list_(text), "error": text}
        if self.of_videos:
            kinds |= {"video": text, "time": pa.float64()}
        return kinds | dict.fromkeys(self.attributes, text)

    def _texts(self, result: LabeledImage) -> dict[str, Any]:
        labels = None if result.error else result.labels
        place = {name: plain(value) for name, value in self.place(result).items()}
        return {**place, "labels": labels, "error": plain(result.error) or None}

    def _scores(self, result: LabeledImage) -> np.ndarray | None:
        """Return the scores f32[K] of a result, zeros if it has none; with `top_k` only for its labels, or None."""
        if self.top_k is None:
            values = (result.scores or dict.fromkeys(self.names, 0.0)).values()
        elif result.error:
            return None
        else:
            values = map(result.scores.__getitem__, result.labels)
        return np.fromiter(values, np.float32)
