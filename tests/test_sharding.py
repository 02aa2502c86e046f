import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mlmoe_jax import sharding
from mlmoe_jax.config import default_config
from mlmoe_jax.sharding import AXES, make_mesh, place, placements, shard_batch
from mlmoe_jax.state import initial_state


@pytest.fixture
def eight(monkeypatch):
    """Eight devices, as far as a mesh is concerned."""
    devices = [object() for _ in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(sharding, "Mesh", lambda devices, axes, axis_types: (devices.shape, axes, axis_types))


def sizes(data, fsdp, expert):
    return {"data": data, "fsdp": fsdp, "expert": expert}


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ((8, 1, 1), (8, 1, 1)),
        ((-1, 1, 1), (8, 1, 1)),
        ((-1, 2, 2), (2, 2, 2)),
        ((2, -1, 1), (2, 4, 1)),
        ((1, 2, -1), (1, 2, 4)),
        ((-1, 8, 1), (1, 8, 1)),
    ],
)
def test_one_axis_may_be_what_remains(eight, asked, shape):
    got, axes, types = make_mesh(sizes(*asked))
    assert got == shape
    assert axes == AXES
    assert types == (AxisType.Auto,) * 3


@pytest.mark.parametrize(
    "asked", [(4, 1, 1), (-1, 3, 1), (-1, -1, 1), (-1, 16, 1), (-1, 0, 1), (-2, -4, 1), (-1, -8, -1)]
)
def test_sizes_that_do_not_fit_are_refused(eight, refusal, asked):
    sentence = refusal(make_mesh, sizes(*asked))
    assert sentence == (
        f"mesh data={asked[0]}, fsdp={asked[1]}, expert={asked[2]} does not fit 8 device(s); "
        "set at most one of config.mesh.* to -1"
    )


@pytest.fixture
def mesh():
    return make_mesh(default_config().mesh)


def test_the_default_mesh_is_all_devices_with_automatic_axes(mesh):
    assert mesh.axis_names == ("data", "fsdp", "expert")
    assert mesh.devices.tolist() == [[[device]] for device in jax.devices()]
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_batch_lies_over_the_whole_mesh(mesh):
    batch = {"image": np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3), "mask": np.ones(2, np.float32)}
    sharded = shard_batch(batch, mesh)
    assert set(sharded) == {"image", "mask"}
    for name, value in sharded.items():
        np.testing.assert_array_equal(value, batch[name])
        assert value.dtype == batch[name].dtype
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(AXES)), value.ndim)
        assert value.sharding.spec == PartitionSpec(AXES), "on one device all shardings are equivalent"


def test_everything_is_replicated_today(mesh):
    state = initial_state({"head/kernel": jnp.ones((4, 2))}, {"backbone/f": jnp.ones(3)}, {}, ())
    placed = place(state, mesh)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    for value in jax.tree.leaves(placed):
        assert value.sharding == NamedSharding(mesh, PartitionSpec())
    np.testing.assert_array_equal(placed.trainable["head/kernel"], np.ones((4, 2)))


def test_rules_place_parameters_with_their_moments_and_averages(mesh, monkeypatch):
    over = PartitionSpec("fsdp")
    rules = ((r"head/kernel$", over), (r"opt/.*mu/head/bias", PartitionSpec("expert")), (r"", PartitionSpec()))
    monkeypatch.setattr(sharding, "PLACEMENT", rules)
    params = {"head/kernel": jnp.ones((4, 2)), "head/bias": jnp.ones(2)}
    optimizer = optax.chain(optax.clip(1.0), optax.scale_by_adam())
    state = initial_state(params, {"backbone/f": jnp.ones(3)}, {}, optimizer.init(params))
    specs = jax.tree.map(lambda s: s.spec, placements(state, mesh), is_leaf=lambda x: isinstance(x, NamedSharding))
    assert specs.trainable == {"head/kernel": over, "head/bias": PartitionSpec()}
    assert specs.ema == specs.trainable
    assert specs.opt[1].nu == specs.trainable
    assert specs.opt[1].mu == {"head/kernel": over, "head/bias": PartitionSpec("expert")}
    assert (specs.step, specs.frozen["backbone/f"], specs.opt[1].count) == (PartitionSpec(),) * 3
    placed = place(state, mesh)
    assert placed.opt[1].mu["head/kernel"].sharding.spec == over


def test_what_no_rule_matches_is_replicated(mesh, monkeypatch):
    monkeypatch.setattr(sharding, "PLACEMENT", ((r"head", PartitionSpec("fsdp")),))
    placed = placements({"head/a": 1, "other/b": [2]}, mesh)
    assert placed["head/a"].spec == PartitionSpec("fsdp")
    assert placed["other/b"][0].spec == PartitionSpec()
