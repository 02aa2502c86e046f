"""A run folder from before the modules moved into rooms is restored, evaluated, used for prediction and resumed.

Its config has the keys of that version, including those that were renamed later; `fixtures/make_run_before_rooms.py`
made it.
"""

import csv
import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.paths import FIXTURES
from helpers.tiny import use_scenes
from PIL import Image

from mlmoe_jax.data.sources import digits
from mlmoe_jax.main import main
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import TIMING
from mlmoe_jax.runs.restore import open_run

OLD = FIXTURES / "run_before_rooms"
EXPECTED = json.loads((OLD / "expected.json").read_text())
# Another processor or another version of XLA rounds differently, which can change the order of two scores.
CLOSE, RANKED = {"rtol": 1e-4, "atol": 1e-4}, 5e-3


def names_of_then(metrics: dict[str, float]) -> set[str]:
    """Return the names of metrics without those that were added since."""
    return {name for name in metrics if "_macro@" not in name}


def close(ours: dict[str, float], theirs: dict[str, float], tolerance: float = RANKED) -> None:
    """Assert that all metrics have the same names, but for those added since, and nearly the same values."""
    assert names_of_then(ours) == theirs.keys()
    np.testing.assert_allclose([ours[name] for name in theirs], list(theirs.values()), atol=tolerance)


@pytest.fixture
def stopped(monkeypatch, tmp_path) -> Path:
    """The old run, stopped at step 5 of 8, with its number of scenes."""
    use_scenes(monkeypatch)
    return Path(shutil.copytree(OLD / "stopped", tmp_path / "run"))


def test_every_value_is_restored_bit_for_bit(stopped):
    run = open_run(RunFolder(stopped))
    assert (run.step, run.notes["kind"]) == (4, "raw")
    values = jax.device_get(run.values)
    assert {path: list(value.shape) for path, value in values.items()} == EXPECTED["shapes"]
    assert {path: hashlib.sha256(value.tobytes()).hexdigest() for path, value in values.items()} == EXPECTED["sha256"]


def test_it_is_evaluated_and_predicts_as_before(stopped, tmp_path, capsys):
    splits = "--config.data.test_splits=val,test,test_shift"
    assert main(["--mode=eval", f"--workdir={stopped}", splits, "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated.keys() == EXPECTED["evaluated"].keys()
    for split, metrics in evaluated.items():
        close(metrics, EXPECTED["evaluated"][split])

    for row, image in enumerate(digits.open_scenes("test").images.array[:3]):
        Image.fromarray(image).save(tmp_path / f"{row}.png")
    images, table = [f"{tmp_path}/{row}.png" for row in range(3)], tmp_path / "predictions.csv"
    assert main(["--mode=predict", f"--workdir={stopped}", "--images", *images, f"--output={table}"]) == 0
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    for ours, theirs in zip(rows, EXPECTED["predicted"], strict=True):
        assert ours.keys() == theirs.keys()
        assert (Path(ours["image"]).name, ours["labels"]) == (theirs["image"], theirs["labels"])
        scores = [[float(row[label]) for label in digits.CLASSES] for row in (ours, theirs)]
        np.testing.assert_allclose(*scores, **CLOSE)


def test_its_command_resumes_it_and_ends_like_an_uninterrupted_run(stopped, capsys):
    assert main([*EXPECTED["command"], f"--workdir={stopped}", "--json"]) == 0
    printed, final = capsys.readouterr(), EXPECTED["final"]
    assert "from step 5 of 8" in printed.err
    results = json.loads(printed.out)
    assert results.keys() == final["results"].keys()
    for split, metrics in results.items():
        close(metrics, final["results"][split])

    rows = RunFolder(stopped).rows()
    assert [row["step"] for row in rows] == list(range(1, 9))
    for ours, theirs in zip(rows, final["rows"], strict=True):
        assert names_of_then(ours) - set(TIMING) == theirs.keys()
        assert ours["step"] > 5 or {name: ours[name] for name in theirs} == theirs, "rows before the stop are unchanged"
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=RANKED, err_msg=name)
    values = jax.device_get(open_run(RunFolder(stopped)).values)
    assert values.keys() == final["norms"].keys()
    for path, norm in final["norms"].items():
        np.testing.assert_allclose(np.linalg.norm(values[path]), norm, **CLOSE, err_msg=path)
