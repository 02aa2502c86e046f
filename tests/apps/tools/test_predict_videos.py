"""Frames of videos and new names of labels in the output of `mlmoe predict`."""

import json
from fractions import Fraction

import numpy as np
import pytest
from helpers.color_model import HALVES, NAMES, color, make_run
from helpers.commands import csv_rows
from helpers.photographs import texts
from helpers.videos import STEADY, write_video
from PIL import Image
from pyarrow import parquet

from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.apps.tools.label_parts import label_parts
from mlmoe_jax.apps.tools.part_options import PartOptions
from mlmoe_jax.apps.tools.parts import RECORD
from mlmoe_jax.apps.tools.predict_files import choose_target, join_frames, predict_files
from mlmoe_jax.data.decoding import STRICT
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.predictor import LabeledImage, Predictor
from mlmoe_jax.runs.folder import RunFolder

HALF = Fraction(1, 2)


@pytest.fixture
def predictor():
    return Predictor(make_run(), HALVES)


@pytest.fixture
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    Image.fromarray(color(200, 110)).save("photos/a.png")
    (tmp_path / "rename.csv").write_text("red,warm\nblue,warm\n")
    return tmp_path


@pytest.fixture
def video(at):
    pytest.importorskip("av")
    return write_video(at / "photos" / "b.mp4", STEADY[:30])


def predict(predictor, *items, output="p.csv", form=None, **options):
    target = choose_target(output, RunFolder("run"), form=form)
    return predict_files(lambda: predictor, items, target, **options)


# -------------------------------------------------------------------------------------------------------------- videos
def test_a_row_per_frame_has_its_video_and_time(video, at, predictor):
    assert predict(predictor, "photos", every=HALF).exit_code == 0
    rows = csv_rows("p.csv")
    assert list(rows[0]) == ["image", "video", "time", "labels", "error", *NAMES]
    assert [(row["image"], row["video"], row["time"]) for row in rows] == [
        ("photos/a.png", "", ""),
        ("photos/b.mp4#0.000", "photos/b.mp4", "0.0"),
        ("photos/b.mp4#0.520", "photos/b.mp4", "0.52"),
        ("photos/b.mp4#1.000", "photos/b.mp4", "1.0"),
    ]
    frames = find_images(["photos/b.mp4"], every=HALF).images
    for row in range(3):
        (result,) = predictor.stream([frames.read(row, STRICT)])
        assert float(rows[row + 1]["red"]) == pytest.approx(result.scores["red"], abs=1e-6)
    predict(predictor, "photos", every=HALF, output="p.jsonl")
    lines = list(map(json.loads, (at / "p.jsonl").read_text().splitlines()))
    assert [(line["video"], line["time"]) for line in lines][:2] == [(None, None), ("photos/b.mp4", 0.0)]


def test_videos_in_folders_and_lists_are_used_with_a_time_between_frames(video, at, caplog):
    assert len(find_images(["photos"]).images) == 1
    assert "1 in no image format (b.mp4)" in caplog.text
    assert len(find_images(["photos"], every=HALF).images) == 4
    (at / "list.txt").write_text("photos/b.mp4\nphotos/a.png\n")
    names = find_images(["@list.txt"], every=HALF).images
    assert [names.name(row) for row in (0, 3)] == ["photos/b.mp4#0.000", "photos/a.png"]
    assert len(find_images(["photos/b.mp4"]).images) == len(find_images(["photos/*.mp4"]).images) == 30


def test_frames_in_parts(video, at, predictor):
    label_parts(lambda: predictor, PartOptions(["photos"], "parts", size=2, every=HALF))
    with pytest.raises(UserError, match="has parts with 4 images, but --images has 3"):
        label_parts(lambda: predictor, PartOptions(["photos"], "parts", size=2, every=Fraction(1)))
    table = parquet.read_table("parts/part-00000.parquet")
    assert table["video"].to_pylist() == [None, "photos/b.mp4"]
    assert table["time"].to_pylist() == [None, 0.0]


def test_one_row_per_video(video, predictor):
    predict(predictor, "photos", every=HALF)
    frames = csv_rows("p.csv")
    predict(predictor, "photos", every=HALF, per_video=True, output="v.csv")
    photo, row = csv_rows("v.csv")
    assert photo["image"] == "photos/a.png"
    assert photo["time red"] == ""
    assert row["image"] == "photos/b.mp4"
    for name in NAMES:
        best = max(frames[1:], key=lambda frame, name=name: float(frame[name]))
        assert (row[name], row[f"time {name}"]) == (best[name], best["time"])


