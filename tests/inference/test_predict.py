"""Prediction with a model whose logits are known beforehand: those of a picture of one colour are that colour's."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.devices import start_python
from PIL import Image

from mlmoe_jax.config import default_config
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.inference import predict
from mlmoe_jax.inference.predict import Predictor, even_batch, predict_files
from mlmoe_jax.models.contracts import Prediction
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.sharding import make_mesh

NAMES = ("red", "green", "blue", "dark")


class Colours:
    """In the place of a ModelDef: `red`, `green` and `blue` have the logit (mean of the channel − 100) / 10, `dark` 0.

    The gate `g` gives label k the weights k/4 and the mean of red over 255; `static` is that of the first picture.
    """

    def __init__(self, gates: bool = True):
        self.gates = gates

    def merge(self, values):
        def model(image):
            mean = image.mean(axis=(1, 2))
            logits = jnp.concatenate([(mean * 255 - 100) / 10, 0 * mean[:, :1]], axis=1) + values["bias"]
            share = jnp.arange(4) / 4 + 0 * mean[:, :1]
            weights = jnp.stack([share, mean[:, :1] + 0 * share], axis=-1)
            return Prediction(logits, gates={"g": weights, "static": weights[:1]} if self.gates else {})

        return model

    def stats_of(self, model):
        return {}


def make_run(gates: bool = True, bias: float = 0.0) -> SimpleNamespace:
    config = default_config()
    config.data.image_size = 4
    return SimpleNamespace(
        config=config,
        label_space=SimpleNamespace(names=NAMES),
        preprocess=Preprocess(4, (0.0,) * 3, (1.0,) * 3),
        definition=Colours(gates),
        values={"bias": jnp.full(1, bias)},
        frozen={},
        mesh=make_mesh(config.mesh),
        label_axes=None,
    )


HALVES = dict.fromkeys(NAMES, 0.5)


def colour(red: int, green: int = 0, blue: int = 0) -> np.ndarray:
    return np.full((4, 4, 3), (red, green, blue), np.uint8)


def expected(red: int, green: int = 0, blue: int = 0) -> list[float]:
    return [1 / (1 + np.exp(-logit)) for logit in (*((c - 100) / 10 for c in (red, green, blue)), 0.0)]


@pytest.fixture(scope="module")
def predictor():
    return Predictor(make_run(), HALVES)


# ---------------------------------------------------------------------------------------------------------- from Python
@pytest.mark.parametrize(("pictures", "batch_size"), [(1, 8), (8, 8), (19, 8), (3, 1)])
def test_every_picture_has_its_scores_in_order(predictor, pictures, batch_size):
    results = predictor([colour(10 * row, 255 - 10 * row) for row in range(pictures)], batch_size=batch_size)
    assert [result.image for result in results] == [f"image {row}" for row in range(pictures)]
    for row, result in enumerate(results):
        assert list(result.scores) == list(NAMES)
        np.testing.assert_allclose(list(result.scores.values()), expected(10 * row, 255 - 10 * row), rtol=1e-4)
        assert result.labels == tuple(name for name in NAMES if result.scores[name] >= 0.5)
        assert (result.error, result.gates) == ("", None)


def test_thresholds_count_for_each_label_and_include_their_own_value():
    at_104 = float(1 / (1 + np.exp(-np.float64(np.float32(0.4)))))
    predictor = Predictor(make_run(), {"dark": 0.51, "blue": 0.0, "green": 1.0, "red": at_104 - 1e-6})
    (first, second) = predictor([colour(104, 255), colour(103, 255)])
    assert first.labels == ("red", "blue")
    assert second.labels == ("blue",)
    dark = Predictor(make_run(), HALVES)([colour(0)])[0]
    assert dark.labels == ("dark",), "σ(0) is 0.5, and that is enough"


def test_the_best_labels_come_best_first(predictor):
    pictures = [colour(90, 150, 110), colour(0, 0, 0), b""]
    (first, second, bad) = predictor(pictures, top_k=3)
    assert first.labels == ("green", "blue", "dark")
    assert second.labels == ("dark", "red", "green"), "of equal scores the first labels"
    assert len(first.scores) == 4
    assert bad.labels == ()
    assert bad.error


def test_gates_come_when_asked_for(predictor):
    for row, result in enumerate(predictor([colour(51 * row) for row in range(3)], gates=True)):
        assert set(result.gates) == {"g", "static"}
        np.testing.assert_allclose(result.gates["g"][:, 0], [0, 0.25, 0.5, 0.75])
        np.testing.assert_allclose(result.gates["g"][:, 1], [0.2 * row] * 4, rtol=1e-5)
        np.testing.assert_allclose(result.gates["static"][:, 1], 0, atol=1e-6, err_msg="the same for every picture")


def test_bad_pictures_do_not_disturb_the_others(predictor, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no picture")
    results = predictor([colour(200), tmp_path / "a.png", colour(100), "gone.png", colour(0)], batch_size=2)
    assert [result.error.partition(" as")[0] for result in results] == [
        "",
        f"cannot read {tmp_path / 'a.png'}",
        "",
        "cannot read gone.png",
        "",
    ]
    assert results[1].scores is None
    np.testing.assert_allclose([results[row].scores["red"] for row in (0, 2, 4)], expected(200, 100, 0)[:3], rtol=1e-4)


def test_results_come_while_pictures_are_read(predictor):
    """The first result is there long before the last picture is asked for."""
    asked = []

    class Watched(list):
        def __getitem__(self, row):
            asked.append(row)
            return super().__getitem__(row)

    pictures = Watched([colour(10)] * 500)
    stream = predictor.stream(pictures, batch_size=2)
    asked.clear()
    next(stream)
    named = len(pictures)  # each is looked at once for its name
    assert len(asked) - named < 100


def test_the_model_is_compiled_once(predictor):
    step = predictor._steps[False]
    before = step._cache_size()
    predictor([colour(1)] * 5, batch_size=3)
    predictor([colour(1)], batch_size=3)
    assert step._cache_size() == before + 1


def test_what_cannot_be_asked_is_refused(predictor, refusal):
    assert predictor([]) == []
    for top_k in (0, 5):
        assert refusal(predictor, [colour(1)], top_k=top_k).startswith(
            f"top_k is {top_k} and should be from 1 to the 4"
        )
    assert refusal(predictor, [colour(1)], batch_size=0).startswith("the batch size is 0")
    gateless = Predictor(make_run(gates=False), HALVES)
    assert "has no gates" in refusal(gateless, [colour(1)], gates=True)
    assert "blue" in refusal(Predictor, make_run(), {"red": 0.5, "green": 0.5, "dark": 0.5})
    diverged = Predictor(make_run(bias=np.nan), HALVES)
    assert "diverged" in refusal(diverged, [colour(1)])
    assert diverged([b""])[0].error, "padding and unread pictures have no scores that could be wrong"


def test_from_a_run_folder(tmp_path, monkeypatch, refusal):
    folder = RunFolder(tmp_path)
    run = make_run()
    run.config.eval.threshold = 0.25

    def open_run(opened, overrides):
        assert str(opened) == str(folder)
        return run

    monkeypatch.setattr(predict, "open_run", open_run)
    assert "thresholds.json" in refusal(Predictor.from_run, tmp_path)
    folder.write_json("thresholds.json", {"blue": 0.3, "red": 0.1, "dark": 0.4, "green": 0.2})
    assert Predictor.from_run(tmp_path).thresholds.tolist() == [0.1, 0.2, 0.3, 0.4]
    overridden = Predictor.from_run(tmp_path, [("data.threads", "1"), ("eval.threshold", "0.25")])
    assert overridden.thresholds.tolist() == [0.25] * 4


def test_batches_leave_little_to_pad():
    assert even_batch(5, 32, 1) == 5
    assert even_batch(64, 32, 1) == 32
    assert even_batch(65, 32, 1) == 22
    assert even_batch(65, 32, 8) == 24, "over 8 devices"
    assert even_batch(3, 32, 8) == 8
    assert even_batch(1_000_000, 32, 1) == 32


# ------------------------------------------------------------------------------------------------- the command line
@pytest.fixture
def command(tmp_path, monkeypatch, predictor):
    """A function that predicts with the files named, in a run folder of its own."""
    folder = RunFolder(tmp_path / "run")
    folder.write_json("config.json", {})
    (tmp_path / "run" / "checkpoints").mkdir()
    monkeypatch.setattr(Predictor, "from_run", lambda folder, overrides: predictor)
    monkeypatch.chdir(tmp_path)
    for row in range(5):
        Image.fromarray(colour(50 * row, 110)).save(f"{row}.png")
    Path("bad.png").write_text("no picture")

    def run(*given, output=None, overrides=(), **options):
        return predict_files(folder, given, output, overrides, **options)

    return run


def table(path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_a_picture(command, capsys):
    assert command("4.png", "0.png", "4.png") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "4.png  red 100 %  green 73 %  dark 50 %",
        "0.png  green 73 %  dark 50 %",
        "4.png  red 100 %  green 73 %  dark 50 %",
        out.splitlines()[-1],
    ]
    assert out.splitlines()[-1].startswith("3 of 3 pictures labelled (")
    assert err == ""
    rows = table("run/predictions.csv")
    assert list(rows[0]) == ["image", "labels", "error", *NAMES]
    assert [(row["image"], row["labels"]) for row in rows] == [
        ("4.png", "red;green;dark"),
        ("0.png", "green;dark"),
        ("4.png", "red;green;dark"),
    ]
    np.testing.assert_allclose([float(rows[1][name]) for name in NAMES], expected(0, 110), atol=1e-6)


def test_a_bad_picture_is_a_row_with_an_error(command, capsys):
    assert command("0.png", "bad.png", "1.png", output="p.csv", batch_size=1) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == "bad.png  unreadable"
    assert "2 of 3 pictures labelled" in out
    assert err.startswith("error: cannot read bad.png as an image: its content is none of JPEG")
    rows = table("p.csv")
    assert err == f"error: {rows[1].pop('error')}\n"
    assert rows[1] == {"image": "bad.png", "labels": "", **dict.fromkeys(NAMES, "")}
    assert rows[2]["labels"]


def test_many_bad_pictures_do_not_flood_the_screen(command, capsys):
    assert command(*["bad.png"] * 23, output="p.csv") == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 21
    assert err[-1] == "… and 3 more errors; p.csv has them all"
    assert sum(bool(row["error"]) for row in table("p.csv")) == 23


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


def test_rows_on_standard_output_and_words_elsewhere(command, capsys):
    assert command("4.png", "bad.png", output="-") == 2
    out, err = capsys.readouterr()
    assert [line.split(",")[0] for line in out.splitlines()] == ["image", "4.png", "bad.png"]
    assert "1 of 2 pictures labelled" in err
    assert command("4.png", "0.png", output="-", as_json=True) == 0
    assert [json.loads(line)["image"] for line in capsys.readouterr().out.splitlines()] == ["4.png", "0.png"]


def test_names_that_are_no_utf8_keep_their_bytes(command, capsys):
    name = os.fsdecode(b"\xff,\n.png")
    Image.fromarray(colour(0)).save(name)
    assert command(name, output="p.csv") == 0
    assert "�" in capsys.readouterr().out
    assert b'\n"\xff,\n.png",' in Path("p.csv").read_bytes()
    assert command(name, output="p.jsonl") == 0
    assert json.loads(Path("p.jsonl").read_text())["image"] == name


def test_thresholds_are_told_unless_they_are_the_default(command, capsys, predictor, monkeypatch):
    command("0.png")
    assert "threshold" not in capsys.readouterr().err
    file, names = Path("run/thresholds.json"), dict(zip(NAMES, (0.25, 0.5, 0.75, 0.5), strict=True))
    for cuts, stored, told in (
        ([0.25, 0.5, 0.75, 0.5], names, "0.25 to 0.75 (FILE)"),
        (
            [0.3, np.inf, 0.3, np.inf],
            {"thresholds": names, "split": "val"},
            "0.3 and never for 2 labels (FILE, fitted on val)",
        ),
        ([np.inf] * 4, names, "never for 4 labels (FILE)"),
    ):
        monkeypatch.setattr(predictor, "thresholds", np.array(cuts))
        file.write_text(json.dumps(stored))
        command("0.png")
        assert capsys.readouterr().err == f"thresholds: {told}\n".replace("FILE", str(file.resolve()))
    command("0.png", overrides=[("eval.threshold", "0.3")])
    assert "(--config.eval.threshold)" in capsys.readouterr().err
    command("0.png", top_k=1)
    assert "threshold" not in capsys.readouterr().err, "they do not count"


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
def test_what_cannot_be_done_is_refused_at_once(command, refusal, options, part):
    Path("folder.csv").mkdir()
    before = sorted(Path().rglob("*"))
    assert refusal(command, "0.png", **options).startswith(part)
    assert sorted(Path().rglob("*")) == before


def test_an_interrupted_run_leaves_the_old_file(command, predictor, monkeypatch):
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


def test_a_full_disk_is_told_in_one_sentence(command, predictor, monkeypatch, refusal):
    def full(*_, **__):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(predictor, "stream", full)
    assert refusal(command, "0.png", output="p.csv") == "cannot write p.csv: No space left on device"
    assert not list(Path().glob("p.csv*"))


# ------------------------------------------------------------------------------------------ many devices and processes
def predict_rows(target: str, given: list[str], **options) -> int:
    """What the processes below do: predict files with the model of this module."""
    predictor = Predictor(make_run(), HALVES)
    Predictor.from_run = lambda folder, overrides: predictor
    return predict_files(RunFolder(Path(target).parent), given, target, [], **options)


def assert_rows(path: Path) -> None:
    """Twenty pictures of rising red, the third and the eleventh bad."""
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
        Image.fromarray(colour(10 * row)).save(tmp_path / f"{row:02}.png")
    RunFolder(tmp_path).write_json("config.json", {})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "02.png").write_bytes(b"")
    (tmp_path / "10.png").write_bytes(b"no picture")
    return tmp_path


def test_on_eight_devices(twenty):
    code = (
        "import test_predict as t, sys, jax\nassert jax.device_count() == 8\n"
        f"sys.exit(t.predict_rows({str(twenty / 'p.csv')!r}, [{str(twenty)!r}], batch_size=3))"
    )
    process = start_python(code, devices=8, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    assert_rows(twenty / "p.csv")


@pytest.mark.slow
def test_on_two_processes(twenty):
    """Each reads its part; the first alone has the list and writes, and knows why pictures of the second are bad."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    code = (
        "import jax, sys\n"
        "jax.distributed.initialize('localhost:{port}', 2, {process}, shutdown_timeout_seconds=60)\n"
        "import test_predict as t\nfrom mlmoe_jax.errors import UserError\n"
        "try:\n    t.predict_rows('{target}', ['@{folder}/none.txt'])\n    sys.exit('nothing refused')\n"
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
    assert "cannot read" not in errors[1], "the first process tells"


@pytest.mark.slow
def test_the_reader_of_a_pipe_may_go_away_and_a_signal_leaves_nothing(twenty):
    def running(target: str, pictures: int, **options) -> subprocess.Popen:
        given = f"[{str(twenty / '03.png')!r}] * {pictures}"
        code = f"import test_predict as t\nt.predict_rows({target!r}, {given}, batch_size=1)"
        return start_python(code, stderr=subprocess.PIPE, cwd=twenty, **options)

    process = running("-", 3000, stdout=subprocess.PIPE)
    assert process.stdout.readline().startswith("image,")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 0, err
    assert "Traceback" not in err
    assert "Exception" not in err

    process = running("p.csv", 100_000)
    while not list(twenty.glob(".p.csv.*.tmp")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert not list(twenty.glob("p.csv*"))


def test_prediction_needs_no_metrics_and_no_training():
    code = (
        "import sys, mlmoe_jax.inference.predict\n"
        "ours = {name: module for name, module in sys.modules.items() if name.startswith('mlmoe_jax.')}\n"
        "sys.exit(any(name.split('.')[1] in ('evaluation', 'training') for name in ours)"
        " or any('optax' in vars(module) for module in ours.values()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
