"""Commands as a user runs them: on a reduced digits, and on stored scores."""

import pytest
from helpers import tiny
from helpers.commands import printed, succeeded
from helpers.scored_run import drawn_split, write_run

from mlmoe_jax.runs.decisions import read_thresholds


# --------------------------------------------------------------------------------------------------------- on digits
@pytest.fixture
def digits(command, monkeypatch):
    """Return a function that runs a command in this process, on few scenes."""
    tiny.use(monkeypatch)
    return lambda mode, *flags: command(mode, "--config=mlvpt_digits", *flags)


def test_a_sample_of_the_data_is_checked(digits):
    done = digits("data", "--json", "--sample=10", "--config.loss.gamma=3")
    assert "warning: loss.gamma has no effect, because loss.kind is asymmetric" in done.stderr
    splits = printed(done)["splits"].values()
    assert [(split["images"], split["decoded"]) for split in splits] == [(60, 10), *[(40, 10)] * 3]


def test_packed_data_are_used_as_the_command_says(digits, tmp_path):
    done = succeeded(digits("pack", f"--output={tmp_path / 'packed'}", "--config.data.workers=1"))
    heading, train, *_ = (line.split() for line in done.stdout.splitlines())
    assert (heading, train) == (["split", "images", "files", "MB"], ["train", "60", "1", "0.6"])
    use = done.stdout.splitlines()[-1].partition(": ")[2].split()
    assert use == ["--config.data.name=packed", f"--config.data.root={tmp_path / 'packed'}"]
    checked = succeeded(digits("data", *use)).stdout
    assert checked.startswith("data set packed in ")
    assert checked.endswith("no problems found\n")


# ------------------------------------------------------------------------------------------------------ stored scores
@pytest.fixture
def scored(tmp_path):
    splits = [drawn_split(name, 50, seed=seed) for seed, name in enumerate(("val", "test"))]
    return [write_run(tmp_path / name, *splits) for name in "ab"]


def test_runs_are_fitted_calibrated_and_compared(scored, command):
    folders = [f"--workdir={run}" for run in scored]
    fitted = printed(command("thresholds", folders[0], "--config.thresholds.per=global", "--json"))
    assert (read_thresholds(scored[0]).values, "global") == (fitted["thresholds"], fitted["per"])
    assert printed(command("calibrate", folders[0], "--json")) == read_thresholds(scored[0]).calibration
    (compared,) = printed(command("compare", *folders, "--split=val", "--json")).values()
    assert (compared["split"], compared["metrics"]["mAP"]["difference"]) == ("val", 0)


@pytest.mark.parametrize(
    ("mode", "key", "says"),
    [
        ("predict", "data.table", True),
        ("predict", "data.exif", False),
        ("eval", "serve.folder", True),
        ("eval", "data.table", False),
        ("eval", "report.samples", False),
    ],
)
def test_keys_that_a_mode_never_reads_are_named(scored, command, mode, key, says):
    images = ["--images=none"] if mode == "predict" else []
    done = command(mode, f"--workdir={scored[0]}", *images, f"--config.{key}=apply")
    assert (f"warning: {key} has no effect in mlmoe {mode}" in done.stderr) == says


def test_keys_without_an_effect_in_any_run_of_a_sweep_are_named(command, tmp_path):
    keys = ("--sweep=loss.gamma=1,2", "--sweep=loss.kind=asymmetric,bce", "--config.loss.positive_weight=2")
    done = command("--config=mlvpt_digits", f"--workdir={tmp_path}", *keys, "--sweep=train.epochs=0")
    assert done.stderr.splitlines()[0] == "warning: loss.gamma has no effect, because loss.kind is asymmetric"
    assert done.stderr.count("warning") == 1
