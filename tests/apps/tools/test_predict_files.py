"""Prediction on the command line, in one process and in several, with a model whose logits are known."""

import csv
import json
import os
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.color_model import HALVES, NAMES, color, expected, make_run
from helpers.devices import start_python
from PIL import Image

from mlmoe_jax.apps.tools.predict import even_batch, predict_files
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.inference.predict import Predictor
from mlmoe_jax.runs.folder import RunFolder


@pytest.fixture(scope="module")
def predictor():
    return Predictor(make_run(), HALVES)


@pytest.fixture
def command(tmp_path, monkeypatch, predictor):
    """A function that predicts with the given files in a new run folder."""
    folder = RunFolder(tmp_path / "run")
    folder.write_json("config.json", {})
    (tmp_path / "run" / "checkpoints").mkdir()
    with open(tmp_path / "run" / "label_space.npz", "wb") as file:
        synthetic_label_space(len(NAMES), 1).save(file)
    monkeypatch.setattr(Predictor, "from_run", lambda folder, overrides, checkpoint: predictor)
    monkeypatch.chdir(tmp_path)
    for row in range(5):
        Image.fromarray(color(50 * row, 110)).save(f"{row}.png")
    Path("bad.png").write_text("not an image")

    def run(*given, output=None, overrides=(), **options):
        return predict_files(folder, given, output, overrides, **options)

    return run


def table(path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_one_row_per_image(command, capsys):
    assert command("4.png", "0.png", "4.png") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "4.png  red 100 %  green 73 %  dark 50 %",
        "0.png  green 73 %  dark 50 %",
        "4.png  red 100 %  green 73 %  dark 50 %",
        out.splitlines()[-1],
    ]
    assert out.splitlines()[-1].startswith("3 of 3 images labeled (")
    assert err == ""
    rows = table("run/predictions.csv")
    assert list(rows[0]) == ["image", "labels", "error", *NAMES]
    assert [(row["image"], row["labels"]) for row in rows] == [
        ("4.png", "red;green;dark"),
        ("0.png", "green;dark"),
        ("4.png", "red;green;dark"),
    ]
    np.testing.assert_allclose([float(rows[1][name]) for name in NAMES], expected(0, 110), atol=1e-6)


def test_a_bad_image_is_a_row_with_an_error(command, capsys):
    assert command("0.png", "bad.png", "1.png", output="p.csv", batch_size=1) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == "bad.png  unreadable"
    assert "2 of 3 images labeled" in out
    assert err.startswith("error: cannot read bad.png as an image: its content is none of JPEG")
    rows = table("p.csv")
    assert err == f"error: {rows[1].pop('error')}\n"
    assert rows[1] == {"image": "bad.png", "labels": "", **dict.fromkeys(NAMES, "")}
    assert rows[2]["labels"]


def test_the_best_labels_in_columns(command, capsys):
    assert command("4.png", "bad.png", "0.png", output="p.csv", top_k=2) == 2
    rows = table("p.csv")
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


def test_rows_are_on_standard_output_and_messages_on_standard_error(command, capsys):
    assert command("4.png", "bad.png", output="-") == 2
    out, err = capsys.readouterr()
    assert [line.split(",")[0] for line in out.splitlines()] == ["image", "4.png", "bad.png"]
    assert "1 of 2 images labeled" in err
    assert command("4.png", "0.png", output="-", as_json=True) == 0
    assert [json.loads(line)["image"] for line in capsys.readouterr().out.splitlines()] == ["4.png", "0.png"]


def test_json_goes_to_standard_output(command, capsys):
    assert command("4.png", "bad.png", as_json=True) == 2
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (good["labels"], list(bad)) == (["red", "green", "dark"], ["image", "error"])
    assert not Path("run/predictions.csv").exists()
    assert command("4.png", "bad.png", as_json=True, output="p.csv") == 2
    summary = json.loads(capsys.readouterr().out)
    assert summary.pop("images_per_second") > 0
    assert summary == {"images": 2, "labeled": 1, "unreadable": 1, "output": "p.csv"}


