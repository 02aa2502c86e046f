"""Every mode with its run folder in an object store, which can neither append nor rename: the real program, gcsfs and
TensorStore against a store of our own on this machine.
"""

import json

import pytest
from helpers import fake_store, small_program
from PIL import Image

RUN = "gs://bucket/runs/a"
SMALL = ("--config=linear_probe:dataset=digits", "--config.model.backbone.weights=none", *small_program.SMALL)

pytestmark = pytest.mark.slow  # a dozen programs, half a minute each


@pytest.fixture(scope="module")
def store():
    with fake_store.running() as store:
        yield store
        assert not store.refused


@pytest.fixture(scope="module")
def program(store, tmp_path_factory):
    """A function that starts the program, with Google's libraries connected to the local store."""
    run = small_program.program_in(tmp_path_factory.mktemp("program"), **fake_store.environment(store))

    def start(*arguments):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return start


@pytest.fixture(scope="module")
def trained(program, store):
    return json.loads(program(*SMALL, f"--workdir={RUN}", "--json"))


def test_a_training_leaves_a_complete_run(trained, store):
    names = {name.removeprefix("runs/a/").partition("/")[0] for _, name in store.objects}
    assert {"config.json", "checkpoints", "metrics.jsonl", "results.json", "scores", "per_class.csv"} <= names
    rows, _ = store.objects["bucket", "runs/a/metrics.jsonl"]
    assert [json.loads(row)["step"] for row in rows.splitlines()] == list(range(1, 9))


def test_every_other_mode(program, trained, store, tmp_path):
    assert json.loads(program("--mode=eval", f"--workdir={RUN}", "--json"))["test"] == trained["test"]
    program("--mode=thresholds", f"--workdir={RUN}")
    for number in range(3):
        Image.new("RGB", (40, 30), (80 * number, 10, 200)).save(tmp_path / f"{number}.png")
    program("--mode=predict", f"--workdir={RUN}", f"--images={tmp_path}", f"--output={tmp_path / 'rows.csv'}")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 4
    program("--mode=report", f"--workdir={RUN}")
    assert b"<html" in store.objects["bucket", "runs/a/report.html"][0]
    program("--mode=export", f"--workdir={RUN}", f"--output={tmp_path / 'model.safetensors'}")
    imported = "gs://bucket/runs/imported"
    weights = f"--config.init_from={tmp_path / 'model.safetensors'}"
    program("--mode=import", *SMALL, weights, f"--workdir={imported}")
    assert json.loads(program("--mode=eval", f"--workdir={imported}", "--json"))["test"] == trained["test"]
    compared = json.loads(program("--mode=compare", f"--workdir={RUN}", f"--workdir={imported}", "--json"))
    assert compared["test"]["metrics"]["mAP"]["difference"] == 0


def test_a_pruning_leaves_its_trainings_and_the_chosen_one(program, store):
    run = "gs://bucket/runs/pruned"
    of_e2vpt = ("--config=e2vpt:dataset=digits", *SMALL[1:])
    levels = ("--config.prune.token_levels=(0.5,)", "--config.prune.segment_levels=(0.5,)")
    results = json.loads(program("--mode=prune", *of_e2vpt, *levels, f"--workdir={run}", "--json"))
    table = store.objects["bucket", "runs/pruned/prune.csv"][0].decode().splitlines()
    assert len(table) == 2  # the heading, and the only level
    assert json.loads(program("--mode=eval", f"--workdir={run}", "--json"))["test"] == results["test"]
