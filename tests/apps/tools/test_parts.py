"""A corpus that is labeled in parts, with a model whose logits are known."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest
from helpers.color_model import HALVES, NAMES, color, make_run
from helpers.refusals import CUT, Refusal, contents, damaged, each, run_command
from PIL import Image
from pyarrow import parquet

from mlmoe_jax.apps.tools import parts
from mlmoe_jax.apps.tools.part_files import read_names
from mlmoe_jax.apps.tools.part_options import PART_FORMATS, wants_parts
from mlmoe_jax.apps.tools.parts import RECORD, PartFolder, PartRows, label_parts
from mlmoe_jax.apps.tools.predict_files import choose_target, predict_files
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.storage import Folder

BAD = 5  # the row of an image that cannot be read


def write_photos(at: Path, count: int = 11) -> Path:
    (at / "photos").mkdir()
    for row in range(count):
        Image.fromarray(color(20 * row, 110)).save(at / f"photos/{row:02d}.png")
    (at / f"photos/{BAD:02d}.png").write_text("not an image")
    return at / "photos"


def label(at: Path, kind: str = "parquet", *, images: int | None = None, run=None, halves=HALVES, **options):
    """Label the first images of `photos` into `labels`, in parts of 4 images."""
    names = sorted(str(path) for path in (at / "photos").iterdir())[:images]
    predictor = Predictor(run or make_run(), halves)
    options = {"size": 4, "batch_size": 2, **options}
    return label_parts(lambda: predictor, names, str(at / "labels"), kind, **options)


@pytest.fixture
def at(tmp_path):
    write_photos(tmp_path)
    return tmp_path


def rows_of(folder: Path) -> list[dict]:
    table = pyarrow.dataset.dataset(str(folder), format="parquet").to_table()
    return table.to_pylist()


# -------------------------------------------------------------------------------------------------------------- output
def single(at: Path, name: str, **options) -> str:
    """Return the content of the file that `mlmoe predict` writes without parts."""
    target = choose_target(str(at / name), RunFolder(at))
    names = sorted(str(path) for path in (at / "photos").iterdir())
    predict_files(lambda: Predictor(make_run(), HALVES), names, target, batch_size=2, **options)
    return (at / name).read_text()


@pytest.mark.parametrize("top_k", [None, 2])
def test_parts_have_the_rows_of_one_file(at, top_k):
    for kind in ("csv", "jsonl"):
        outcome = label(at, kind, top_k=top_k)
        files = sorted((at / "labels").glob(f"part-*.{kind}"))
        assert [file.name for file in files] == [f"part-{number:05d}.{kind}" for number in range(3)]
        texts = [file.read_text() for file in files]
        heading = texts[0].partition("\n")[0] + "\n" if kind == "csv" else ""
        assert heading + "".join(text.removeprefix(heading) for text in texts) == single(at, f"one.{kind}", top_k=top_k)
        assert (outcome.exit_code, outcome.document["unreadable"], outcome.document["parts"]) == (0, 1, 3)
        (at / "labels").rename(at / f"in-{kind}")
    label(at, top_k=top_k)
    rows, documents = rows_of(at / "labels"), list(map(json.loads, (at / "one.jsonl").read_text().splitlines()))
    assert [row["image"] for row in rows] == [document["image"] for document in documents]
    assert rows[BAD]["error"] == documents[BAD]["error"]
    for row, document in zip(rows, documents, strict=True):
        assert row["labels"] == document.get("labels")
        scores = dict(zip(row["labels"] or (), row["scores"] or (), strict=True)) if top_k else row
        for name, score in document.get("scores", dict.fromkeys(() if top_k else NAMES)).items():
            assert scores[name] == (None if score is None else pytest.approx(score, abs=1e-7))


def test_programs_read_the_folder_as_one_table(at):
    label(at)
    found = pyarrow.dataset.dataset(str(at / "labels"), format="parquet")
    assert found.count_rows() == 11
    assert found.schema.names == ["image", "labels", "error", *NAMES]
    assert {str(found.schema.field(name).type) for name in NAMES} == {"float"}
    assert parquet.read_table(at / "labels").num_rows == 11, "as pandas reads it"


@pytest.mark.parametrize("kind", PART_FORMATS)
def test_names_of_paths_that_are_not_utf_8_are_read_back(at, kind):
    name = os.fsdecode(b"=\xff,\n.png")
    Image.fromarray(color(0)).save(at / "photos" / name)
    predictor = Predictor(make_run(), HALVES)
    label_parts(lambda: predictor, [str(at / "photos" / name)], str(at / "labels"), kind)
    path = at / f"labels/part-00000.{kind}"
    assert read_names(path) == [f"{at}/photos/=\\udcff,\n.png"]
    before = path.stat().st_mtime_ns
    label_parts(lambda: predictor, [str(at / "photos" / name)], str(at / "labels"), kind)
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("output", "form", "wanted"),
    [
        ("labels/", None, True),
        ("labels", None, True),
        ("gs://bucket/labels", None, True),
        ("{at}/v1.2", None, True),
        ("labels.csv", None, False),
        ("labels.csv", "csv", True),
        ("tags", "sidecar", False),
        ("-", None, False),
        (None, None, False),
        (None, "parquet", True),
    ],
)
def test_a_folder_gets_parts(tmp_path, output, form, wanted):
    (tmp_path / "v1.2").mkdir()
    assert wants_parts(output and output.format(at=tmp_path), form) is wanted


# -------------------------------------------------------------------------------------------------------------- resume
def test_the_same_command_computes_the_parts_that_are_missing(at, monkeypatch):
    label(at)
    whole = contents(at / "labels")
    (at / "labels/part-00001.parquet").unlink()
    kept = {path: path.stat().st_mtime_ns for path in (at / "labels").iterdir()}
    assert label(at).document["images"] == 4
    assert contents(at / "labels") == whole
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    outcome = label(at)
    assert outcome.document["images"] == 0
    assert outcome.text().startswith(f"{at}/labels has all 3 parts, with 11 images")


def test_further_images_change_the_last_part_only(at):
    label(at, images=6)
    first = (at / "labels/part-00000.parquet").stat().st_mtime_ns
    assert label(at).document["images"] == 7
    assert (at / "labels/part-00000.parquet").stat().st_mtime_ns == first
    grown = contents(at / "labels")
    (at / "labels").rename(at / "grown")
    label(at)
    assert contents(at / "labels") == grown


def test_a_worker_stops_if_another_command_adds_images(at):
    label(at)
    record = json.loads((at / "labels" / RECORD).read_text())
    images = ArrayImages(np.zeros((11, 1, 1, 3), np.uint8))
    before = contents(at / "labels")
    (at / "labels" / RECORD).write_text(json.dumps(record | {"images": 12}))
    with pytest.raises(UserError, match=r"another command labels 12 images into .*; repeat that command"):
        PartFolder(Folder(at / "labels"), "parquet", images, 4).write(2, parts.ResultRows(NAMES), [])
    (at / "labels" / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    assert contents(at / "labels") == before


def test_a_stop_says_what_is_there(at, monkeypatch):
    def stop(self, *arguments):
        if arguments[0] == 2:
            raise KeyboardInterrupt
        return write(self, *arguments)

    write = PartFolder.write
    monkeypatch.setattr(PartFolder, "write", stop)
    with pytest.raises(KeyboardInterrupt, match=r"stopped; 2 of 3 parts are in .*, and the same command continues"):
        label(at)


def test_a_stop_of_one_file_names_parts(at, monkeypatch):
    def stop(rows, target, results):
        next(results)
        raise KeyboardInterrupt

    monkeypatch.setattr(parts.ResultRows, "write", stop)
    with pytest.raises(KeyboardInterrupt, match=r"one.csv is not written, but with --output=FOLDER/ the same command"):
        single(at, "one.csv")


@pytest.mark.parametrize("kind", PART_FORMATS)
def test_an_object_store_gets_the_same_parts(at, bucket, kind):
    label(at, kind)
    names = sorted(str(path) for path in (at / "photos").iterdir())
    predictor = Predictor(make_run(), HALVES)
    remote = at / "store/bucket/labels"
    for images in (6, 11, 11):
        label_parts(lambda: predictor, names[:images], "gs://bucket/labels", kind, size=4, batch_size=2)
    assert contents(remote) == contents(at / "labels")
    assert len(bucket) == 4, "two parts, and then the last of them again and a third"


def test_files_of_other_programs_stay_and_are_named(at, caplog):
    label(at)
    (at / "labels/notes.txt").write_text("mine")
    label(at)
    assert f"{at}/labels: 1 file of other programs stay: notes.txt" in caplog.messages


# ------------------------------------------------------------------------------------------------------------- workers
def test_a_worker_takes_its_parts_and_then_those_that_others_have_not_written(at, monkeypatch):
    written = []
    write = PartFolder.write
    monkeypatch.setattr(PartFolder, "write", lambda self, part, *rest: (written.append(part), write(self, part, *rest)))
    label(at, worker=(1, 3))
    assert written[0] == 1
    assert sorted(written) == [0, 1, 2]
    label(at, worker=(0, 3))
    assert len(written) == 3


def test_a_part_that_appears_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_CHECK_SECONDS", -1.0)
    images = ArrayImages(np.zeros((7, 1, 1, 3), np.uint8))
    rows = PartRows(PartFolder(Folder(tmp_path), "csv", images, 4), [1, 0], 6)
    assert list(rows) == [4, 5, 6, -1, -1, -1, 0, 1, 2, 3, -1, -1]
    (tmp_path / "part-00001.csv").touch()
    assert list(rows) == [-1] * 6 + [0, 1, 2, 3, -1, -1]


def test_rows_of_a_part_that_another_worker_has_written_are_left_out(at, monkeypatch):
    """Its first batch was read before the file appeared."""
    label(at)
    whole = contents(at / "labels")
    path = at / "labels/part-00001.parquet"
    content = path.read_bytes()
    path.unlink()
    looks = iter([False] * 2)
    monkeypatch.setattr(PartRows, "_is_written", lambda self, part: next(looks, True))
    path_written = []
    monkeypatch.setattr(parts, "write_part", lambda *_: path_written.append(list(_[2])))
    label(at)
    assert not path_written
    path.write_bytes(content)
    assert contents(at / "labels") == whole


# ------------------------------------------------------------------------------------------------------------ refusals
def labeled(at: Path, kind: str = "parquet", **options) -> Path:
    write_photos(at)
    label(at, kind, **options)
    return at


def of_parts(name, change, *says, again=None, kind="parquet", **first):
    """A folder of parts is refused after a change, with the options `again` in place of those of the first command."""

    def make(at: Path) -> Path:
        labeled(at, kind, **first)
        if change:
            change(at / "labels")
        return at

    return Refusal(name, make, lambda at: label(at, **{"kind": kind, **first, **(again or {})}), *says)


def swap(labels: Path) -> None:
    (labels / "part-00000.csv").replace(labels / "part-00001.csv")


def rename(labels: Path) -> None:
    listed = sorted((labels.parent / "photos").iterdir())
    listed[4].rename(listed[4].with_name("04b.png"))


def command(name, *says, **flags):
    words = [f"--{flag.replace('_', '-')}={value}" for flag, value in {"workdir": "run", **flags}.items()]
    return Refusal(name, None, lambda at: run_command("predict", "--images=a.jpg", *words), *says)


COMMANDS = [
    command("worker", "argument --worker: '3/2' is not a number from 1 to N, and N, as in 2/16", worker="3/2"),
    command("worker 0", "'0/2' is not a number from 1 to N", worker="0/2"),
    command("a worker on a file", "--worker and --part-size are for parts of a corpus", worker="1/2", output="a.csv"),
    command("a part of a file", "--worker and --part-size are for parts of a corpus", part_size=8),
    command(
        "a file",
        "--format=csv is for parts of a corpus; give --output=FOLDER/, not a.csv",
        format="csv",
        output="a.csv",
    ),
    command("no folder", "--format=csv is for parts of a corpus; give --output=FOLDER/", format="csv"),
    command("a selection", "--select writes one file", select="both", count=2, output="labels/"),
    command("a format", "there is no --format=xml for this mode; there are ", format="xml", output="labels/"),
]


OTHER = "has labels with another value of {}; name another folder, or repeat the command that wrote it"
OF_PARTS = [
    of_parts("other weights", None, OTHER.format("weights"), again={"run": make_run(bias=1.0)}),
    of_parts("other thresholds", None, OTHER.format("thresholds"), again={"halves": dict.fromkeys(NAMES, 0.4)}),
    of_parts("top-k", None, OTHER.format("--top-k"), again={"top_k": 2}),
    of_parts("other size", None, OTHER.format("part size"), again={"size": 5}),
    of_parts("other format", None, OTHER.format("format"), again={"kind": "csv"}),
    of_parts("fewer images", None, "has labels of 11 images, but --images has 9; give the same", again={"images": 9}),
    of_parts("another image", rename, "images 5 to 8 of --images are not those that {at}/labels has labels of; give"),
    of_parts("no record", lambda labels: (labels / RECORD).unlink(), "has files of other commands (part-00000.parquet"),
    of_parts("a part beyond", lambda labels: (labels / "part-00003.parquet").touch(), "is a part of another command"),
    of_parts(
        "another suffix", lambda labels: (labels / "part-00000.csv").touch(), "part-00000.csv is a part of another"
    ),
    of_parts("a part of others", swap, "part-00001.csv is a part of another command, with other images", kind="csv"),
    damaged("a record", labeled, f"labels/{RECORD}", CUT, label, f"{RECORD} is damaged"),
    damaged("a record of others", labeled, f"labels/{RECORD}", "{}", label, f"{RECORD} is damaged: it has no 'images'"),
    damaged("a part", labeled, "labels/part-00000.parquet", CUT, label, "part-00000.parquet is damaged"),
    of_parts("gates in a table", None, "--gates needs JSON lines; add --format=jsonl", again={"gates": True}),
    of_parts("too many", None, "top_k is 9 and should be from 1 to the 4 labels", again={"top_k": 9}),
]


@each([*OF_PARTS, *COMMANDS])
def test_refusals_of_parts(case, tmp_path):
    case.check(tmp_path)


def test_an_untrained_model_needs_a_threshold(at):
    predictor = Predictor(make_run(), HALVES, ranked=True)
    with pytest.raises(UserError, match="compares all images to assign labels, which parts cannot; set a threshold"):
        label_parts(lambda: predictor, [str(at / "photos")], str(at / "labels"), "parquet")


def test_a_label_with_the_name_of_a_column_is_refused_before_images_are_read(at):
    run = make_run()
    run.label_space.names = ("image", *NAMES[1:])
    with pytest.raises(UserError, match="a label has the name of another column of the PARQUET"):
        label(at, run=run, halves=dict.fromkeys(run.label_space.names, 0.5))
    assert not (at / "labels").exists()


def test_non_finite_scores_end_the_command(at):
    with pytest.raises(UserError, match="the model returns non-finite scores"):
        label(at, run=make_run(bias=np.nan))
