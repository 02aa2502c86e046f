"""A corpus that is labeled in parts, with a model whose logits are known."""

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
from helpers.color_model import HALVES, NAMES, color, make_run
from helpers.paths import REPOSITORY
from helpers.refusals import CUT, Refusal, contents, damaged, each, run_command
from PIL import Image
from pyarrow import parquet

from mlmoe_jax.apps.tools import parts
from mlmoe_jax.apps.tools.image_list import find_images, sample_inputs
from mlmoe_jax.apps.tools.label_parts import describe_settings, label_parts
from mlmoe_jax.apps.tools.part_files import read_names
from mlmoe_jax.apps.tools.part_options import PART_FORMATS, PartOptions, wants_parts
from mlmoe_jax.apps.tools.parts import RECORD, PartFolder, PartRows
from mlmoe_jax.apps.tools.predict_files import choose_target, predict_files
from mlmoe_jax.apps.tools.result_rows import ResultRows
from mlmoe_jax.data.containers.parquet_images import ParquetImages
from mlmoe_jax.data.containers.stored import StoredImages
from mlmoe_jax.data.decoding import STRICT
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
    return label_items(at, *names, kind=kind, predictor=predictor, **options)


def label_items(at: Path, *items: str, kind="parquet", output=None, predictor=None, size=4, column="", **options):
    predictor = predictor or Predictor(make_run(), HALVES)
    worker = options.pop("worker", (0, 1))
    chosen = PartOptions(items, output or str(at / "labels"), kind, size=size, worker=worker, column=column)
    return label_parts(lambda: predictor, chosen, **{"batch_size": 2, **options})


@pytest.fixture
def at(tmp_path):
    write_photos(tmp_path)
    return tmp_path


def part_folder(at: Path, images: int, **options) -> PartFolder:
    """The folder of `label`."""
    names = sorted(str(path) for path in (at / "photos").iterdir())[:images]
    settings = describe_settings(Predictor(make_run(), HALVES), options.get("top_k"), False)
    return PartFolder(Folder(at / "labels"), "parquet", find_images(names).images, 4, settings)


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
    label_items(at, str(at / "photos" / name), kind=kind)
    path = at / f"labels/part-00000.{kind}"
    assert read_names(path) == [f"{at}/photos/=\\udcff,\n.png"]
    before = path.stat().st_mtime_ns
    label_items(at, str(at / "photos" / name), kind=kind)
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
    output = output and output.format(at=tmp_path)
    assert wants_parts(output, form) is wanted


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("predict --images=a.jpg --output=labels/", True),
        ("features --config=own_csv --images=a.jpg --output=features", True),
        ("features --config=own_csv --output=features", False),
        ("export --images=a.jpg --output=labels", False),
        ("", False),
    ],
)
def test_the_launch_scripts_know_the_commands_that_write_parts(words, wanted):
    shell = ["bash", "-c", '. launch/commands.sh && writes_parts "$@"', "bash", *words.split()]
    assert (subprocess.run(shell, cwd=REPOSITORY, check=False).returncode == 0) is wanted


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

    monkeypatch.setattr(ResultRows, "write", stop)
    with pytest.raises(KeyboardInterrupt, match=r"one.csv is not written, but with --output=FOLDER/ the same command"):
        single(at, "one.csv")


def test_a_part_is_not_written_after_another_command_has_added_images(at, monkeypatch):
    def extended(rows):
        for count, row in enumerate(rows, 1):
            yield row
            if count == 2:
                part_folder(at, 11).prepare()

    write = ResultRows.write_part
    monkeypatch.setattr(ResultRows, "write_part", lambda rows, path, results: write(rows, path, extended(results)))
    with pytest.raises(UserError, match="has parts with 11 images, but --images has 3; give the same images"):
        label(at, images=3)
    monkeypatch.undo()
    label(at)
    assert len(rows_of(at / "labels")) == 11


