"""Labels of the images of a table, batch by batch, also in the workers of Ray Data and Spark."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from helpers.color_model import HALVES, NAMES, color, expected, make_run
from helpers.drawn_images import encoded
from helpers.paths import REPOSITORY
from helpers.refusals import Refusal, each

import mlmoe_jax as mm
from mlmoe_jax.inference import batch_labeler
from mlmoe_jax.inference.predictor import Predictor

COLORS = [(255, 0, 0), (0, 160, 0), (0, 0, 140), (10, 20, 30), (200, 200, 0)]
SCORES = np.array([expected(*rgb) for rgb in COLORS])
LABELS = [[name for name, score in zip(NAMES, scores, strict=True) if score >= 0.5] for scores in SCORES]
CONTENTS = [encoded(color(*rgb)) for rgb in COLORS]
BROKEN = b"no image"


@pytest.fixture
def opened(monkeypatch) -> list[tuple]:
    """The arguments with which runs are opened: each is the model of colors, which is not trained if it is "ranked"."""
    calls = []

    def from_run(workdir, overrides):
        calls.append((workdir, overrides))
        return Predictor(make_run(), HALVES, ranked=workdir == "ranked")

    monkeypatch.setattr(Predictor, "from_run", from_run)
    return calls


def test_a_process_holds_one_model(opened):
    for workdir in ("first", "second", "first"):
        labeler = mm.BatchLabeler(workdir)
        labeler({"image": CONTENTS[:1]})
        assert [*batch_labeler._opened] == [labeler.identity]
    assert len(opened) == 3


def test_every_kind_of_cell_is_an_image_and_every_broken_one_a_row_with_its_reason(opened, tmp_path):
    path = str(tmp_path / "0.png")
    Path(path).write_bytes(CONTENTS[0])
    cells = [path, CONTENTS[1], {"bytes": CONTENTS[2]}, color(*COLORS[3]), {"bytes": CONTENTS[4], "path": "4.png"}]
    bad = [
        BROKEN,
        str(tmp_path / "none.png"),
        None,
        float("nan"),
        {"bytes": None, "path": None},
        7,
        {"bytes": BROKEN, "path": "x"},
    ]
    batch = mm.BatchLabeler("run")({"image": [*cells, {"bytes": None, "path": path}, *bad], "id": list(range(13))})
    assert list(batch) == ["image", "id", "labels", "error", "scores"]
    assert batch["image"].tolist() == [path, None, None, None, "4.png", path, None, bad[1], None, None, None, None, "x"]
    assert batch["labels"].tolist() == [*LABELS, LABELS[0], *[[]] * 7]
    scores = np.array(batch["scores"].tolist())
    np.testing.assert_allclose(scores[:6], [*SCORES, SCORES[0]], rtol=1e-4)
    assert np.isnan(scores[6:]).all()
    assert batch["error"][:6].tolist() == [""] * 6
    said = ["read the cell as", bad[1], "the cell is a NoneType", "a float", "a NoneType", "a int", "cannot read x"]
    assert all(part in error for part, error in zip(said, batch["error"][6:], strict=True))
    assert batch["id"] == list(range(13))


@pytest.mark.parametrize("kind", [pyarrow.table, pyarrow.record_batch])
def test_a_table_of_arrow_has_the_types_of_its_columns_also_without_a_readable_image(opened, kind):
    labeler = mm.BatchLabeler("run", top_k=1)
    for contents in (CONTENTS, [BROKEN], []):
        table = labeler(kind({"id": [[1]] * len(contents), "image": pyarrow.array(contents, pyarrow.binary())}))
        assert isinstance(table, type(kind({"a": [1]})))
        assert table.column_names == ["id", "image", "labels", "error", "scores"]
        text = pyarrow.string()
        types = [text, pyarrow.list_(text), text, pyarrow.list_(pyarrow.float64())]
        assert table.schema.types[1:] == types
        rows = table.to_pylist()
        if contents == CONTENTS:
            assert [row["labels"] for row in rows] == [[NAMES[k]] for k in SCORES.argmax(axis=1)]
            assert [row["scores"] for row in rows] == labeler({"image": contents})["scores"].tolist()
        elif contents:
            assert (rows[0]["labels"], rows[0]["image"], len(rows[0]["scores"])) == ([], None, 4)


def test_batches_of_any_size_are_computed_by_one_program(opened):
    labeler = mm.BatchLabeler("run", batch_size=8)
    whole = labeler({"image": CONTENTS * 4})
    for rows in (1, 3, 9):
        part = labeler({"image": (CONTENTS * 4)[:rows]})
        assert part["scores"].tolist() == whole["scores"].tolist()[:rows]
    assert labeler.predictor._steps[False]._cache_size() == 1
    assert labeler({"image": []})["scores"].tolist() == []


def test_copies_share_the_model_of_a_process_and_a_further_labeler_opens_its_own(opened):
    labeler = mm.BatchLabeler("run", overrides={"eval.threshold": 0.3}, scores=False)
    assert opened == []
    labeler({"image": CONTENTS})
    pickled = pickle.dumps(labeler)
    assert len(pickled) < 1000
    for _ in range(2):
        assert list(pickle.loads(pickled)({"image": CONTENTS})) == ["image", "labels", "error"]
    assert opened == [("run", {"eval.threshold": 0.3})]
    mm.BatchLabeler("run", overrides={"eval.threshold": 0.3})({"image": CONTENTS})
    assert len(opened) == 2, "the folder may have another model by now"


def test_the_schema_of_spark_has_every_column():
    labeler = mm.BatchLabeler("run", column="a`b")
    schema = labeler.spark_schema([("id", "bigint"), ("a`b", "struct<bytes:binary,path:string>")])
    added = "`labels` ARRAY<STRING>, `error` STRING, `scores` ARRAY<DOUBLE>"
    assert schema == f"`id` bigint, `a``b` STRING, {added}"


def test_the_process_that_distributes_batches_needs_no_jax():
    code = "import sys, pickle, mlmoe_jax as mm; pickle.dumps(mm.BatchLabeler('run')); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


REFUSALS = [
    Refusal(name, None, call, *says)
    for name, call, *says in [
        (
            "no column",
            lambda at: mm.BatchLabeler("run")({"img": [], "id": []}),
            "'image'",
            "only img, id; give column=NAME",
        ),
        ("a taken name", lambda at: mm.BatchLabeler("run")({"image": [], "labels": []}), "'labels'", "rename it"),
        ("no column in Spark", lambda at: mm.BatchLabeler("run").spark_schema([("a", "int")]), "'image'", "only a;"),
        ("ranks", lambda at: mm.BatchLabeler("ranked")({"image": CONTENTS}), "ranked is not trained", "eval.threshold"),
        ("too many labels", lambda at: mm.BatchLabeler("run", top_k=9)({"image": CONTENTS}), "top_k is 9"),
    ]
]


@each(REFUSALS)
def test_refusals_of_batches(case, tmp_path, opened):
    case.check(tmp_path)