def test_names_that_are_not_utf8_keep_their_bytes(command, capsys):
    name = os.fsdecode(b"\xff,\n.png")
    Image.fromarray(color(0)).save(name)
    assert command(name, output="p.csv") == 0
    assert "�" in capsys.readouterr().out
    assert b'\n"\xff,\n.png",' in Path("p.csv").read_bytes()
    assert command(name, output="p.jsonl") == 0
    assert json.loads(Path("p.jsonl").read_text())["image"] == name


def test_names_are_printed_without_control_characters(command, capsys):
    for name in ("a\x1b[31m.png", "b\x07.png"):
        Image.fromarray(color(0)).save(name)
    Path("c\x1b[2J.png").write_text("not an image")
    assert command("a\x1b[31m.png", "b\x07.png", "c\x1b[2J.png", output="p.csv") == 2
    printed = "".join(capsys.readouterr())
    assert not {"\x1b", "\x07"} & set(printed)
    assert r"\x1b[31m.png" in printed


def test_a_label_with_the_name_of_a_column_needs_json_lines(command, refusal, monkeypatch, predictor):
    monkeypatch.setattr(predictor, "names", ("red", "error", "blue", "dark"))
    sentence = refusal(command, "0.png")
    assert sentence == "the label error has the name of a column of the CSV; write --output=….jsonl, or use --top-k"
    assert command("0.png", output="p.jsonl") == 0
    assert command("0.png", top_k=1) == 0


def test_thresholds_are_logged_unless_they_are_the_default(command, capsys, predictor, monkeypatch):
    command("0.png")
    assert "threshold" not in capsys.readouterr().err
    file = Path("run/thresholds.json")
    for cuts, source, text in (
        ([0.25, 0.5, 0.75, 0.5], {}, "0.25 to 0.75 (FILE)"),
        ([0.3, np.inf, 0.3, np.inf], {"split": "val"}, "0.3 and never for 2 labels (FILE, fitted on val)"),
        ([np.inf] * 4, {}, "never for 4 labels (FILE)"),
    ):
        monkeypatch.setattr(predictor, "thresholds", np.array(cuts))
        monkeypatch.setattr(predictor, "source", source)
        command("0.png")
        assert capsys.readouterr().err == f"thresholds: {text}\n".replace("FILE", str(file.resolve()))
    command("0.png", overrides=[("eval.threshold", "0.3")])
    assert "(--config.eval.threshold)" in capsys.readouterr().err
    command("0.png", top_k=1)
    assert "threshold" not in capsys.readouterr().err, "they are not used"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"output": "p.txt"}, "--output=p.txt should end in .csv or .jsonl, or be -"),
        ({"output": "none/p.csv"}, "there is no folder none to write p.csv into"),
        ({"output": "folder.csv"}, "--output=folder.csv is a folder"),
        ({"output": "p.csv", "gates": True}, "--gates needs JSON lines"),
        ({"output": "-", "gates": True}, "--gates needs JSON lines"),
        ({"batch_size": 0}, "--batch-size=0 should be above 0"),
        ({"top_k": 9}, "top_k is 9"),
    ],
)
def test_invalid_options_are_refused_before_any_work(command, refusal, options, part):
    Path("folder.csv").mkdir()
    before = sorted(Path().rglob("*"))
    assert refusal(command, "0.png", **options).startswith(part)
    assert sorted(Path().rglob("*")) == before


