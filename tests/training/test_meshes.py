"""The same numbers on every mesh: eight simulated devices, in a process of its own, against one of them."""

import json
import os
from pathlib import Path

import pytest
from helpers.devices import run_python

MESHES = [(8, 1, 1), (4, 1, 2), (2, 2, 2), (1, 1, 8)]
# Ten labels: on two devices along `expert` five each, on eight two each with padding.
LABELS, BATCH = 10, 16


def on_eight_devices(function: str, *arguments) -> dict:
    """Call a function of this module in a new process with eight devices; return its JSON."""
    return all_on_eight_devices((function, *arguments))[0]


def all_on_eight_devices(*calls: tuple) -> list[dict]:
    """Make several such calls in one process."""
    code = (
        "import sys, json, test_meshes\n"
        "calls = json.loads(sys.argv[1])\n"
        "print(json.dumps([getattr(test_meshes, function)(*arguments) for function, *arguments in calls]))"
    )
    return json.loads(run_python(code, json.dumps(calls), devices=8).splitlines()[-1])


# ----------------------------------------------------------------------------------- what runs with eight devices
def _config(reference: str):
    from helpers import tiny

    from mlmoe_jax.config import load_config

    tiny.use_vit(patch=32)
    config = load_config(reference, [])
    config.model.prompts.num_groups, config.model.prompts.per_group = 2, 2
    config.model.head.decoder.update({"heads": 2, "hidden": 16, "dropout": 0.0})
    config.model.head.routing.update({"expert_hidden": 8, "gate_hidden": 8})
    config.optim.name, config.optim.schedule, config.optim.learning_rate = "sgd", "constant", 1.0
    config.optim.weight_decay, config.loss.scale, config.augment.where = 0.0, 1.0, "host"
    return config


class Bench:
    """A model of a config with drawn values, laid over one mesh."""

    def __init__(self, config, sizes, devices):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from flax import nnx

        from mlmoe_jax.data.labels.space import synthetic_label_space
        from mlmoe_jax.data.prepare import Preprocess
        from mlmoe_jax.inference.step import make_eval_step
        from mlmoe_jax.models.build import build_model
        from mlmoe_jax.runs.assemble import label_axes_for, split_model
        from mlmoe_jax.runtime.sharding import make_mesh, place
        from mlmoe_jax.training.objective import make_objective
        from mlmoe_jax.training.optim import make_optimizer
        from mlmoe_jax.training.state import initial_state
        from mlmoe_jax.training.step import make_train_step

        self.mesh = make_mesh(dict(zip(("data", "fsdp", "expert"), sizes, strict=True)), devices)
        self.label_axes = label_axes_for(config, LABELS, self.mesh)
        space = synthetic_label_space(LABELS, 2)
        model = nnx.eval_shape(lambda: build_model(config, space, rngs=nnx.Rngs(0)))
        draw = np.random.default_rng(0)
        values = jax.tree.map(lambda x: jnp.asarray(0.2 * draw.normal(size=x.shape), x.dtype), nnx.state(model))
        nnx.update(model, values)
        parts = split_model(model, config)
        optimizer = make_optimizer(config.optim, 10, parts.trainable)
        state = initial_state(parts.trainable, parts.frozen, parts.stats, optimizer.init(parts.trainable))
        self.state = place(state, self.mesh, self.label_axes)
        self.look = look = Preprocess(64, (0.5,) * 3, (0.25,) * 3)
        objective = make_objective(config.loss)
        settings = {"ema_decay": 0.9, "seed": 0, "mesh": self.mesh, "label_axes": self.label_axes}
        settings["accumulate"] = config.train.accumulate
        self.train_step = make_train_step(parts.definition, objective, optimizer, look, config.augment, **settings)
        self.eval_step = make_eval_step(parts.definition, look, self.mesh, self.label_axes)
        self.definition = parts.definition

    def batch(self):
        import numpy as np

        from mlmoe_jax.runtime.sharding import shard_batch

        draw = np.random.default_rng(1)
        batch = {
            "image": draw.integers(0, 256, (BATCH, 64, 64, 3)).astype(np.uint8),
            "label": (draw.random((BATCH, LABELS)) < 0.3).astype(np.float32),
            "label_mask": (draw.random((BATCH, LABELS)) < 0.9).astype(np.float32),
            "mask": np.array([1.0] * (BATCH - 3) + [0.0] * 3, np.float32),
            "id": np.arange(BATCH, dtype=np.int32),
        }
        return shard_batch(batch, self.mesh)

    def stored(self):
        """The trainable values and their averages as a checkpoint holds them, in numpy."""
        import jax

        from mlmoe_jax.runtime.sharding import without_padding

        kept = {"trainable": self.state.trainable, "ema": self.state.ema}
        return jax.device_get(without_padding(kept, self.mesh, self.label_axes))


