"""`python -m benchmarks.run`: every suite on a tiny model, in this process, and the parts that compare processes."""

import importlib.util
import json
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import tiny
from helpers.paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks" / "peers"))

import agreement
import jax_worker
import protocol

from benchmarks import harness, run
from benchmarks.suites import cases, kernels, limit, start, step
from benchmarks.suites.attention import WAYS
from mlmoe_jax.models.layers import dispatch
from mlmoe_jax.models.macs import count_macs

TORCH = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
QUICK = run.settings_of(run.arguments(["--quick"]), "cpu")
# A peer that needs nothing but Python. With SLOW=1 each of its steps takes 10 ms longer.
PEER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import protocol
def build(case):
    if case["batch"] > 100:
        raise MemoryError("too large")
    print("a library prints")
    return protocol.Program(lambda: time.sleep(0.002 + 0.01 * int(os.environ["SLOW"])), facts={"built": case["batch"]})
facts = lambda: {"platform": "cpu", "devices": ["cpu"], "packages": {"peer": "1"}}
def double(value):
    return {"value": 2 * value}
protocol.serve(protocol.Session(facts, build, lambda: None, [double]))
"""


class HereWorker(harness.Worker):
    """A worker that answers in this process, so that nothing is imported twice."""

    def __init__(self, side: harness.Side):
        self.side = side
        functions = jax_worker.FUNCTIONS
        session = protocol.Session(jax_worker.facts, jax_worker.build, jax_worker.device_peak, functions)
        self._session, self.facts = session, session.answer({"do": "facts"})

    def ask(self, request: str, **arguments):
        answer = self._session.answer(json.loads(json.dumps({"do": request, **arguments})))
        if "error" in answer:
            raise harness.Failed(answer["error"])
        return json.loads(json.dumps(answer))

    def close(self) -> None:
        pass


class Here(harness.Workers):
    def fresh(self, side: harness.Side) -> harness.Worker:
        return HereWorker(side)


@pytest.fixture
def workers(monkeypatch):
    tiny.use_vit(monkeypatch)
    monkeypatch.setattr(protocol, "ROUND_SECONDS", 0.0)
    return Here([harness.our_side("ours")])


def peer(name: str, slow: int = 0) -> harness.Side:
    command = (sys.executable, "-c", PEER, str(harness.PEERS))
    return harness.Side(name, command, {"SLOW": str(slow)}, {"compile": False})


# ----------------------------------------------------------------------------------------------------------- suites
@pytest.mark.parametrize(
    ("suite", "titles", "cells"),
    [
        (limit, ["Rates of this machine", "Whole steps"], []),
        pytest.param(
            kernels, ["Kernels"], [f"| {row.case} | 32 px |" for row in dispatch.TABLE], marks=pytest.mark.budget(30)
        ),
    ],
)
def test_a_suite_measures_a_tiny_model(suite, titles, cells, workers):
    """Those that are no part of the proof, whose short form runs the others."""
    found = suite.run(replace(QUICK, modes=("train",)), workers, harness.Results(None))
    text = "\n".join(found)
    assert len(found) == len(titles)
    for expected in (*titles, *cells):
        assert expected in text
    assert "Error" not in text


@pytest.mark.usefixtures("tiny_vit")
def test_multiply_adds_of_a_step_have_no_scores_that_are_computed_twice():
    """The tiny ViT has two blocks of width 16 and four patches; the queries of its last block are the 30 prompts.

    The first block's queries need no gradient either, since the weights before them are frozen.
    """
    of = cases.case("ml-vpt@vit_digits", "differentiate", batch=2, resolution=64, dtype="float32")
    function, arguments = agreement._differentiated(of, lambda shapes: shapes)
    executed = count_macs(jax.make_jaxpr(function)(*arguments).jaxpr) / 2
    assert executed - agreement.step_macs(of)["macs"] == 16 * (2 * 5 * 35 + 30 * 35)


@pytest.mark.usefixtures("tiny_vit")
def test_another_result_differs_from_the_stored_result(tmp_path, monkeypatch):
    of = cases.case("ml-vpt@vit_digits", "differentiate", batch=2, resolution=64, dtype="float32")
    monkeypatch.setattr(agreement, "_results", lambda case: case["results"])
    exact = {"loss": np.float32(2), "logits": np.float32([1, 4]), "head/kernel": np.float32([0, 8])}
    agreement.write_results(of | {"results": exact}, str(tmp_path / "a.npz"))
    other = exact | {"logits": np.float32([1, 3]), "head/kernel": np.float32([np.nan, 8])}
    differences = agreement.stored_differences(of | {"results": other}, str(tmp_path / "a.npz"))
    assert differences == {"loss": 0.0, "logits": 0.25, "gradients": np.inf}


def test_all_ways_of_attention_compute_the_same():
    parts = [jax.random.normal(jax.random.key(seed), (2, size, 3, 8)) for seed, size in enumerate((5, 7, 7))]
    results, programs = [], []
    for way in WAYS:
        with jax_worker._attention_by(way):
            results.append(dispatch.attend(*parts))
            programs.append(str(jax.make_jaxpr(lambda *parts: dispatch.attend(*parts))(*parts)))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=1e-6)
    assert ["_attend" in program for program in programs] == [True, True, False]


def test_the_loop_is_timed_without_its_evaluations_and_checkpoints(monkeypatch, tmp_path):
    """With a stand-in for the training: per step 20 ms for data and 20 for the step, stopped twice for 50 ms."""
    from mlmoe_jax.runs import checkpoint
    from mlmoe_jax.training import experiment, loop

    def batches(config):
        while True:
            time.sleep(0.02)
            yield {}

    def train(config, folder):
        folder.path.mkdir(exist_ok=True)
        read = experiment.training_batches(config)
        for number in range(1, 6):
            next(read)
            time.sleep(0.02)
            if number == 3:
                loop.evaluate()
                checkpoint.save()
            folder.append_row({"step": number})

    monkeypatch.setattr(experiment, "training_batches", batches)
    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(loop, "evaluate", lambda: time.sleep(0.05))
    monkeypatch.setattr(checkpoint, "save", lambda: time.sleep(0.05))
    found = jax_worker.training_loop("mlvpt_digits", {"train.batch_size": 10})
    assert 0 < found["images_per_second"] <= 10 / 0.04
    assert 0.1 < found["data_wait"] < 0.9
    assert min(*found["evaluation_seconds"], *found["checkpoint_seconds"]) >= 0.05
    assert loop.evaluate() is None  # as before


PROGRAM = """
import signal, sys, time
from pathlib import Path
given = dict(word.partition("=")[::2] for word in sys.argv[1:])
if "--mode" not in given and "--workdir" in given:
    assert given["--config.train.log_every"] == "1"
    folder = Path(given["--workdir"])
    time.sleep(0.2)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\\n")
    signal.pause()