def test_an_interrupted_prediction_keeps_the_old_file(command, predictor, monkeypatch):
    command("0.png", output="p.csv")
    old, there = Path("p.csv").read_text(), sorted(Path().iterdir())
    stream = predictor.stream

    def interrupted(*arguments, **options):
        yield from list(stream(*arguments, **options))[:2]
        assert len(list(Path().glob(".p.csv.*.tmp"))) == 1, "rows are being written"
        raise KeyboardInterrupt

    monkeypatch.setattr(predictor, "stream", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command("1.png", "2.png", "3.png", output="p.csv")
    assert Path("p.csv").read_text() == old
    assert sorted(Path().iterdir()) == there


def test_a_full_disk_is_a_user_error(command, predictor, monkeypatch, refusal):
    def full(*_, **__):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(predictor, "stream", full)
    assert refusal(command, "0.png", output="p.csv").startswith("cannot write p.csv: No space left on device; ")
    assert not list(Path().glob("p.csv*"))


def test_even_batches_need_little_padding():
    assert even_batch(5, 32, 1) == 5
    assert even_batch(64, 32, 1) == 32
    assert even_batch(65, 32, 1) == 22
    assert even_batch(65, 32, 8) == 24, "over 8 devices"
    assert even_batch(3, 32, 8) == 8
    assert even_batch(1_000_000, 32, 1) == 32


# ------------------------------------------------------------------------------------------ many devices and processes
def predict_rows(target: str, given: list[str], **options) -> int:
    """Predict files with the model of this module, in a process of its own."""
    predictor = Predictor(make_run(), HALVES)
    Predictor.from_run = lambda folder, overrides, checkpoint: predictor
    return predict_files(RunFolder(Path(target).parent), given, target, [], **options)


def assert_rows(path: Path) -> None:
    """Check the rows of twenty increasingly red images, of which the third and the eleventh are bad."""
    rows = table(path)
    assert len(rows) == 20
    for row, cells in enumerate(rows):
        assert Path(cells["image"]).name == f"{row:02}.png"
        assert bool(cells["error"]) == (row in (2, 10))
        if not cells["error"]:
            np.testing.assert_allclose(float(cells["red"]), expected(10 * row)[0], atol=2e-6)


@pytest.fixture
def twenty(tmp_path):
    for row in range(20):
        Image.fromarray(color(10 * row)).save(tmp_path / f"{row:02}.png")
    RunFolder(tmp_path).write_json("config.json", {})
    (tmp_path / "checkpoints").mkdir()
    with open(tmp_path / "label_space.npz", "wb") as file:
        synthetic_label_space(len(NAMES), 1).save(file)
    (tmp_path / "02.png").write_bytes(b"")
    (tmp_path / "10.png").write_bytes(b"not an image")
    return tmp_path


@pytest.mark.slow
def test_two_processes(twenty):
    """Each reads its part; only the first has the list and writes, including the errors of the second."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    code = (
        "import jax, sys\n"
        "jax.distributed.initialize('localhost:{port}', 2, {process}, shutdown_timeout_seconds=60)\n"
        "import test_predict_files as t\nfrom mlmoe_jax.errors import UserError\n"
        "try:\n    t.predict_rows('{target}', ['@{folder}/none.txt'])\n    sys.exit('not refused')\n"
        "except UserError as error:\n    assert 'none.txt' in str(error)\n"
        "code = t.predict_rows('{target}', ['-'], batch_size=8)\n"
        "print(code, file=open('{folder}/code{process}', 'w'))\n"
    )
    processes = [
        start_python(
            code.format(port=port, process=i, target=twenty / "p.csv", folder=twenty), devices=2, stdin=stdin, stderr=-1
        )
        for i, stdin in ((0, subprocess.PIPE), (1, subprocess.DEVNULL))
    ]
    names = "".join(f"{twenty}/{row:02}.png\n" for row in range(20))
    try:
        errors = [p.communicate(given, timeout=300)[1] for p, given in zip(processes, (names, None), strict=True)]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    assert_rows(twenty / "p.csv")
    assert [(twenty / f"code{i}").read_text() for i in (0, 1)] == ["2\n", "2\n"]
    assert errors[0].count("error: cannot read") == 2
    assert "cannot read" not in errors[1], "only the first process logs"


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(twenty):
    given = f"[{str(twenty / '03.png')!r}] * 3000"
    code = f"import test_predict_files as t\nt.predict_rows('-', {given}, batch_size=1)"
    process = start_python(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=twenty)
    assert process.stdout.readline().startswith("image,")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 0, err
    assert "Traceback" not in err
    assert "Exception" not in err
