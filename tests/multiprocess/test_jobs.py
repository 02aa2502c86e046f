"""Jobs of several local processes: the results that they compute and write, and the behavior if one fails."""

import csv
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.jobs import Job, until
from helpers.runs import assert_same_training, same_rows
from helpers.scored_run import stored_metrics, stored_scores

from mlmoe_jax.config import load_config
from mlmoe_jax.evaluation.evaluate import evaluate_run
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import open_run
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.training.loop import train
from tools.faults.arrays import array_digests


def steps(folder: Path) -> list[int]:
    """Return the steps of the rows of metrics.jsonl written so far."""
    return [row["step"] for row in RunFolder(folder).rows()]


def checkpoints(folder: Path) -> list[int]:
    """Return the steps of the finished checkpoints."""
    found = (folder / "checkpoints").glob("*") if (folder / "checkpoints").exists() else ()
    return sorted(int(path.name) for path in found if path.name.isdigit())


def scores(folder: Path) -> np.ndarray:
    return np.concatenate([split.scores for split in stored_scores(RunFolder(folder)).values()])


def close(one: dict, other: dict, tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=tolerance, err_msg=name)


def finished(*jobs: Job) -> None:
    for job in jobs:
        assert set(job.wait()) == {0}, job.messages(0)


# -------------------------------------------------------------------------------------------------------- agreeing
@pytest.mark.slow
def test_processes_agree(start_job, tmp_path):
    job = start_job(2, tmp_path, program="agreeing.py")
    assert job.wait() == [0, 0], job.messages(0) + job.messages(1)
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    for number, of_process in enumerate(found):
        assert of_process["process"] == [number, 2]
        assert of_process["gathered"] == [{"who": "", "of": 0}, {"who": "é", "of": 1}]
        assert of_process["first"] == 10
        assert of_process["votes"] == [False, False, True, False]
        assert not of_process["addressable"]
        assert of_process["whole"] == of_process["values"] == {"parts": True, "everywhere": True}
        assert not of_process["sharded"], "the kernel is on both processes, a half each"
        assert of_process["exported"]
        assert of_process["transferred"]
        assert of_process["restored"] == 1, "no process uses a checkpoint that is damaged for one of them"
    assert found[0]["rounds"] == found[1]["rounds"] in range(5, 25)
    digest = hashlib.sha256(np.arange(12, dtype=np.float32).tobytes()).hexdigest()
    assert array_digests(tmp_path)["state"] == {"parts": digest, "everywhere": digest}
    assert [job.printed(number) for number in range(2)] == ["0\n", ""], (
        "only the first process prints, and Gloo does not"
    )
    assert "checkpoint 2 is damaged and was skipped: a broken disk" in job.messages(0)


# -------------------------------------------------------------------------------------------------------- training
@pytest.mark.budget(60)  # three processes that train
def test_two_processes_train_and_evaluate_as_one_does(start_job, config_file, backbone, tmp_path):
    job = start_job(2, f"--config={config_file}", f"--workdir={tmp_path / 'two'}", "--config.train.epochs=1", "--json")
    train(load_config(str(config_file), [("train.epochs", "1")]), RunFolder(tmp_path / "one"))
    finished(job)

    # The batches are the same, but they are summed in other parts, which round differently.
    np.testing.assert_allclose(scores(tmp_path / "two"), scores(tmp_path / "one"), atol=1e-6)
    ours, wanted = (same_rows(RunFolder(tmp_path / name).rows()) for name in ("two", "one"))
    assert [row["step"] for row in ours] == [1, 2]
    for mine, its in zip(ours, wanted, strict=True):
        close(mine, its)

    with open(tmp_path / "two" / "skipped_images.csv") as file:
        skipped = {(row["split"], row["image"]) for row in csv.DictReader(file)}
    broken = [path for path in config_file.parent.rglob("*.png") if path.read_bytes() == b"not an image"]
    assert skipped == {(path.parent.name, f"{path.parent.name}/{path.name}") for path in broken}
    trained_scores, trained_results = scores(tmp_path / "two"), stored_metrics(tmp_path / "two")
    assert json.loads(job.printed(0)) == trained_results, "stdout has only the results"

    # 11 and 13 images on two processes, and the same weights in one: equal to the last digit.
    alone = evaluate_run(RunFolder(tmp_path / "two"), [("data.test_splits", "val,test")])
    assert dump_json(alone) == dump_json(trained_results)
    assert np.array_equal(trained_scores, scores(tmp_path / "two"), equal_nan=True)

    assert job.printed(1) == ""
    assert "training images" in job.messages(0)
    assert "training images" not in job.messages(1)


