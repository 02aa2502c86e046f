"""The functions that test_meshes.py calls in a process with eight simulated devices; their results are JSON."""

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
from helpers import tiny
from helpers.bench import Bench, Line, drawn_batch, drawn_model

from mlmoe_jax.apps.tools.preflight import hlo
from mlmoe_jax.apps.tools.preflight.compile_check import Programs
from mlmoe_jax.apps.tools.prune import measure_importance
from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.sources import digits
from mlmoe_jax.runs import checkpoint
from mlmoe_jax.runs.assemble import split_model
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.sharding import AXES, make_mesh
from mlmoe_jax.training.objective import Objective, training_labels
from mlmoe_jax.training.step import split_loss_values

# Ten labels: on two devices along `expert` five per device, on eight two per device with padding.
LABELS, BATCH = 10, 16


def config_of(reference: str):
    tiny.use()
    config = load_config(reference, [])
    config.model.prompts.num_groups, config.model.prompts.per_group = 2, 2
    config.model.head.decoder.update({"heads": 2, "hidden": 16, "dropout": 0.0})
    config.model.head.routing.update({"expert_hidden": 8, "gate_hidden": 8})
    config.optim.name, config.optim.schedule, config.optim.learning_rate = "sgd", "constant", 1.0
    config.optim.weight_decay, config.loss.scale, config.ema.decay = 0.0, 1.0, 0.9
    return config


def mesh_of(sizes, devices=None):
    return make_mesh(dict(zip(AXES, sizes, strict=True)), devices or jax.devices())


def on_meshes(meshes: list, outcome: Callable, compare: Callable, *, before: Callable = lambda: None) -> tuple:
    """Return the outcome on one device, and per mesh how that on the mesh compares with it; `before`: the meshes."""
    reference = outcome(mesh_of((1, 1, 1), jax.devices()[:1]))
    before()
    return reference, {str(tuple(sizes)): compare(reference, outcome(mesh_of(sizes))) for sizes in meshes}


def largest_gap(one, other) -> float:
    """Return the largest difference of two trees, relative to the largest entry of each array of the first."""
    gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / max(1e-3, np.abs(a).max())), one, other)
    return max(jax.tree.leaves(gaps))


def bench_of(config, mesh) -> Bench:
    """Return the model of a config with random values on a mesh."""
    model = drawn_model(config, synthetic_label_space(LABELS, 2), scale=0.2)
    return Bench(config, split_model(model, config), LABELS, mesh=mesh)


def batch_for(bench: Bench) -> dict:
    """Return a batch on the bench's mesh, with unknown labels and padding."""
    batch = drawn_batch(BATCH, 64, LABELS, seed=1)
    batch["label_mask"] = (np.random.default_rng(2).random((BATCH, LABELS)) < 0.9).astype(np.float32)
    batch["mask"][-3:] = 0
    return bench.shard(batch)


def stored(bench: Bench, state) -> dict:
    """Return the trainable values and their averages as a checkpoint stores them, in numpy."""
    return jax.device_get(bench.steps.stored_form({"trainable": state.trainable, "ema": state.ema}))


def differences(reference: str, meshes: list, accumulate: int) -> dict:
    """Return, per mesh, the largest differences from one device: loss, logits, and values after a step of SGD.

    accumulate: number of parts of the batch on the meshes; on one device it is not split.
    """
    config = config_of(reference)

    def outcome(mesh):
        bench = bench_of(config, mesh)
        state = bench.start()
        logits = np.asarray(bench.steps.eval_step(state.raw(), state.frozen, batch_for(bench))["logits"])
        state, metrics = bench.steps.train_step(state, batch_for(bench))
        return state, logits, {name: float(value) for name, value in metrics.items()}, stored(bench, state)

    def compare(one, other):
        (_, logits, metrics, after), (state, other_logits, other_metrics, values) = one, other
        assert jax.tree.map(np.shape, values) == jax.tree.map(np.shape, after), "a checkpoint has no padding"
        return {
            "logits": float(np.abs(logits - other_logits).max()),
            "metrics": max(abs(metrics[name] - other_metrics[name]) / abs(metrics[name]) for name in metrics),
            "values": largest_gap(after, values),
            "sharded": sum("expert" in str(value.sharding.spec) for value in state.trainable.values()),
        }

    split = {"accumulate": accumulate}
    return on_meshes(meshes, outcome, compare, before=lambda: config.train.update(split))[1]