def test_frames_are_joined_by_their_highest_scores(predictor):
    def result(image, *scores, error=""):
        return LabeledImage(image, (), dict(zip(NAMES, scores, strict=True)) if scores else None, error)

    given = [
        result("a.mp4#0.000", 0.1, 0.6, 0.3, 0.5),
        result("a.mp4#1.000", 0.7, 0.6, 0.2, 0.4),
        result("a.mp4#2.000", error="bad frame"),
        result("a.jpg", 0.2, 0.2, 0.2, 0.2),
        result("b.mp4", error="bad video"),
    ]
    whole, photo, bad = join_frames(given, predictor)
    assert (whole.image, whole.labels, whole.error) == ("a.mp4", ("red", "green", "dark"), "bad frame")
    assert list(whole.scores.values()) == [0.7, 0.6, 0.3, 0.5]
    assert whole.times == {"red": 1, "green": 0, "blue": 0, "dark": 0}
    assert photo == given[3]
    assert bad == given[4]
    assert next(join_frames(given, predictor, top_k=1)).labels == ("red",)


def test_a_video_that_cannot_be_read_is_a_row_with_an_error(at, predictor):
    pytest.importorskip("av")
    (at / "bad.mp4").write_text("text")
    assert predict(predictor, "bad.mp4", "photos/a.png", per_video=True).exit_code == 2
    bad, good = csv_rows("p.csv")
    assert bad["error"].startswith("cannot read bad.mp4 as a video: ")
    assert good["labels"]


def test_what_videos_cannot_be(video, predictor):
    with pytest.raises(UserError, match="--format=cvat is for image files, and --images has videos"):
        predict(predictor, "photos/b.mp4", form="cvat", output="a.xml")
    with pytest.raises(UserError, match="--per-video is for videos, and --images has none"):
        predict(predictor, "photos", per_video=True)
    ranked = Predictor(make_run(), HALVES, ranked=True)
    with pytest.raises(UserError, match="--per-video joins scores, not ranks"):
        predict(ranked, "photos/b.mp4", per_video=True)


# --------------------------------------------------------------------------------------------------------------- names
def test_new_names_are_those_of_every_output(at, predictor):
    renamed = predictor.rename(at / "rename.csv")
    predict(renamed, "photos")
    (row,) = csv_rows("p.csv")
    assert list(row) == ["image", "labels", "error", "warm", "green", "dark"]
    assert row["labels"] == "warm;green;dark"
    predict(renamed, "photos", output="p.jsonl", gates=False)
    assert list(json.loads((at / "p.jsonl").read_text())["scores"]) == ["warm", "green", "dark"]
    predict(renamed, "photos", output="tags", form="sidecar")
    assert (at / "tags/photos/a.txt").read_text() == "warm, green, dark\n"


def test_sidecars_of_xmp_have_the_new_names(at, predictor):
    (at / "leave_out.txt").write_text("d?rk\n")
    plain = predictor.rename(leave_out=at / "leave_out.txt")
    predict(plain, "photos", output="photos", form="xmp")
    content = (at / "photos/a.png.xmp").read_bytes()
    assert texts(content, "subject") == ["red", "green"]
    predict(predictor.rename(at / "rename.csv", at / "leave_out.txt"), "photos", output="photos", form="xmp")
    content = (at / "photos/a.png.xmp").read_bytes()
    assert texts(content, "subject") == ["red", "green", "warm"]
    assert texts(content, "written") == ["red", "green", "warm"]


def test_levels_of_xmp_are_of_the_new_names(at):
    (at / "rename.csv").write_text("green,color\n")
    tree = LabelTree(((0, 1), (3, 1)))  # red and dark imply green
    predictor = Predictor(make_run(tree=tree), HALVES).rename(at / "rename.csv")
    predict(predictor, "photos", output="out", form="xmp_lightroom")
    assert texts((at / "out/photos/a.xmp").read_bytes(), "levels") == ["color|red", "color", "color|dark"]


def test_parts_with_other_names_are_refused(at, predictor):
    label_parts(lambda: predictor.rename(at / "rename.csv"), PartOptions(["photos"], "parts"))
    record = json.loads((at / "parts" / RECORD).read_text())
    assert record["settings"]["label names"] == ["warm", "green", "dark"]
    assert "warm" in parquet.read_table("parts/part-00000.parquet").column_names
    (at / "other.csv").write_text("red,warm\nblue,green\n")  # the names of the first, of other labels
    with pytest.raises(UserError, match=r"has parts with another value of .*--rename"):
        label_parts(lambda: predictor.rename(at / "other.csv"), PartOptions(["photos"], "parts"))


def test_scores_without_new_names_are_unchanged(at, predictor):
    (plain,) = predictor.stream([color(120, 40)])
    (same,) = predictor.rename().stream([color(120, 40)])
    assert plain == same
    np.testing.assert_array_equal(predictor.rename().thresholds, predictor.thresholds)
