"""Prediction on the command line, with a model whose logits are known."""

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.color_model import HALVES, NAMES, color, expected, make_run
from helpers.commands import csv_rows
from helpers.tables import data_settings
from PIL import Image

from mlmoe_jax.apps.tools.predict_files import choose_target, predict_files
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.inference.predictor import Predictor


@pytest.fixture(scope="module")
def predictor():
    return Predictor(make_run(), HALVES)


@pytest.fixture
def command(color_folder, monkeypatch, predictor):
    """A function that predicts with the given files."""
    for row in range(5):
        Image.fromarray(color(50 * row, 110)).save(f"{row}.png")
    Path("bad.png").write_text("not an image")

    def run(*given, output=None, json_lines=False, gates=False, form=None, **options):
        """Print the outcome as the command line does, and return its exit code."""
        target = choose_target(output, color_folder, json_lines=json_lines, gates=gates, form=form)
        outcome = predict_files(lambda: predictor, given, target, gates=gates, **options)
        if outcome.parts:
            print(outcome.json() if json_lines else outcome.text())
        return outcome.exit_code

    return run


def test_one_row_per_image(command, capsys):
    assert command("4.png", "0.png", "4.png") == 0
    out, err = capsys.readouterr()
    first = "4.png  red 100 %  green 73 %  dark 50 %"
    *lines, summary = out.splitlines()
    assert lines == [first, "0.png  green 73 %  dark 50 %", first, ""]
    assert summary.startswith("3 of 3 images labeled (")
    assert err == ""
    rows = csv_rows("run/predictions.csv")
    assert list(rows[0]) == ["image", "labels", "error", *NAMES]
    assert [row["image"] for row in rows] == ["4.png", "0.png", "4.png"]
    assert [row["labels"] for row in rows] == ["red;green;dark", "green;dark", "red;green;dark"]
    np.testing.assert_allclose([float(rows[1][name]) for name in NAMES], expected(0, 110), atol=1e-6)


def test_a_bad_image_is_a_row_with_an_error(command, capsys):
    assert command("0.png", "bad.png", "1.png", output="p.csv", batch_size=1) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == "bad.png  unreadable"
    assert "2 of 3 images labeled" in out
    assert err.startswith("error: cannot read bad.png as an image: its content is none of JPEG")
    rows = csv_rows("p.csv")
    assert err == f"error: {rows[1].pop('error')}\n"
    assert rows[1] == {"image": "bad.png", "labels": "", **dict.fromkeys(NAMES, "")}
    assert rows[2]["labels"]


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "label_studio"])
def test_predictions_for_a_labeling_tool(command, capsys, form):
    """The format's reader gets the labels; readers leave out scores."""
    output = f"out{FORMATS[form].suffix}"
    assert command("4.png", "bad.png", "0.png", "4.png", output=output, form=form) == 2
    assert "2 of 3 images labeled" in capsys.readouterr().out
    split = open_split(data_settings(form, ".", table=output, bad_images="skip"), "train")
    names = np.array(split.classes)
    found = {name: {*names[row == 1]} for name, row in zip(split.ids, split.labels, strict=True)}
    assert found == {"4.png": {"red", "green", "dark"}, "0.png": {"green", "dark"}}
    scores = pytest.approx([*expected(200, 110)[:2], 0.5], abs=1e-6)
    if form == "fiftyone":
        entries = json.loads(Path(output).read_text())["labels"]["4"]
        assert [entry["confidence"] for entry in entries] == scores
    if form == "cvat":
        image = ElementTree.parse(output).getroot().find("image")
        assert [float(one.text) for one in image.iterfind("tag/attribute")] == scores


def test_predictions_for_label_studio(command):
    command("4.png", "bad.png", "0.png", output="a.json", form="label_studio", top_k=2)
    first, second = json.loads(Path("a.json").read_text())
    assert [task["data"]["image"] for task in (first, second)] == [f"/data/local-files/?d={n}.png" for n in (4, 0)]
    (prediction,) = first["predictions"]
    (result,) = prediction.pop("result")
    assert prediction == {"model_version": "mlmoe", "score": pytest.approx(expected(200, 110)[1], abs=1e-6)}
    assert result.pop("value") == {"choices": ["red", "green"]}
    assert result == {"from_name": "labels", "to_name": "image", "type": "choices"}


