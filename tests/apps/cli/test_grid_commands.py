"""`--sweep` and `--mode=reproduce` as a user runs them: trained, interrupted, resumed, and read again."""

import contextlib

import pytest
from helpers import tiny
from helpers.commands import csv_rows, printed, succeeded
from helpers.scored_run import stored_metrics
from PIL import Image

from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.preemption import StopRequest


@pytest.fixture
def run(command, monkeypatch, tmp_path):
    """Return a function that runs the program with short trainings on few scenes and a backbone of one block."""
    tiny.use_scenes(monkeypatch, train=60, val=40, test=40, test_shift=40)
    tiny.use_vit(monkeypatch, depth=1, patch=16)
    settings = ("model.backbone.weights=none", "train.batch_size=20", "eval.batch_size=40", "eval.every_epochs=2")
    keys = [f"--config.{setting}" for setting in settings]
    return lambda *flags: command(*flags, f"--workdir={tmp_path / 'all'}", *keys)


@contextlib.contextmanager
def stopping_in(monkeypatch, folder, step: int):
    """Request a stop, as SIGTERM does, once the run in `folder` has written the row of `step`."""
    asked, append = StopRequest(), RunFolder.append_row

    def noticing(self, row):
        append(self, row)
        if str(self) == str(folder) and row["step"] == step:
            asked.set()

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_row", noticing)
        patch.setattr("mlmoe_jax.training.loop.stop_requests", lambda: contextlib.nullcontext(asked))
        yield


@pytest.mark.slow
def test_an_interrupted_sweep_resumes(run, monkeypatch, tmp_path):
    folder, key = tmp_path / "all", "optim.learning_rate"
    flags = ("--config=linear_probe:dataset=digits", "--config.train.epochs=2", "--config.train.log_every=1")
    with stopping_in(monkeypatch, folder / "learning_rate=0.01", step=3):
        done = run(*flags, f"--sweep=config.{key}=1e-3,1e-2")
    assert done.returncode == 130, done.stderr
    assert "stopped at step 3 of 6" in done.stderr.partition("run 2 of 2, learning_rate=0.01\n")[2]
    assert [row["run"] for row in csv_rows(folder / "sweep.csv")] == ["learning_rate=0.001"]
    finished = (folder / "learning_rate=0.001" / "results.json").stat().st_mtime_ns

    done = run(*flags, f"--sweep=config.{key}=1e-3,1e-2", "--json")
    assert "run 1 of 2, learning_rate=0.001: already finished" in done.stderr
    assert "resuming from step 3 of 6" in done.stderr
    assert (folder / "learning_rate=0.001" / "results.json").stat().st_mtime_ns == finished
    runs = printed(done)["runs"]
    assert [one["config"] for one in runs] == [{key: 0.001}, {key: 0.01}]
    for one, row in zip(runs, csv_rows(folder / "sweep.csv"), strict=True):
        stored = stored_metrics(folder / one["run"])
        assert one["results"] == stored
        assert row[key] == str(one["config"][key])
        assert float(row["test/mAP"]) == stored["test"]["mAP"]
    assert Image.open(folder / "sweep.png").format == "PNG"

    done = succeeded(run(*flags, f"--sweep={key}=1e-2,1e-3"))
    shown = [line.split()[:3] for line in done.stdout.splitlines()]
    assert shown[0] == ["mAP,", "%", "val"]
    assert shown[1:] == [
        [one["run"], *(f"{100 * one['results'][split]['mAP']:.2f}" for split in ("val", "test"))]
        for one in reversed(runs)
    ]


def test_keys_without_an_effect_in_any_run_are_named(run):
    keys = ("--sweep=loss.gamma=1,2", "--sweep=loss.kind=asymmetric,bce", "--config.loss.positive_weight=2")
    done = run("--config=mlvpt_digits", *keys, "--sweep=train.epochs=0")
    assert done.stderr.splitlines()[0] == "warning: loss.gamma has no effect, because loss.kind is asymmetric"
    assert done.stderr.count("warning") == 1


@pytest.mark.slow
def test_a_row_is_trained_measured_and_read_again(run, tmp_path):
    flags = ("--mode=reproduce", "--dataset=digits", "--config.train.epochs=1")
    done = succeeded(run(*flags, "--table=mlvpt.2", "--only=VPT,DINOv2-B,224"))
    assert "run 1 of 1, vpt,dataset=digits" in done.stderr
    stored = stored_metrics(tmp_path / "all" / "vpt,dataset=digits")["test"]
    expected = [stored["mAP_envelope"], stored["CF1@prior_matched_transductive"]]
    line = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["ours"])
    assert line.split()[1:3] == [f"{100 * value:.2f}" for value in expected]

    again = succeeded(run(*flags, "--table=mlvpt.4", "--only=VPT"))  # another table with the same run
    assert "run 1 of 1, vpt,dataset=digits: already finished" in again.stderr
    rows = {
        (row["row"].partition(",")[0], row["column"]): row for row in csv_rows(tmp_path / "all" / "mlvpt.4-digits.csv")
    }
    assert float(rows["VPT", "mAP"]["ours"]) == pytest.approx(100 * stored["mAP_envelope"])
    assert rows["ML-VPT", "mAP"]["ours"] == ""
    assert float(rows["ML-VPT", "trainable, M"]["ours"]) > 0  # costs need no training
