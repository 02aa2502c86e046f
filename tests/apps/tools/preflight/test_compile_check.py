"""The compile check: its arithmetic, and real steps compiled for eight simulated devices in a process of its own."""

import importlib.util
import json
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.devices import run_python
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlmoe_jax.apps.tools.preflight import compile_check
from mlmoe_jax.apps.tools.preflight.compile_check import (
    check_outcome,
    largest_fitting,
    memory_shortage,
    tpu_devices,
)
from mlmoe_jax.runtime.memory import GIB, required_bytes

LABELS, BATCH, DEVICES = 10, 16, 8


# --------------------------------------------------------------------------------------------------- arithmetic
def test_memory_errors_of_the_compiler_are_parsed():
    used = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G."
    )
    assert memory_shortage(used) == (20.5 * GIB, 15.75 * GIB)
    temporaries = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (2.00T) exceeds "
        "available HBM (95.74G)."
    )
    assert memory_shortage(temporaries) == (2048 * GIB, round(95.74 * GIB))
    assert memory_shortage("INTERNAL: something else") is None


@pytest.mark.parametrize("start", [1, 5, 1024])
@pytest.mark.parametrize("limit", [0, 1, 7, 8, 13, 127, 1000])
def test_the_largest_fitting_size_is_found_to_an_eighth(limit, start):
    tried = []

    def fits(size):
        assert size >= 1
        assert size not in tried, "no size is compiled twice"
        tried.append(size)
        return size <= limit

    found = largest_fitting(fits, start)
    power = 1 << limit.bit_length() >> 1  # the largest power of two up to the limit
    step = max(1, power // 8)
    assert found == (limit // step * step)
    assert len(tried) <= 15


# ---------------------------------------------------------------------------------- eight simulated devices
def _tiny_config(patch=None):
    from helpers import tiny

    from mlmoe_jax.config import load_config

    tiny.use_vit(patch, depth=1, patch=32, mlp_ratio=64.0)  # nearly all parameters are frozen
    config = load_config("mlvpt_digits", [])
    config.model.prompts.num_groups, config.model.prompts.per_group = 2, 2
    config.optim.name, config.optim.schedule = "sgd", "constant"  # compiles faster than AdamW
    config.train.batch_size, config.eval.batch_size = BATCH, BATCH // DEVICES
    return config


def report_of_both_steps() -> dict:
    import jax

    from mlmoe_jax.runtime.sharding import abstract_shards, make_mesh

    config = _tiny_config()
    report, steps = compile_check.check_steps(config), compile_check.Programs(config, make_mesh(config.mesh))
    state = steps.state
    sizes = {name: sum(x.size for x in jax.tree.leaves(getattr(state, name))) for name in ("trainable", "frozen")}
    sizes["prompts"] = state.trainable["prompts/deep"].size
    sizes["moving"] = compile_check.device_bytes(state.replace(frozen={}))
    sizes["state"], sizes["batch"] = compile_check.device_bytes(state), compile_check.device_bytes(steps.batch(BATCH))
    over_two = make_mesh({"data": -1, "fsdp": 2, "expert": 1})
    sizes["halved"] = compile_check.device_bytes(abstract_shards(state, over_two))
    return {"report": report, "sizes": sizes, "text": check_outcome(report).text()}


@pytest.fixture(scope="module")
def compiled():
    code = "import json, test_compile_check; print(json.dumps(test_compile_check.report_of_both_steps()))"
    return json.loads(run_python(code, devices=DEVICES).splitlines()[-1])


@pytest.mark.slow
def test_data_parallel_training_sums_gradients_of_trainable_parameters_only(compiled):
    step, sizes = compiled["report"]["steps"]["train"], compiled["sizes"]
    assert set(step["collectives"]) == {"all-reduce"}
    moved = step["collectives"]["all-reduce"]["bytes"]
    unused = 2 * 2 * LABELS  # the biases of the gates have no gradient
    # The gradient of the prompts of a block may be summed in four parts (queries, keys, values, residual), and a few
    # scalars are summed too.
    assert 4 * (sizes["trainable"] - unused) <= moved <= 4 * (sizes["trainable"] + 3 * sizes["prompts"]) + 64
    assert sizes["frozen"] > 2 * sizes["trainable"], "otherwise the bound could include frozen weights"


@pytest.mark.slow
def test_evaluation_gathers_logits_ids_and_masks(compiled):
    moved = compiled["report"]["steps"]["eval"]["collectives"]
    assert set(moved) == {"all-gather"}
    assert moved["all-gather"]["bytes"] == BATCH * (4 * LABELS + 4 + 4)


@pytest.mark.slow
def test_memory_is_per_device_and_the_state_is_donated(compiled):
    step, sizes = compiled["report"]["steps"]["train"], compiled["sizes"]
    memory = step["memory"]
    assert memory["arguments"] == pytest.approx(sizes["state"] + sizes["batch"], rel=0.01)
    assert memory["aliased"] == pytest.approx(sizes["moving"], rel=0.01)
    assert memory["aliased"] <= memory["outputs"]
    assert step["needed"] == required_bytes(memory) + step["held"]
    assert sizes["batch"] == BATCH // DEVICES * (64 * 64 * 3 + 8 * LABELS + 8)
    assert step["flops"] > 0
    assert step["bytes_accessed"] > 0


@pytest.mark.slow
def test_a_sharded_array_counts_as_a_shard(compiled):
    assert compiled["sizes"]["halved"] < 0.6 * compiled["sizes"]["state"]


@pytest.mark.slow
def test_the_report_as_text(compiled):
    report, text = compiled["report"], compiled["text"]
    assert (report["devices"], report["mesh"]["data"], report["capacity"], report["fits"]) == (8, 8, None, None)
    assert f"{report['steps']['train']['collectives']['all-reduce']['bytes']:,}" in text
    assert "whether it fits is unknown" in text


# --------------------------------------------------------------------------------------- verdicts and errors
@pytest.mark.parametrize("quick", [False, True])
def test_a_program_that_is_too_large_for_the_compiler_does_not_fit(quick):
    """Only the message of the compiler is simulated."""
    import jax

    class Lowered:
        def compile(self, compiler_options):
            assert compiler_options == (compile_check.QUICK if quick else None)
            raise jax.errors.JaxRuntimeError("Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm.")

    program = compile_check.StepProgram(SimpleNamespace(lower=Lowered), {}, batch_size=32, extra_bytes=GIB)
    step = compile_check.examine(program, 8, 15 * GIB, quick=quick)
    assert (step["fits"], step["needed"], step["batch_a_device"]) == (False, 21.5 * GIB, 4)

    names = {"topology": "v5e:2x4", "device": "TPU v5 lite", "devices": 8, "chips": 8, "capacity_source": "made up"}
    report = {**names, "mesh": {"data": 8}, "capacity": 15 * GIB, "quick": quick, "steps": {"train": step}}
    for fits, code in ((True, 0), (None, 0), (False, 1)):
        outcome = check_outcome(report | {"fits": fits})
        assert outcome.exit_code == code
        assert json.loads(outcome.json())["steps"]["train"]["needed"] == step["needed"]
    lines = outcome.text().splitlines()
    assert lines[-1] == "train, 4 images: does not fit: needs 21.50 GiB of 15.00 GiB"


def test_the_compiler_accepts_the_options_of_a_quick_check():
    import jax

    step = jax.jit(lambda x: 2.0 * x).lower(jax.ShapeDtypeStruct((3,), "float32"))
    program = compile_check.StepProgram(SimpleNamespace(lower=lambda: step), {}, batch_size=8, extra_bytes=0)
    assert compile_check.examine(program, 8, GIB, quick=True)["fits"]


@pytest.fixture
def process(monkeypatch):
    """Restore the environment and the platform of JAX after the test."""
    import jax

    monkeypatch.setattr(os, "environ", dict(os.environ))
    platforms = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", platforms)


def test_libtpu_does_not_look_for_a_tpu(process, monkeypatch, refusal):
    """Only libtpu is simulated: it records the environment, and rejects a topology."""
    import jax

    seen = {}

    def describe(platform, topology_name):
        seen.update(os.environ, platforms=jax.config.jax_platforms)
        if topology_name == "v9:2x2":
            raise NotImplementedError("INVALID: no such topology")
        return SimpleNamespace(devices=["a device"])

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", describe)
    os.environ["TPU_WORKER_HOSTNAMES"] = "mine"
    assert tpu_devices("v5e:4x4") == ["a device"]
    assert seen.items() >= {**compile_check.WITHOUT_TPU, "TPU_WORKER_HOSTNAMES": "mine", "platforms": "cpu"}.items()
    assert "is unknown to the TPU compiler (no such topology)" in refusal(tpu_devices, "v9:2x2")


# -------------------------------------------------------------------------------------------------- with libtpu
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.slow
def test_a_step_for_a_tpu_slice(process, monkeypatch):
    config = _tiny_config(monkeypatch)
    report = compile_check.check_steps(config, "v5e:2x2")
    assert (report["chips"], report["capacity"], report["fits"]) == (4, 15.75 * GIB, True)
    moved = report["steps"]["train"]["collectives"]
    assert set(moved) == {"all-reduce"}
    assert moved["all-reduce"]["bytes"] < 40_000


def test_device_bytes_are_those_of_one_device():
    where = NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("all",)), PartitionSpec())
    tree = {"a": jax.ShapeDtypeStruct((3, 5), jnp.bfloat16, sharding=where), "b": jnp.zeros(7)}
    assert compile_check.device_bytes(tree) == 30 + 28
