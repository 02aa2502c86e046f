"""This package's side of the benchmarks, a process with the protocol of protocol.py:

    python benchmarks/peers/jax_worker.py

Models have random values and batches random pixels; nothing is downloaded. The package is found on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import agreement
import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import protocol
from flax import nnx
from measured_model import config_of, parts_of, random_batch, random_values
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.layers import dispatch
from mlmoe_jax.models.layers.attention import Attention
from mlmoe_jax.runs.assemble import evaluated_definition, label_axes_for, preprocess_for
from mlmoe_jax.runtime.compiler import known_errors
from mlmoe_jax.runtime.memory import device_capacity, memory_parts
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.sharding import shard_batch, shard_tree
from mlmoe_jax.training.build_steps import ANY_LENGTH, build_steps
from mlmoe_jax.training.objective import training_labels

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "pillow", "libtpu")


def facts() -> dict[str, Any]:
    """Return versions and devices."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "devices": [device.device_kind for device in devices],
        "memory": device_capacity(devices[0])[0],
        "runtime": " ".join(devices[0].client.platform_version.split()),
        "packages": protocol.versions(*PACKAGES),
        "known_errors": known_errors(devices[0]),
    }


def device_peak() -> int | None:
    """Return the peak of device memory in bytes; None if the device does not report it."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


# --------------------------------------------------------------------------------------------------------- programs
def build(case: dict[str, Any]) -> protocol.Program:
    """Return the program of a case; see `suites` for the cases."""
    modes = {"train": _training, "infer": _inference, "predict": _prediction, "attention": _attention, "rate": _rate}
    return {**modes, "kernel": _kernel}[case["mode"]](case)


def _steps(config: ConfigDict, labels: int, devices: int | None):
    mesh = setup_jax(config, jax.devices()[:devices] if devices else None)
    parts = parts_of(config, synthetic_label_space(labels, config.model.prompts.num_groups))
    codes = training_labels(config, np.zeros((1, labels), np.int8))
    return parts, build_steps(config, parts, preprocess_for(config), mesh, codes, total_steps=ANY_LENGTH)


def training_program(config: ConfigDict, labels: int, devices: int | None = None) -> protocol.Program:
    """Return the training step of a config on one batch that is already on the device."""
    parts, steps = _steps(config, labels, devices)
    state = steps.place(steps.initial_state(parts))
    batch = shard_batch(random_batch(config.train.batch_size, steps.preprocess.image_size, labels), steps.mesh)
    lowered, began = steps.train_step.lower(state, batch), time.perf_counter()
    compiled = steps.train_step.compile(state, batch)
    program = protocol.Program(lambda: None, facts=_compiled_facts(lowered, compiled, began))

    def step() -> None:
        nonlocal state
        state, _ = steps.train_step(state, batch)

    program.step, program.wait = step, lambda: jax.block_until_ready(state)
    return program


def _training(case: dict[str, Any]) -> protocol.Program:
    return training_program(config_of(case), case["labels"], case.get("devices"))


def _inference(case: dict[str, Any]) -> protocol.Program:
    """The evaluation step on one batch that is already on the device."""
    config = config_of(case)
    parts, steps = _steps(config, case["labels"], case.get("devices"))
    values, frozen = steps.place(({**parts.trainable, **parts.stats}, parts.frozen))
    batch = random_batch(case["batch"], steps.preprocess.image_size, case["labels"])
    batch = shard_batch({name: batch[name] for name in ("image", "mask", "id")}, steps.mesh)
    lowered, began = steps.eval_step.lower(values, frozen, batch), time.perf_counter()
    compiled = lowered.compile()
    return _repeated(compiled, values, frozen, batch, **_compiled_facts(lowered, compiled, began))


def _repeated(function: Callable, *given: Any, **facts: Any) -> protocol.Program:
    """Return a program whose step calls a function with what is given."""
    results: list[Any] = [None]

    def step() -> None:
        results[0] = function(*given)

    return protocol.Program(step, lambda: jax.block_until_ready(results), facts)


def _compiled_facts(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, began: float) -> dict[str, Any]:
    cost = compiled.cost_analysis() or {}
    return {
        "compile_seconds": time.perf_counter() - began,
        "memory": memory_parts(compiled),
        "flops": (lowered.cost_analysis() or {}).get("flops"),
        "bytes": cost.get("bytes accessed"),
    }


def _prediction(case: dict[str, Any]) -> protocol.Program:
    """From one encoded image to probabilities on the host, by the public Predictor."""
    from mlmoe_jax.inference.predictor import Predictor
    from mlmoe_jax.runs.restore import Run

    config = config_of(case | {"batch": 1})
    space, mesh = synthetic_label_space(case["labels"], config.model.prompts.num_groups), setup_jax(config)
    parts = parts_of(config, space)
    axes = label_axes_for(parts.definition, case["labels"], mesh)
    values, frozen = shard_tree(({**parts.trainable, **parts.stats}, parts.frozen), mesh, axes)
    definition = evaluated_definition(config, parts, space)
    placed = {"definition": definition, "preprocess": preprocess_for(config), "mesh": mesh, "label_axes": axes}
    run = Run(config, space, values, frozen, {"step": 0}, **placed)
    predictor, content = Predictor(run, dict.fromkeys(space.names, 0.5)), protocol.encoded_image()
    began = time.perf_counter()
    predictor(content)
    return protocol.Program(lambda: predictor(content), facts={"compile_seconds": time.perf_counter() - began})


# ------------------------------------------------------------------------------------------------ attention and rates
def _attention(case: dict[str, Any]) -> protocol.Program:
    """Attention of a block of a ViT on tokens f32[B,Q,D] with prompts as context, and its gradient by the tokens."""
    shape, dtype = catalog.entry(case["backbone"]).shape, jnp.bfloat16 if case["dtype"] == "bfloat16" else None
    tokens = shape.leading + (case["resolution"] // shape.patch) ** 2
    prompts = 2 * case["groups"] * case["per_group"]

    def attention() -> Attention:
        return Attention(shape.width, shape.heads, key_bias=shape.key_bias, dtype=dtype, rngs=nnx.Rngs(0))

    structure, shapes = nnx.split(nnx.eval_shape(attention))
    image, context = (
        jax.ShapeDtypeStruct((batch, count, shape.width), jnp.float32)
        for batch, count in ((case["batch"], tokens), (1, prompts))
    )
    arguments = random_values((image, shapes, context))

    def both(image: jax.Array, values: Any, context: jax.Array) -> tuple[jax.Array, jax.Array]:
        output, back = jax.vjp(lambda image: nnx.merge(structure, values)(image, [context]), image)
        return output, back(output)[0]

    with _attention_by(case["attention"]):
        compiled = jax.jit(both).lower(*arguments).compile()
    return _repeated(compiled, *arguments, cudnn="__cudnn" in compiled.as_text())


@contextlib.contextmanager
def _attention_by(way: str) -> Iterator[None]:
    """Choose the implementation of attention for programs that are traced here; see suites/attention.py."""
    with contextlib.ExitStack() as stack:
        if way == "matmuls":
            stack.enter_context(mock.patch.object(dispatch, "compute_capability", return_value=()))
        if way == "library":
            stack.enter_context(dispatch.use_kernels("xla"))
        yield


def _kernel(case: dict[str, Any]) -> protocol.Program:
    """An operation of models/layers/dispatch.py with its gradients."""
    compiled, arrays = kernel_cases.compile_case(case)
    return _repeated(compiled, *arrays)


def _rate(case: dict[str, Any]) -> protocol.Program:
    """A square matmul, or an addition of two vectors, for the rates of the machine."""
    size, product = case["size"], case["what"] == "product"
    operand = jnp.asarray(np.resize(np.linspace(-1, 1, 4096), (size, size) if product else size), case["dtype"])
    compiled = jax.jit(jnp.dot if product else jnp.add).lower(operand, operand).compile()
    return _repeated(compiled, operand, operand + 1, flops=2 * size**3 if product else size, bytes=3 * operand.nbytes)


# ------------------------------------------------------------------------------------------------------- functions
def largest_batch(case: dict[str, Any], capacity: int, start: int) -> dict[str, int]:
    """Return the largest training batch whose compiled step fits `capacity` bytes; nothing is executed."""
    from mlmoe_jax.apps.tools.preflight.compile_check import Programs, examine, largest_fitting

    config = config_of(case)
    programs = Programs(config, setup_jax(config, jax.devices()[:1], training=False), case["labels"])
    fits = largest_fitting(lambda size: examine(programs.training(size), 1, capacity, quick=True)["fits"], start)
    return {"batch": fits}


def loader(files: list[str], size: int, seconds: float, data: dict[str, Any], augment: dict[str, Any]) -> dict:
    """Return the images per second of the input pipeline on files; `data` and `augment` change the default config."""
    from mlmoe_jax.config import default_config
    from mlmoe_jax.data.images import ImageFiles
    from mlmoe_jax.data.pipeline import build_loader
    from mlmoe_jax.data.split import Split

    config = default_config()
    config.data.update({"image_size": size, **data})
    config.augment.update(augment)
    split = Split("files", ("a",), np.zeros((len(files), 1), np.int8), files, ImageFiles("", files))
    batches = build_loader(config.data, split, batch_size=16, augment=config.augment)
    return protocol.images_per_second(batches, seconds, lambda batch: len(batch["id"]))


def reduced_difference(files: list[str], size: int) -> dict[str, float]:
    """Return the mean absolute difference of reduced decoding after resizing, in gray levels."""
    from mlmoe_jax.data.decoding import Decoding, read_image
    from mlmoe_jax.data.transforms import resize_square

    full = (resize_square(read_image(file), size) for file in files)
    reduced = (resize_square(read_image(file, decoding=Decoding(size)), size) for file in files)
    gaps = [np.abs(a.astype(int) - b).mean() for a, b in zip(full, reduced, strict=True)]
    return {"gray_levels": float(np.mean(gaps))}


def training_loop(reference: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Train with the real loop and pipeline; return its images/s without start, evaluations and checkpoints.

    The time is from the first logged row to the last. Also returns the share of the time in which it waited for data,
    and the seconds of each evaluation and each checkpoint.
    """
    from mlmoe_jax.runs import checkpoint
    from mlmoe_jax.runs.folder import RunFolder
    from mlmoe_jax.training import experiment, loop

    config = configuration.load_config(reference, [(key, str(value)) for key, value in overrides.items()])
    configuration.validate(config)
    calls: dict[str, list[_Call]] = {"evaluation": [], "checkpoint": [], "row": [], "batch": []}
    read = experiment.training_batches

    def batches(*arguments: Any, **options: Any) -> Iterator[Any]:
        loaded = read(*arguments, **options)
        following = _timed(loaded.__next__, calls["batch"])
        while True:
            yield following()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(experiment, "training_batches", batches),
        mock.patch.object(loop, "evaluate", _timed(loop.evaluate, calls["evaluation"])),
        mock.patch.object(checkpoint, "save", _timed(checkpoint.save, calls["checkpoint"])),
        mock.patch.object(RunFolder, "append_row", _timed(RunFolder.append_row, calls["row"])),
    ):
        loop.train(config, RunFolder(folder))
    first, last = calls["row"][0], calls["row"][-1]
    inside = {name: sum(one.seconds for one in calls[name] if first.began < one.began < last.began) for name in calls}
    running = last.began - first.began - inside["evaluation"] - inside["checkpoint"]
    steps = last.arguments[1]["step"] - first.arguments[1]["step"]
    return {
        "images_per_second": steps * config.train.batch_size / running,
        "data_wait": inside["batch"] / running,
        **{f"{name}_seconds": [one.seconds for one in calls[name]] for name in ("evaluation", "checkpoint")},
    }


@dataclass(frozen=True)
class _Call:
    """One call of a function: its arguments, its start, and its duration in seconds."""

    arguments: tuple
    began: float
    seconds: float


def _timed(function: Callable, calls: list[_Call]) -> Callable:
    """Return a wrapper of a function that appends each call to `calls`."""

    def wrapper(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments, **options)
        calls.append(_Call(arguments, began, time.perf_counter() - began))
        return result

    return wrapper


def bare_step(reference: str, overrides: dict[str, Any], labels: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of rounds of the training step of `training_loop`, on one batch on the device."""
    overrides = {**overrides, "model.backbone.weights": "none"}
    config = configuration.load_config(reference, [(key, str(value)) for key, value in overrides.items()])
    program = training_program(config, labels)
    return {"batch": config.train.batch_size, "rounds": [protocol.time_steps(program) for _ in range(rounds)]}


FUNCTIONS = (
    largest_batch,
    loader,
    reduced_difference,
    training_loop,
    bare_step,
    kernel_cases.kernel_cases,
    *agreement.FUNCTIONS,
)

if __name__ == "__main__":
    protocol.serve(protocol.Session(facts, build, device_peak, FUNCTIONS))