def test_of_two_commands_with_other_options_one_ends(at, monkeypatch):
    prepare = PartFolder.prepare

    def overtaken(folder):
        prepare(folder)
        monkeypatch.undo()
        (at / "labels" / RECORD).unlink()
        part_folder(at, 11, top_k=2).prepare()

    monkeypatch.setattr(PartFolder, "prepare", overtaken)
    with pytest.raises(UserError, match="has parts with another value of --top-k"):
        label(at)
    assert not list((at / "labels").glob("part-*"))


def test_a_part_that_vanishes_is_computed_again(at, monkeypatch):
    label(at)
    whole = contents(at / "labels")
    (at / "labels/part-00000.parquet").unlink()
    write = PartFolder.write

    def lose(folder, part, *rest):
        monkeypatch.undo()
        (at / "labels/part-00002.parquet").unlink()
        write(folder, part, *rest)

    monkeypatch.setattr(PartFolder, "write", lose)
    label(at)
    assert contents(at / "labels") == whole


def test_a_part_that_always_vanishes_ends_the_command(at, monkeypatch):
    write = PartFolder.write

    def lose(folder, part, *rest):
        write(folder, part, *rest)
        folder.path(part).unlink()

    monkeypatch.setattr(PartFolder, "write", lose)
    with pytest.raises(UserError, match=r"3 of 3 parts have vanished from .*: another program removes files there"):
        label(at)


def test_a_last_part_of_another_command_is_found_at_the_end(at, monkeypatch):
    write = PartFolder.write

    def overtake(folder, part, *rest):
        write(folder, part, *rest)
        if part == 2:
            shutil.copy(folder.path(0), folder.path(2))

    monkeypatch.setattr(PartFolder, "write", overtake)
    with pytest.raises(UserError, match=r"part-00002\.parquet is a part of another command, with other images"):
        label(at)


@pytest.mark.parametrize("kind", PART_FORMATS)
def test_an_object_store_gets_the_same_parts(at, bucket, kind):
    label(at, kind)
    names = sorted(str(path) for path in (at / "photos").iterdir())
    remote = at / "store/bucket/labels"
    for images in (6, 11, 11):
        label_items(at, *names[:images], kind=kind, output="gs://bucket/labels")
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
    monkeypatch.setattr(parts, "_CHECK_SECONDS", 1e-9)
    images = ArrayImages(np.zeros((7, 1, 1, 3), np.uint8))
    rows = PartRows(PartFolder(Folder(tmp_path), "csv", images, 4, {}), [1, 0], 6)
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
    attempts = []

    def write(rows, at, results):
        path.write_bytes(content)  # by the other worker
        attempts.append(at)
        attempts.append(list(results))

    monkeypatch.setattr(ResultRows, "write_part", write)
    label(at)
    assert attempts == [path], "the results end with an error"
    assert contents(at / "labels") == whole


# ---------------------------------------------------------------------------------------------------------- containers
def write_parquet(path: Path, *, first: int = 0, step: int = 20) -> None:
    cells = [encoded(color(first + step * row, 110)) for row in range(11)]
    other = [encoded(color(200 - step * row)) for row in range(11)]
    cells[BAD] = None
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.table({"front": cells, "back": other}), path)


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_a_row_without_an_image_is_a_row_with_an_error(tmp_path):
    write_parquet(tmp_path / "images.parquet")
    assert label_items(tmp_path, f"{tmp_path}/images.parquet", column="front").document["unreadable"] == 1
    assert [row["error"] is None for row in rows_of(tmp_path / "labels")].index(False) == BAD


def test_another_column_or_version_of_a_parquet_file_is_refused(tmp_path):
    images, other = f"{tmp_path}/images.parquet", r"images 1 to 4 of --images are others than in"
    write_parquet(Path(images))
    label_items(tmp_path, images, column="front")
    with pytest.raises(UserError, match=other):
        label_items(tmp_path, images, column="back")
    write_parquet(Path(images), first=3, step=19)
    with pytest.raises(UserError, match=other):
        label_items(tmp_path, images, column="front")