def differences(reference: str, meshes: list, accumulate: int) -> dict:
    """Return, for each mesh, the largest differences from one device: loss, logits, and values after a step of SGD.

    accumulate: parts of the batch on the meshes; one device always takes it as a whole.
    """
    import jax
    import numpy as np

    config, found = _config(reference), {}
    alone = Bench(config, (1, 1, 1), jax.devices()[:1])

    def outcome(bench):
        logits = np.asarray(bench.eval_step(bench.state.raw(), bench.state.frozen, bench.batch())["logits"])
        bench.state, metrics = bench.train_step(bench.state, bench.batch())
        return logits, {name: float(value) for name, value in metrics.items()}, bench.stored()

    logits, metrics, after = outcome(alone)
    config.train.accumulate = accumulate
    for sizes in meshes:
        bench = Bench(config, sizes, jax.devices())
        other_logits, other_metrics, other = outcome(bench)
        assert jax.tree.map(np.shape, other) == jax.tree.map(np.shape, after), "a checkpoint has no padding"
        spread = [path for path, value in bench.state.trainable.items() if "expert" in str(value.sharding.spec)]
        gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / max(1e-3, np.abs(a).max())), after, other)
        found[str(tuple(sizes))] = {
            "logits": float(np.abs(logits - other_logits).max()),
            "metrics": max(abs(metrics[name] - other_metrics[name]) / abs(metrics[name]) for name in metrics),
            "values": max(jax.tree.leaves(gaps)),
            "spread": len(spread),
        }
    return found


def restored(reference: str, saved_on: list, restored_on: list, folder: str) -> bool:
    """Save a state on one mesh and restore it on another; return whether every value is the same."""
    import jax
    import numpy as np

    from mlmoe_jax.runs import checkpoint
    from mlmoe_jax.runs.folder import RunFolder
    from mlmoe_jax.runtime.sharding import place, without_padding

    config = _config(reference)
    first = Bench(config, saved_on, jax.devices())
    second = Bench(config, restored_on, jax.devices())

    def form(bench):
        return without_padding(bench.state.replace(frozen={}), bench.mesh, bench.label_axes)

    first.state, _ = first.train_step(first.state, first.batch())
    with checkpoint.open_manager(RunFolder(folder)) as manager:
        checkpoint.save(manager, 1, form(first), form(first).ema, {})
    with checkpoint.open_manager(RunFolder(folder)) as manager:
        back = checkpoint.restore_newest(manager, selected=form(second).ema, state=form(second))
    second.state = place(back.state, second.mesh, second.labels).replace(frozen=second.state.frozen)
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), first.stored(), second.stored())
    after = [bench.train_step(bench.state, bench.batch())[1]["loss"] for bench in (first, second)]
    return all(jax.tree.leaves(same)) and bool(np.isclose(*map(float, after), rtol=1e-5))


def survived(folder: str) -> dict:
    """Cut the files of the newer of two checkpoints; return the step restored and what was written to stderr."""
    import contextlib
    import io

    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from mlmoe_jax.runs import checkpoint
    from mlmoe_jax.runs.folder import RunFolder
    from mlmoe_jax.runtime.sharding import make_mesh

    where = NamedSharding(make_mesh({"data": 1, "fsdp": 1, "expert": 8}), PartitionSpec("expert"))
    noise = np.random.default_rng(0).normal(size=(40, 8, 512)).astype(np.float32)
    values = {str(number): jax.device_put(array, where) for number, array in enumerate(noise)}
    with checkpoint.open_manager(RunFolder(folder)) as manager:
        for step in (1, 2):
            checkpoint.save(manager, step, values, values, {})
            manager.wait_until_finished()
    for file in (Path(folder) / "checkpoints" / "2").rglob("ocdbt.process_0/d/*"):
        os.truncate(file, 100)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), checkpoint.open_manager(RunFolder(folder)) as manager:
        restored = checkpoint.restore_newest(manager, selected=values, state=values)
    return {"step": restored.step, "said": said.getvalue().splitlines()}