@pytest.mark.parametrize("above", ["{folder}", ".."])
def test_tags_of_images_elsewhere_are_below_their_common_folder(command, tmp_path, monkeypatch, above):
    (tmp_path / "sub").mkdir()
    (tmp_path / "4.png").rename(tmp_path / "sub" / "4.png")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    above = above.format(folder=tmp_path)
    command(f"{above}/sub/4.png", f"{above}/0.png", output="tags", form="sidecar")
    texts = (path for path in tmp_path.rglob("*.txt") if "run" not in path.parts)
    assert {str(path.relative_to(tmp_path)) for path in texts} == {"here/tags/0.txt", "here/tags/sub/4.txt"}


def test_the_best_labels_in_columns(command, capsys):
    assert command("4.png", "bad.png", "0.png", output="p.csv", top_k=2) == 2
    rows = csv_rows("p.csv")
    assert list(rows[0]) == ["image", "error", "label_1", "score_1", "label_2", "score_2"]
    assert [row["label_1"] for row in rows] == ["red", "", "green"]
    assert [row["label_2"] for row in rows] == ["green", "", "dark"]
    assert [row["score_2"] for row in rows] == ["0.731059", "", "0.500000"]


def test_json_lines_with_gates(command):
    assert command("4.png", "bad.png", gates=True) == 2
    good, bad = map(json.loads, Path("run/predictions.jsonl").read_text().splitlines())
    assert list(good) == ["image", "labels", "scores", "gates"]
    assert good["labels"] == ["red", "green", "dark"]
    np.testing.assert_allclose([good["scores"][name] for name in NAMES], expected(200, 110), rtol=1e-4)
    assert good["gates"]["g"]["blue"] == [0.5, pytest.approx(200 / 255, abs=1e-6)]
    assert list(bad) == ["image", "error"]
    assert command("4.png", output="p.jsonl", top_k=2) == 0
    only = json.loads(Path("p.jsonl").read_text())
    assert list(only["scores"]) == only["labels"] == ["red", "green"]
    assert "gates" not in only


def test_rows_go_to_standard_output_and_messages_to_standard_error(command, capsys, caplog):
    assert command("4.png", "bad.png", output="-") == 2
    out, err = capsys.readouterr()
    assert [line.split(",")[0] for line in out.splitlines()] == ["image", "4.png", "bad.png"]
    assert "1 of 2 images labeled" in err
    assert command("4.png", "bad.png", json_lines=True) == 2
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (good["labels"], list(bad)) == (["red", "green", "dark"], ["image", "error"])
    assert not Path("run/predictions.csv").exists()
    Path("folder/4.png").mkdir(parents=True)
    Path("4.png").rename("folder/image")
    Path("folder/notes.txt").touch()
    assert command("folder", "bad.png", json_lines=True, output="p.csv") == 2
    assert "folder: 1 of 2 files is not used: 1 in no image format (notes.txt)" in caplog.messages
    summary = json.loads(capsys.readouterr().out)
    assert summary.pop("images_per_second") > 0
    assert [account["left_out"] for account in summary.pop("usage")] == [{"in no image format": 1}]
    assert summary == {"images": 2, "labeled": 1, "unreadable": 1, "output": "p.csv"}


def test_names_keep_their_bytes_and_are_printed_without_control_characters(command, capsys):
    name = os.fsdecode(b"\xff\x1b[31m,\n\x07.png")
    Image.fromarray(color(0)).save(name)
    Path("c\x1b[2J.png").write_text("not an image")
    assert command(name, "c\x1b[2J.png", output="p.csv") == 2
    printed = "".join(capsys.readouterr())
    assert not {"\x1b", "\x07"} & set(printed)
    assert r"\udcff\x1b[31m" in printed
    assert b'\n"\xff\x1b[31m,\n\x07.png",' in Path("p.csv").read_bytes()
    assert command(name, output="p.jsonl") == 0
    assert json.loads(Path("p.jsonl").read_text())["image"] == name