def test_of_a_container_few_images_are_read_before_the_first_batch(tmp_path, monkeypatch):
    write_parquet(tmp_path / "images.parquet")
    monkeypatch.setattr(StoredImages, "most_opened", 2)
    found, read = find_images([f"{tmp_path}/images.parquet"], column="back"), []
    read_stored = ParquetImages.read_stored
    monkeypatch.setattr(ParquetImages, "read_stored", lambda *place: (read.append(place[2]), read_stored(*place))[1])
    assert found.images.frames_note() == ["may have further images with several frames: 2 files of 11 opened to see"]
    assert sample_inputs(found.images, STRICT) == (2, [])
    assert sorted(read) == [0, 0, 1, 1]


@pytest.mark.parametrize("items", ["{at}", "{at}/.", "{at}/**/*.parquet", "{at}/*/*.parquet"])
def test_parts_are_not_written_where_they_would_be_read(tmp_path, items):
    write_parquet(tmp_path / "data/images.parquet")
    item = items.format(at=tmp_path)
    with pytest.raises(UserError, match=r"the parts in .*/labels would be images of --images=.*; name another"):
        label_items(tmp_path, item, column="back")
    label_items(tmp_path, f"{tmp_path}/data/*.parquet", column="back")
    label_items(tmp_path, f"{tmp_path}/data", column="back")
    assert len(rows_of(tmp_path / "labels")) == 11


def test_a_changed_member_of_a_tar_file_is_refused(at):
    for name in ("00.png", "01.png"):
        Image.fromarray(np.tile(color(7), (9, 9, 1))).save(at / "photos" / name)
        with tarfile.open(at / "images.tar", "w") as archive:
            archive.add(at / "photos", "photos")
        if name == "00.png":
            label_items(at, f"{at}/images.tar")
            label_items(at, f"{at}/images.tar")
    with pytest.raises(UserError, match="images 1 to 4 of --images are others than in"):
        label_items(at, f"{at}/images.tar")


# ------------------------------------------------------------------------------------------------------------ refusals
def test_a_sample_without_a_readable_image_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "list.txt").write_text("a.jpg\nb.jpg\n")
    with pytest.raises(UserError, match="none of 2 images of --images that were tried can be read, the first because"):
        label_items(tmp_path, f"@{tmp_path}/list.txt")
    assert not (tmp_path / "labels").exists()


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


OTHER = "has parts with another value of {}; name another folder, or repeat the command that wrote it"
OF_PARTS = [
    of_parts("other weights", None, OTHER.format("weights"), again={"run": make_run(bias=1.0)}),
    of_parts("other thresholds", None, OTHER.format("thresholds"), again={"halves": dict.fromkeys(NAMES, 0.4)}),
    of_parts("top-k", None, OTHER.format("--top-k"), again={"top_k": 2}),
    of_parts("other size", None, OTHER.format("part size"), again={"size": 5}),
    of_parts("other format", None, OTHER.format("format"), again={"kind": "csv"}),
    of_parts("fewer images", None, "has parts with 11 images, but --images has 9; give the same", again={"images": 9}),
    of_parts("another image", rename, "images 5 to 8 of --images are others than in {at}/labels; give"),
    of_parts(
        "another image of the last part of a shorter list",
        rename,
        "images 5 to 6 of --images are others than in {at}/labels; give",
        images=6,
        again={"images": 11},
    ),
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
        label_items(at, str(at / "photos"), predictor=predictor)


def test_a_label_with_the_name_of_a_column_is_refused_before_images_are_read(at):
    run = make_run()
    run.label_space.names = ("image", *NAMES[1:])
    with pytest.raises(UserError, match="a label has the name of another column of the PARQUET"):
        label(at, run=run, halves=dict.fromkeys(run.label_space.names, 0.5))
    assert not (at / "labels").exists()


def test_non_finite_scores_end_the_command(at):
    with pytest.raises(UserError, match="the model returns non-finite scores"):
        label(at, run=make_run(bias=np.nan))
