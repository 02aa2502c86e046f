import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mlmoe_jax.config import default_config
from mlmoe_jax.runtime.batches import RunAhead
from mlmoe_jax.runtime.sharding import (
    AXES,
    LabelAxes,
    abstract_shards,
    make_mesh,
    shard_batch,
    tree_shardings,
    unpad,
)
from mlmoe_jax.training.step import initial_state

# (fsdp, expert) -> (data, fsdp, expert)
FITTING = {
    (1, 1): (8, 1, 1),
    (2, 2): (2, 2, 2),
    (2, 1): (4, 2, 1),
    (-1, 1): (1, 8, 1),
    (-1, 2): (1, 4, 2),
    (2, -1): (1, 2, 4),
    (8, 1): (1, 8, 1),
}


@pytest.mark.parametrize(("asked", "shape"), FITTING.items())
def test_one_axis_may_be_all_remaining_devices(asked, shape):
    mesh = make_mesh(dict(zip(("fsdp", "expert"), asked, strict=True)), np.arange(8))
    assert (mesh.devices.shape, mesh.axis_names) == (shape, AXES)
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert sorted(mesh.devices.flat) == list(range(8)), "each device once"


@pytest.fixture
def mesh():
    return make_mesh(default_config().mesh)


def test_a_batch_is_sharded_over_the_whole_mesh(mesh):
    batch = {"image": np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3), "mask": np.ones(2, np.float32)}
    sharded = shard_batch(batch, mesh)
    assert set(sharded) == {"image", "mask"}
    for name, value in sharded.items():
        np.testing.assert_array_equal(value, batch[name])
        assert value.dtype == batch[name].dtype
        assert value.sharding.spec == PartitionSpec(AXES), "on one device all shardings are equivalent"


def mesh_of(data, fsdp, expert):
    return AbstractMesh((data, fsdp, expert), AXES, axis_types=(AxisType.Auto,) * 3)


LABELS = LabelAxes(10, {"head/kernel": 1, "head/bias": 0})


def specs_of(tree, mesh, labels=None):
    return jax.tree.map(
        lambda s: s.spec, tree_shardings(tree, mesh, labels), is_leaf=lambda x: isinstance(x, NamedSharding)
    )


def test_values_per_label_are_sharded_over_expert_with_moments_and_averages():
    params = {"head/kernel": jnp.ones((4, 10)), "head/bias": jnp.ones(10), "prompts/deep": jnp.ones(10)}
    optimizer = optax.chain(optax.clip(1.0), optax.scale_by_adam())
    state = initial_state(params, {"backbone/f": jnp.ones(10)}, {}, optimizer.init(params))
    specs = specs_of(state, mesh_of(2, 1, 5), LABELS)
    over = {
        "head/kernel": PartitionSpec(None, "expert"),
        "head/bias": PartitionSpec("expert"),
        "prompts/deep": PartitionSpec(),
    }
    assert specs.trainable == specs.ema == specs.opt[1].mu == specs.opt[1].nu == over
    assert (specs.step, specs.frozen["backbone/f"], specs.opt[1].count) == (PartitionSpec(),) * 3
    assert set(jax.tree.leaves(specs_of(state, mesh_of(2, 1, 5)))) == {PartitionSpec()}, (
        "nothing is sharded without labels"
    )


def test_large_arrays_are_sharded_over_fsdp_along_the_longest_axis_that_divides():
    shapes = {"a": (64, 96), "b": (97, 64), "c": (97, 53), "d": (8, 8), "head/kernel": (640, 10)}
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    assert specs_of(tree, mesh_of(1, 4, 2), LABELS) == {
        "a": PartitionSpec(None, "fsdp"),
        "b": PartitionSpec(None, "fsdp"),
        "c": PartitionSpec(),
        "d": PartitionSpec(),
        "head/kernel": PartitionSpec("fsdp", "expert"),
    }
    assert set(specs_of(tree, mesh_of(8, 1, 1)).values()) == {PartitionSpec()}


def test_labels_that_do_not_divide_are_padded_between_steps():
    tree = {"head/kernel": jax.ShapeDtypeStruct((4, 10), jnp.float32), "other": jax.ShapeDtypeStruct((10,), jnp.int32)}
    placed = abstract_shards(tree, mesh_of(1, 1, 3), LABELS)
    assert (placed["head/kernel"].shape, placed["other"].shape) == ((4, 12), (10,))
    assert placed["head/kernel"].sharding.spec == PartitionSpec(None, "expert")
    assert abstract_shards(tree, mesh_of(1, 1, 5), LABELS)["head/kernel"].shape == (4, 10)
    stored = unpad(placed, mesh_of(1, 1, 3), LABELS)
    assert (stored["head/kernel"].shape, stored["head/kernel"].sharding.spec) == ((4, 10), PartitionSpec())
    assert stored["other"] is placed["other"]


def test_padding_is_cut_by_one_program_per_shape(caplog):
    """At every checkpoint, in the training loop."""
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1}, jax.devices()[:1])
    padded = {"head/kernel": jnp.arange(48.0).reshape(4, 12), "head/bias": jnp.arange(12.0)}
    later = jax.tree.map(lambda x: x + 1, padded)
    with jax.log_compiles():
        unpad(padded, mesh, LABELS)
        assert "Compiling" in caplog.text
        caplog.clear()
        stored = unpad(later, mesh, LABELS)
        assert "Compiling" not in caplog.text
    np.testing.assert_array_equal(stored["head/kernel"], np.arange(48.0).reshape(4, 12)[:, :10] + 1)


def test_the_host_is_at_most_two_steps_ahead_of_the_device(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    ahead = RunAhead()
    for step in range(6):
        ahead.add(step)
        assert waited == list(range(step - 1)), "the steps that are known to be done"
