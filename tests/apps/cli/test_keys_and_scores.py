"""What commands print about scores, and about keys of the config that they do not use."""

import pytest
from helpers.commands import printed
from helpers.scored_run import drawn_split, write_run

from mlmoe_jax.runs.thresholds import read_thresholds


@pytest.fixture
def runs(tmp_path):
    splits = [drawn_split(name, 60, seed=seed) for seed, name in enumerate(("val", "test"))]
    return [write_run(tmp_path / name, *splits) for name in "ab"]


def test_runs_are_fitted_calibrated_and_compared(runs, command):
    folders = [f"--workdir={run}" for run in runs]
    fitted = printed(command("thresholds", folders[0], "--config.thresholds.per=global", "--json"))
    assert (read_thresholds(runs[0]).values, "global") == (fitted["thresholds"], fitted["per"])
    assert printed(command("calibrate", folders[0], "--json")) == read_thresholds(runs[0]).calibration
    (compared,) = printed(command("compare", *folders, "--split=val", "--json")).values()
    assert (compared["split"], compared["metrics"]["mAP"]["difference"]) == ("val", 0)


@pytest.mark.parametrize(
    ("mode", "key", "says"),
    [
        ("predict", "data.table", True),
        ("predict", "data.exif", False),
        ("eval", "serve.name", True),
        ("eval", "data.table", False),
    ],
)
def test_keys_that_a_mode_never_reads_are_named(runs, command, mode, key, says):
    images = ["--images=none"] if mode == "predict" else []
    done = command(mode, f"--workdir={runs[0]}", *images, f"--config.{key}=apply")
    assert (f"warning: {key} has no effect in --mode={mode}" in done.stderr) == says


def test_keys_without_an_effect_in_any_run_of_a_sweep_are_named(command, tmp_path):
    keys = ("--sweep=loss.gamma=1,2", "--sweep=loss.kind=asymmetric,bce", "--config.loss.positive_weight=2")
    done = command("--config=mlvpt_digits", f"--workdir={tmp_path}", *keys, "--sweep=train.epochs=0")
    assert done.stderr.splitlines()[0] == "warning: loss.gamma has no effect, because loss.kind is asymmetric"
    assert done.stderr.count("warning") == 1
