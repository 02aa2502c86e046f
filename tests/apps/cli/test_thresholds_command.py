"""`--mode=thresholds` and `--mode=compare` as a user runs them."""

import pytest
from helpers.commands import printed
from helpers.scored_run import drawn_split, write_run

from mlmoe_jax.runs.thresholds import read_thresholds


@pytest.fixture
def runs(tmp_path):
    splits = [drawn_split(name, 20, seed=seed) for seed, name in enumerate(("val", "test"))]
    return [write_run(tmp_path / name, *splits) for name in "ab"]


def test_thresholds_are_fitted_and_runs_compared(runs, command):
    folders = [f"--workdir={run}" for run in runs]
    fitted = printed(command("thresholds", folders[0], "--config.thresholds.per=global", "--json"))
    assert (read_thresholds(runs[0]).values, "global") == (fitted["thresholds"], fitted["per"])
    (compared,) = printed(command("compare", *folders, "--split=test", "--json")).values()
    assert (compared["split"], compared["metrics"]["mAP"]["difference"]) == ("test", 0)


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