def backbone_flops(reference: str, meshes: list) -> list[float]:
    """Return the FLOPs a device of the backbone's forward pass on each mesh."""
    import jax

    from mlmoe_jax.models import partition
    from mlmoe_jax.runtime.sharding import unpadded

    config, flops = _config(reference), []
    for sizes in meshes:
        bench = Bench(config, sizes, jax.devices())

        def features(values, image, bench=bench):
            model = bench.definition.merge(unpadded(values, bench.label_axes))
            with partition.over(bench.mesh):
                prompts = None if model.prompts is None else model.prompts(len(image))
                return model.backbone(image, prompts, read=model.head.read)

        values = {**bench.state.raw(), **bench.state.frozen}
        image = jax.ShapeDtypeStruct((BATCH, 64, 64, 3), "float32", sharding=bench.batch()["image"].sharding)
        flops.append(jax.jit(features).lower(values, image).compile().cost_analysis()["flops"])
    return flops


def bank_forms(labels: int, sizes: list) -> dict:
    """Return, for each way to spread task experts, how far outputs and gradients are from one device, and what moves.

    Features come laid out by label, as the head gives them; what moves is told of the forward pass, where labels divide
    over the devices.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from mlmoe_jax.models import partition
    from mlmoe_jax.models.experts import SPREADS, LabelExperts
    from mlmoe_jax.runtime.sharding import make_mesh
    from mlmoe_jax.training.preflight import hlo

    mesh = make_mesh(dict(zip(("data", "fsdp", "expert"), sizes, strict=True)), jax.devices())
    draw, found = np.random.default_rng(0), {}
    features = jnp.asarray(draw.normal(size=(BATCH, labels, 12)), jnp.float32)
    weight = jnp.asarray(draw.normal(size=(BATCH, labels, 2, 6)), jnp.float32)

    def forms(spread):
        bank = LabelExperts(12, labels, hidden=6, shared=0, task=2, spread=spread, rngs=nnx.Rngs(0))
        definition, state = nnx.split(bank)

        def outputs(state, features):
            with partition.over(mesh):
                return nnx.merge(definition, state)(features)[0]

        def both(state, features):
            loss = lambda state, features: jnp.sum(weight * outputs(state, features) ** 2)  # noqa: E731
            return outputs(state, features), jax.grad(loss, (0, 1))(state, features)

        return state, outputs, both

    state, _, both = forms("compiler")
    alone = both(state, features)
    laid = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "expert"))
    by_label = NamedSharding(mesh, PartitionSpec("expert"))
    for spread in SPREADS:
        state, outputs, both = forms(spread)
        whole = labels % sizes[2] == 0
        if whole:
            state, features = jax.device_put(state, by_label), jax.device_put(features, laid)
        gaps = jax.tree.map(
            lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), jax.jit(both)(state, features), alone
        )
        found[spread] = {"gap": max(jax.tree.leaves(gaps)), "moves": []}
        if whole:
            text = jax.jit(outputs, out_shardings=laid).lower(state, features).compile().as_text()
            found[spread]["moves"] = [one.kind for one in hlo.collectives(text, len(jax.devices()))]
    return found


def importance_gaps(meshes: list) -> dict:
    """Return how far the importance of E2VPT's masks is from that on one device, for each mesh, and its scale."""
    from dataclasses import replace

    import jax
    import numpy as np

    from mlmoe_jax.data.labels.space import synthetic_label_space
    from mlmoe_jax.data.sources import digits
    from mlmoe_jax.runs.restore import Run
    from mlmoe_jax.training.prune import measure_importance

    digits.SCENES = {"train": BATCH, "val": BATCH, "test": BATCH, "test_shift": BATCH}
    config = _config("e2vpt:dataset=digits,prompts=4,key_values=2")
    config.model.backbone.weights, config.model.prompts.pruning, config.model.prompts.segments = "none", "learned", 4
    config.train.batch_size, space = BATCH, replace(synthetic_label_space(LABELS, 2), names=tuple("0123456789"))

    def importance(sizes, devices):
        bench = Bench(config, sizes, devices)
        values, frozen = bench.state.raw(), bench.state.frozen
        padded = values["head/classifier/kernel"].shape[1] - LABELS
        run = Run(config, space, bench.look, bench.definition, values, frozen, bench.mesh, bench.label_axes, 1, {})
        return measure_importance(run), padded

    (alone, _), found = importance((1, 1, 1), jax.devices()[:1]), {}
    for sizes in meshes:
        other, padded = importance(sizes, jax.devices())
        gaps = [np.abs(alone[name] - other[name]).max() / np.abs(alone[name]).max() for name in alone]
        found[str(tuple(sizes))] = {"gap": float(max(gaps)), "padded": padded}
    return found


def label_traffic(reference: str, labels: int) -> dict:
    """Return the bytes a device that a training step moves where all devices lie along `expert`, and what it may."""
    import jax

    from mlmoe_jax.runtime.sharding import make_mesh
    from mlmoe_jax.training.preflight import hlo
    from mlmoe_jax.training.preflight.compile_check import Programs

    config = _config(reference)
    steps = Programs(config, make_mesh({"data": 1, "fsdp": 1, "expert": 8}, jax.devices()), labels)
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


