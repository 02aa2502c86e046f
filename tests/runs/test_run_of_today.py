"""A run folder of commit fa31d6f is restored, evaluated and resumed; `fixtures/make_run_of_today.py` made it."""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.paths import FIXTURES
from helpers.tiny import use_scenes

from mlmoe_jax.main import main
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.metric_log import TIMING
from mlmoe_jax.runs.restore import open_run

STORED = FIXTURES / "run_of_today"
EXPECTED = json.loads((STORED / "expected.json").read_text())
# Another processor or another version of XLA rounds differently, which can change the order of two scores.
CLOSE, RANKED = {"rtol": 1e-4, "atol": 1e-4}, 5e-3


def close(ours: dict[str, float], theirs: dict[str, float], tolerance: float = RANKED) -> None:
    """Assert that the metrics of both have nearly the same values; some have been added or deleted since."""
    names = sorted(ours.keys() & theirs.keys())
    assert {"mAP", "CF1@0.5", "loss"} & set(names)
    np.testing.assert_allclose([ours[name] for name in names], [theirs[name] for name in names], atol=tolerance)


@pytest.fixture
def stopped(monkeypatch, tmp_path) -> Path:
    """The run, stopped at step 5 of 8, with its number of scenes."""
    use_scenes(monkeypatch, train=100, val=40, test=40, test_shift=40)
    return Path(shutil.copytree(STORED / "stopped", tmp_path / "run"))


def test_every_value_is_restored_bit_for_bit(stopped):
    run = open_run(RunFolder(stopped))
    assert (run.step, run.notes["kind"]) == (4, "raw")
    values = jax.device_get(run.values)
    assert {path: list(value.shape) for path, value in values.items()} == EXPECTED["shapes"]
    assert {path: hashlib.sha256(value.tobytes()).hexdigest() for path, value in values.items()} == EXPECTED["sha256"]


def test_it_is_evaluated_as_before(stopped, capsys):
    splits = "--config.data.test_splits=val,test,test_shift"
    assert main(["--mode=eval", f"--workdir={stopped}", splits, "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated.keys() == EXPECTED["evaluated"].keys()
    for split, metrics in evaluated.items():
        close(metrics, EXPECTED["evaluated"][split])


@pytest.mark.slow
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
        names = theirs.keys() & ours.keys() - set(TIMING)
        assert {"loss", "learning_rate", "gradient_norm"} <= names
        same = all(ours[name] == theirs[name] for name in names)
        assert ours["step"] > 5 or same, "rows before the stop are unchanged"
        for name in names:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=RANKED, err_msg=name)
    values = jax.device_get(open_run(RunFolder(stopped)).values)
    assert values.keys() == final["norms"].keys()
    for path, norm in final["norms"].items():
        np.testing.assert_allclose(np.linalg.norm(values[path]), norm, **CLOSE, err_msg=path)