def estimate_gaps(kind: str, meshes: list) -> dict:
    """Return per mesh the largest difference from one device after three steps of a loss with values per image.

    Also return how many values have changed, and whether the values are sharded.
    """
    config, draw = default_config(), np.random.default_rng(0)
    config.loss.update({"kind": kind, "scale": 1.0, "expected_positives": 2.0, "large_loss_rate": 0.05})
    config.optim.schedule, config.optim.name, config.optim.learning_rate = "constant", "sgd", 10.0
    config.train.batch_size = 8  # twenty steps per epoch
    codes = np.where(draw.random((160, 40)) < 0.05, 1, -1).astype(np.int8)

    def outcome(mesh):
        bench = Bench(config, Line(40), codes, side=4, mesh=mesh)
        state = bench.start(step=20)
        for seed in range(3):
            batch = drawn_batch(8, 4, 40, seed=seed)
            rows = np.random.default_rng(seed).permutation(160)[:8].astype(np.int32)
            batch |= {"id": rows, "label": (codes[rows] == 1).astype(np.float32)}
            batch["label_mask"] = batch["label"].copy()
            state, _ = bench.steps.train_step(state, bench.shard(batch))
        (own,) = split_loss_values({**state.trainable, **state.stats})[1].values()
        return jax.device_get({"own": own, **state.trainable}), own.sharding.spec[:1] == ("fsdp",)

    objective = Objective(config.loss, training_labels(config, codes))
    initial = {**objective.learned(), **objective.noted()}
    before = np.concatenate([v.ravel() for v in initial.values()])

    def compare(one, other):
        gaps = [float(np.abs(one[0][path] - other[0][path]).max()) for path in one[0]]
        return {"gap": max(gaps), "sharded": other[1]}

    (reference, _), found = on_meshes(meshes, outcome, compare)
    return {"moved": int((reference["own"].ravel() != before).sum()), "meshes": found}


def restored(reference: str, saved_on: list, restored_on: list, folder: str) -> bool:
    """Save a state on one mesh and restore it on another; return whether every value is the same."""
    config = config_of(reference)
    first, second = (bench_of(config, mesh_of(sizes)) for sizes in (saved_on, restored_on))
    (before, _), like = first.steps.train_step(first.start(), batch_for(first)), second.start()
    saved, wanted = (
        one.steps.stored_form(state.replace(frozen={})) for one, state in ((first, before), (second, like))
    )
    with checkpoint.open_manager(RunFolder(folder)) as manager:
        checkpoint.save(manager, 1, saved, saved.ema, {})
    with checkpoint.open_manager(RunFolder(folder)) as manager:
        back = checkpoint.restore(manager, selected=wanted.ema, state=wanted)
    after = second.steps.place(back.state).replace(frozen=like.frozen)
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), stored(first, before), stored(second, after))
    losses = [
        float(bench.steps.train_step(state, batch_for(bench))[1]["loss"])
        for bench, state in ((first, before), (second, after))
    ]
    return all(jax.tree.leaves(same)) and bool(np.isclose(*losses, rtol=1e-5))


def importance_gaps(meshes: list) -> dict:
    """Return, per mesh, the difference of the importance of E2VPT's masks from one device, and the padding."""
    digits.SCENES = {"train": BATCH, "val": BATCH, "test": BATCH, "test_shift": BATCH}
    config = config_of("e2vpt:dataset=digits,prompts=4,key_values=2")
    config.model.backbone.weights, config.model.prompts.pruning = "none", "learned"
    config.train.batch_size, space = BATCH, replace(synthetic_label_space(LABELS, 2), names=tuple("0123456789"))

    def importance(mesh):
        bench = bench_of(config, mesh)
        state, steps = bench.start(), bench.steps
        values = state.raw()
        padded = values["head/classifier/kernel"].shape[1] - LABELS
        placed = {name: getattr(steps, name) for name in ("definition", "preprocess", "mesh", "label_axes")}
        run = Run(config, space, values, state.frozen, {"step": 1}, **placed)
        return measure_importance(run), padded

    def compare(one, other):
        gaps = [np.abs(one[0][name] - other[0][name]).max() / np.abs(one[0][name]).max() for name in one[0]]
        return {"gap": float(max(gaps)), "padded": other[1]}

    return on_meshes(meshes, importance, compare)[1]


def label_traffic(reference: str, labels: int) -> dict:
    """Return the bytes per device that a training step communicates if all devices are along `expert`, with bounds."""
    config = config_of(reference)
    config.train.accumulate = 1
    steps = Programs(config, mesh_of((1, 1, 8)), labels)
    found = hlo.totals(hlo.collectives(steps.training(BATCH).lower().compile().as_text(), 8))
    sizes = {path: x.size for path, x in steps.state.trainable.items()}
    owned = {path for path, x in steps.state.trainable.items() if "expert" in str(x.sharding.spec)}
    return {
        "summed": found.pop("all-reduce")["bytes"],
        "moved": sum(row["bytes"] for row in found.values()),
        "shared": 4 * sum(size for path, size in sizes.items() if path not in owned),
        "owned": 4 * sum(sizes[path] for path in owned),
        "tokens": 4 * BATCH * 4 * config.model.head.decoder.width,  # four patches, as the decoder reads them
        "label": 4 * BATCH * labels,
        "activations": 4 * BATCH * labels * config.model.head.decoder.width,
    }