# ---------------------------------------------------------------------------------------------------------- tests
REFERENCES = ["mlvpt_digits", "drmoe_resnet101:dataset=digits", "mlmoe_dinov2:dataset=digits"]
QUICK = {  # for every run, in one process
    "differences": ("mlvpt_digits", [(1, 2, 4)], 2),
    "importance_gaps": ([(1, 1, 8), (2, 1, 4)],),
    "bank_forms": (16, (2, 1, 4)),
    "label_traffic": ("drmoe_20k:dataset=digits", 960),
}


@pytest.fixture(scope="module")
def quick():
    """The results of the functions in QUICK, by name."""
    return dict(zip(QUICK, all_on_eight_devices(*((name, *given) for name, given in QUICK.items())), strict=True))


def require_equal_to_one_device(found: dict, meshes: list) -> None:
    assert len(found) == len(meshes)
    for sizes, gaps in found.items():
        assert max(gaps["logits"], gaps["metrics"], gaps["values"]) < 1e-5, (sizes, gaps)
        assert bool(gaps["spread"]) == (not sizes.endswith(" 1)")), "labels lie over the experts' axis"


def test_loss_gradients_and_scores_are_those_of_one_device(quick):
    require_equal_to_one_device(quick["differences"], QUICK["differences"][1])


def test_the_importance_of_masks_is_that_of_one_device(quick):
    """Pruning measures it on the mesh of the training, on which ten labels are padded."""
    found = quick["importance_gaps"]
    assert {sizes: seen["padded"] for sizes, seen in found.items()} == {"(1, 1, 8)": 6, "(2, 1, 4)": 2}
    for sizes, seen in found.items():
        assert seen["gap"] < 1e-5, sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "meshes", "accumulate"),
    [
        ("drmoe_resnet101:dataset=digits", [(1, 1, 8)], 2),
        *((reference, MESHES, 1) for reference in REFERENCES),
    ],
)
def test_all_methods_on_all_meshes_equal_one_device(reference, meshes, accumulate):
    require_equal_to_one_device(on_eight_devices("differences", reference, meshes, accumulate), meshes)


@pytest.mark.slow
def test_a_damaged_checkpoint_of_sharded_arrays_is_passed_over_in_a_line(tmp_path):
    found = on_eight_devices("survived", str(tmp_path))
    assert found["step"] == 1
    (line,) = found["said"]
    assert line.startswith("checkpoint 2 is damaged and was skipped: ")


@pytest.mark.slow
@pytest.mark.parametrize("reference", REFERENCES)
def test_a_checkpoint_of_any_mesh_restores_on_any_other(reference, tmp_path):
    pairs = [((1, 1, 8), (2, 2, 2)), ((2, 2, 2), (1, 1, 8)), ((8, 1, 1), (4, 1, 2))]
    for number, (saved_on, restored_on) in enumerate(pairs):
        assert on_eight_devices("restored", reference, saved_on, restored_on, str(tmp_path / str(number)))


@pytest.mark.slow
def test_the_backbone_costs_a_device_the_same_on_every_mesh():
    flops = on_eight_devices("backbone_flops", "mlvpt_digits", MESHES)
    assert max(flops) == pytest.approx(min(flops), rel=1e-3)


def require_experts_of_one_device(found: dict) -> None:
    assert set(found) == {"compiler", "shard_map"}
    for spread, seen in found.items():
        assert seen["gap"] < 1e-6, spread
        assert not seen["moves"], spread


def test_task_experts_spread_by_hand_are_those_of_one_device(quick):
    """16 labels divide over four devices along `expert`, and nothing moves."""
    require_experts_of_one_device(quick["bank_forms"])


@pytest.mark.slow
def test_task_experts_that_do_not_divide_are_those_of_one_device():
    require_experts_of_one_device(on_eight_devices("bank_forms", 10, (2, 1, 4)))


def test_labels_over_experts_move_tokens_logits_and_shared_gradients_only(quick):
    """Neither gradients of what a label owns nor f32[B,K,D]: tokens, labels and masks come in, logits go out.

    Summed are gradients of shared parameters, and in each of two layers those of keys and values, of the tokens' size.
    """
    seen = quick["label_traffic"]
    assert seen["tokens"] <= seen["moved"] <= seen["tokens"] + 4 * seen["label"] < seen["activations"] / 10
    assert seen["shared"] / 2 < seen["summed"] <= seen["shared"] + 4 * seen["tokens"] < seen["owned"]
