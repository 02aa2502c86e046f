"""`--mode=thresholds` and `--mode=compare` as a user runs them."""

import json

import pytest
from helpers.scored_run import drawn_split, write_run

from mlmoe_jax.main import main
from mlmoe_jax.runs.thresholds import read_thresholds


@pytest.fixture
def runs(tmp_path):
    splits = [drawn_split(name, 20, seed=seed) for seed, name in enumerate(("val", "test"))]
    return [write_run(tmp_path / name, *splits) for name in "ab"]


def test_thresholds_are_fitted(runs, capsys):
    assert main(["--mode=thresholds", f"--workdir={runs[0]}", "--config.thresholds.per=global", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert read_thresholds(runs[0]).values == printed["thresholds"]
    assert printed["per"] == "global"


def test_two_runs_are_compared(runs, capsys):
    folders = [f"--workdir={run}" for run in runs]
    assert main(["--mode=compare", *folders, "--split=test", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["test"]
    assert printed["test"]["metrics"]["mAP"]["difference"] == 0


@pytest.mark.parametrize(
    ("mode", "extra", "count", "part"),
    [
        ("compare", [], 1, "needs --workdir=FOLDER twice"),
        ("compare", ["--config=mlvpt_digits"], 2, "unrecognized arguments: --config=mlvpt_digits"),
        ("compare", ["--config.seed=1"], 2, "unrecognized arguments: --config.seed=1"),
        ("thresholds", ["--split=val"], 1, "unrecognized arguments: --split=val"),
    ],
)
def test_user_errors_are_one_sentence(runs, capsys, mode, extra, count, part):
    assert main([f"--mode={mode}", *(f"--workdir={run}" for run in runs[:count]), *extra]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert part in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("mode", "key", "says"),
    [
        ("predict", "data.table", True),
        ("predict", "data.exif", False),
        ("eval", "serve.name", True),
        ("eval", "data.table", False),
    ],
)
def test_keys_that_a_mode_never_reads_are_named(runs, capsys, mode, key, says):
    images = ["--images=none"] if mode == "predict" else []
    main([f"--mode={mode}", f"--workdir={runs[0]}", *images, f"--config.{key}=apply"])
    assert (f"warning: {key} has no effect in --mode={mode}" in capsys.readouterr().err) == says