@pytest.mark.slow
def test_processes_equal_one_with_as_many_devices_bit_for_bit(start_job, config_file, tmp_path):
    """Of two: the order of sums of more parts differs within a process and between processes."""
    flags = [f"--config={config_file}", "--config.ema.decay=0.9"]
    finished(
        start_job(2, *flags, f"--workdir={tmp_path / 'two'}"),
        start_job(1, *flags, f"--workdir={tmp_path / 'one'}", devices=2),
    )
    assert_same_training(RunFolder(tmp_path / "two"), RunFolder(tmp_path / "one"))


# ---------------------------------------------------------------------------------------------------------------- death
@pytest.mark.slow
@pytest.mark.parametrize(("count", "victim"), [(4, 2), (2, 0)])
def test_a_killed_process_ends_the_job_which_resumes_from_the_last_checkpoint(
    start_job, config_file, backbone, tmp_path, count, victim
):
    """Also with another number of processes; the weights equal those of an uninterrupted training."""
    flags = [f"--config={config_file}", "--config.train.epochs=20", "--config.eval.every_epochs=4"]
    folder, other = tmp_path / "killed", tmp_path / "other"
    job = start_job(count, *flags, f"--workdir={folder}")
    until(lambda: len(checkpoints(folder)) and checkpoints(folder)[-1] >= 6)
    job.processes[victim].send_signal(signal.SIGKILL)
    codes = job.wait(60)
    assert codes[victim] == -signal.SIGKILL
    assert 0 not in codes
    assert all("error" in job.messages(number) for number in range(count) if number != victim)
    at = checkpoints(folder)[-1]
    assert at < 40, "killed before the end"

    shutil.copytree(folder, other)
    finished(start_job(count, *flags, f"--workdir={tmp_path / 'whole'}"))
    for processes, resumed in ((count, folder), (3, other)):
        again = start_job(processes, *flags, f"--workdir={resumed}")
        finished(again)
        assert f"resuming from step {at} of 40" in again.messages(0)
    assert_same_training(RunFolder(folder), RunFolder(tmp_path / "whole"))
    values = [jax.device_get(open_run(RunFolder(path)).values) for path in (other, tmp_path / "whole")]
    close(*values, tolerance=1e-5)


# ----------------------------------------------------------------------------------------------------------- stopping
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_one_process_stops_all_after_the_same_step(start_job, config_file, tmp_path, number):
    folder = tmp_path / "stopped"
    flags = [f"--config={config_file}", "--config.train.epochs=200", f"--workdir={folder}"]
    flags.append("--config.checkpoint.every_epochs=1000")
    job = start_job(3, *flags)
    until(lambda: len(steps(folder)) >= 5)
    os.kill(job.processes[2].pid, number)
    assert job.wait(120) == [130] * 3, job.messages(0)
    [step] = checkpoints(folder)
    assert steps(folder) == list(range(1, step + 1))
    assert all(f"stopped at step {step} of 400" in job.messages(number) for number in range(3))


@pytest.mark.slow
def test_a_user_error_ends_every_process_and_modes_for_one_run_in_the_first(start_job, config_file, tmp_path):
    job = start_job(3, f"--config={config_file}", "--config.train.batch_size=10", f"--workdir={tmp_path / 'none'}")
    summary = start_job(2, f"--config={config_file}", "--mode=summary", "--json")
    codes = job.wait(120)
    assert codes[0] == 2
    assert 0 not in codes
    assert "error: train.batch_size is 10, which is not a multiple of 3" in job.messages(0)
    assert not (tmp_path / "none").exists()
    finished(summary)
    assert json.loads(summary.printed(0))["params"]["total"] > 0
    assert summary.printed(1) == summary.messages(1) == ""


@pytest.mark.slow
def test_a_process_without_its_peers_ends_and_reports_the_missing_ones(start_job, config_file, tmp_path):
    flags = [f"--config={config_file}", f"--workdir={tmp_path / 'none'}"]
    own = {"MLMOE_PROCESSES": "2", "MLMOE_START_SECONDS": "5"}
    alone = start_job(1, *flags, own={0: own | {"MLMOE_PROCESS": "1", "MLMOE_COORDINATOR": "127.0.0.1:9"}})
    assert alone.wait(60) == [2]
    assert "error: cannot reach MLMOE_COORDINATOR=127.0.0.1:9 after 5 s" in alone.messages(0)
    first = start_job(1, *flags, own={0: own | {"MLMOE_PROCESS": "0", "MLMOE_COORDINATOR": "127.0.0.1:45671"}})
    assert first.wait(60) == [-signal.SIGABRT], "JAX ends it"
    assert "another task died" in first.messages(0)