elif "--images" in given:
    assert Path(given["--images"]).exists()
    sys.exit(0 if Path(given["--workdir"]).exists() else 2)
"""


def test_a_measured_process_has_wide_vectors_beside_the_flags_of_the_user(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    assert harness.our_side("ours").environment["XLA_FLAGS"] == "--xla_dump_to=x --xla_cpu_prefer_vector_width=512"


def test_the_start_is_timed_by_the_real_command_line(tmp_path):
    """The suite calls `PYTHON -m mlmoe_jax.main`; here a stand-in that writes its first metrics after 0.2 s."""
    (tmp_path / "mlmoe_jax").mkdir()
    (tmp_path / "mlmoe_jax" / "__init__.py").touch()
    (tmp_path / "mlmoe_jax" / "main.py").write_text(PROGRAM)
    side = harness.our_side("ours", checkout=tmp_path)
    found = harness.Results(None)
    (table,) = start.run(QUICK, harness.Workers([side]), found)
    measured = found.rows["start: ours"]
    assert set(measured) == {"help ", "step cold", "predict cold"}
    assert measured["step cold"][0] >= 0.2
    assert "| first step, its metrics written | cold | ours |" in table


# ----------------------------------------------------------------------------------------------- processes and rounds
def test_sides_take_turns_and_a_ratio_is_that_of_paired_rounds():
    sides = [peer("quick"), peer("slow", 1)]
    workers = harness.Workers(sides)
    found = harness.rounds_of(workers, sides, {"batch": 3}, 2)
    workers.close()
    assert found["quick"]["built"] == 3  # what the peer printed was no answer
    assert [len(found[name]["rounds"]) for name in ("quick", "slow")] == [2, 2]
    ratio = harness.ratio(found["quick"], found["slow"])
    assert 1.5 < ratio.least <= ratio.median <= ratio.most
    row = step.lines(cases.case("ml-vpt", "train", batch=3, resolution=14, dtype="float32"), found)[1]
    assert row[3] == "slow"
    assert float(row[6].split()[0]) < 1


def test_a_case_that_fails_on_one_side_is_measured_on_the_others():
    sides = [peer("a"), replace(peer("b"), options={"batch": 101})]
    workers = harness.Workers(sides)
    found = harness.rounds_of(workers, sides, {"batch": 1}, 1)
    assert found["b"] == {"error": "MemoryError: too large"}
    assert len(found["a"]["rounds"]) == 1
    assert workers.of(sides[0]).call("double", value=4) == {"value": 8}
    workers.close()
    gone = harness.Side("gone", (sys.executable, "-c", "raise SystemExit(3)"), {}, {})
    with pytest.raises(harness.Failed, match="gone ended with code 3"):
        harness.Worker(gone)


def test_a_round_drops_its_first_step_and_counts_cpu_time():
    calls = []
    measured = protocol.time_steps(protocol.Program(lambda: calls.append(sum(range(200_000)))), seconds=0.0)
    assert len(calls) == 3
    assert 0 < measured["user"] < 10 * measured["seconds"] + 0.1
    assert measured["first"] > 0


# ---------------------------------------------------------------------------------------------------------- results
def test_stored_results_are_not_measured_again(tmp_path):
    file, calls = tmp_path / "results.json", []

    def measured() -> dict:
        calls.append(1)
        return {"value": len(calls)}

    first = harness.Results(file)
    assert first.measure("step", "a", measured) == {"value": 1}
    assert harness.Results(file).measure("step", "a", measured) == {"value": 1}
    assert harness.Results(file, again=True).measure("step", "a", measured) == {"value": 2}
    late = harness.Results(file, until=0.0)
    assert late.measure("step", "a", measured) == {"value": 2}
    assert late.measure("step", "b", measured) is None
    assert late.left_out == ["step: b"]
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"machine": {"processor": "another"}}))
    with pytest.raises(SystemExit, match="another machine"):
        harness.Results(file)


@pytest.mark.parametrize("flag", ["--suite=steps", "--modes=train,test", "--photos=nowhere", "--against=python"])
def test_a_wrong_flag_is_refused(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.arguments([flag])
    assert flag.partition("=")[0] in capsys.readouterr().err


def test_another_checkout_takes_part_under_its_name(tmp_path):
    ours, before, *peers = run.sides_of(run.arguments([f"--against=before=python3:{tmp_path}", "--peer=torch/python"]))
    assert (ours.name, before.name) == ("ours", "before")
    assert before.command[0] == "python3"
    assert before.environment["PYTHONPATH"].split(":")[0] == str(tmp_path)
    assert [side.name for side in peers] == ["PyTorch", "PyTorch, compiled"]
    assert [side.ours for side in (ours, before, *peers)] == [True, True, False, False]
    sizes = {"batch": 1, "resolution": 224, "dtype": "float32"}
    for model, has in (("ml-vpt", True), ("q2l", True), ("dr-moe", True), ("vpt", False), ("ml-vpt@vit_digits", False)):
        assert step.takes_part(peers[0], cases.case(model, "train", **sizes)) is has
        assert step.takes_part(ours, cases.case(model, "train", **sizes))


@pytest.mark.skipif(not TORCH, reason="the peers need torch and transformers")
def test_the_twin_has_the_prompts_and_the_head_of_the_model():
    """The same number of trainable parameters, and logits of the same shapes."""
    import torch
    import vit

    vit.SHAPES["tiny"] = (32, 2, 2)
    twin = vit.PromptedViT("tiny", 28, labels=6, groups=2, per_group=3)
    sides, gates = twin(torch.zeros(2, 3, 28, 28))
    assert sides.shape == gates.shape == (2, 2, 6)
    prompts, head = 2 * 12 * 32, 12 * (2 * 32 * 5 + 32 + 5) + 2 * 2 * 6 * 32 + 2 * 6
    assert sum(value.numel() for value in twin.parameters() if value.requires_grad) == prompts + head
