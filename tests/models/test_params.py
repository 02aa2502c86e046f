import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers.bench import Bench, drawn_batch
from helpers.drawn import drawn
from helpers.prompts import make_prompts

from mlmoe_jax.config import default_config
from mlmoe_jax.models import rules
from mlmoe_jax.models.adapters.group_prompts import GroupPrompts
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.group_experts import GroupExpertsHead
from mlmoe_jax.models.layers.batch_norm import BatchNorm
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.models.params import ModelDef, fingerprint, parameter_table, split_trainable

CO, DC = [0, 1, 0], [1, 1, 0]


def ml_vpt() -> Classifier:
    rngs = nnx.Rngs(0)
    shape = ViTShape(width=16, depth=2, heads=2, patch=8, native=16, layer_scale=0.1)
    return Classifier(
        ViT(shape, rngs=rngs),
        make_prompts(GroupPrompts, shape, rngs, num_groups=2, per_group=2),
        GroupExpertsHead(16, {"co": CO, "dc": DC}, groups=2, per_group=2, hidden=3, rngs=rngs),
        final_norm=True,
        precision="default",
    )


@pytest.fixture(scope="module")
def model():
    return drawn(ml_vpt, 0.2)


@pytest.fixture(scope="module")
def parts(model):
    return ModelDef.split(model)


# ------------------------------------------------------------------------------------------------- split and merge
def test_shapes_stand_for_values_that_are_not_needed(parts):
    definition, params, stats = parts
    shapes = definition.shapes()
    assert {path: (v.shape, v.dtype) for path, v in shapes.items()} == {
        path: (v.shape, v.dtype) for path, v in {**params, **stats}.items()
    }
    (path, value), *_ = params.items()
    merged = ModelDef.split(definition.merge(shapes, {path: value}))[1]
    assert [name for name, v in merged.items() if not isinstance(v, jax.ShapeDtypeStruct)] == [path]


# ------------------------------------------------------------------------------------------------------ trainable
def test_the_first_rule_that_matches_anywhere_in_a_path_wins():
    paths = ("backbone/blocks/3/attn/qkv/kernel", "head/co/gate/bias", "prompts/deep")
    ordered = [["gate/bias$", 1], ["head/", None], [".*", 3]]  # lists, as read from JSON
    assert rules.assign(ordered, paths) == dict(zip(paths, (3, 1, 3), strict=True))
    assert [rules.first_match(ordered[1:2], path, 5) for path in paths] == [5, None, 5]


def test_parameter_table_sums_up(parts):
    _, params, _ = parts
    trainable, frozen = split_trainable(params, ((r"blocks/1/", True), (r"^backbone/", False), (r"", True)))
    head, *rows, last = parameter_table(trainable, frozen).text().splitlines()
    assert head.split() == ["module", "parameters", "trainable"]
    split = [row.replace(",", "").split() for row in rows]
    counts = {name: (int(total), int(learned)) for name, total, learned in split}
    block = 16 * 48 + 48 + 16 * 16 + 16 + 16 * 64 + 64 + 64 * 16 + 16 + 6 * 16
    assert counts["backbone/blocks"] == (2 * block, block)
    assert counts["backbone"] == (16 + 5 * 16, 0), "the class token and the position table"
    assert counts["prompts"] == (2 * 8 * 16, 2 * 8 * 16)
    assert counts["head/co"] == counts["head/dc"] == (2 * 3 * 16 + 2 * 3 + 3 * 16 + 3,) * 2
    total, learned = (sum(column) for column in zip(*counts.values(), strict=True))
    assert total == sum(value.size for value in params.values())
    assert learned == sum(value.size for value in trainable.values())
    assert last == f"{learned:,} of {total:,} parameters trainable ({100 * learned / total:.2f} %)"


# ---------------------------------------------------------------------------------------------------- fingerprint
def test_a_fingerprint_is_of_names_types_shapes_and_every_bit():
    params = {"b/x": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones((), np.float32)}
    known = fingerprint(params)
    assert fingerprint(dict(reversed(params.items()))) == known, "the order does not matter"
    assert fingerprint(jax.tree.map(jnp.asarray, params)) == known, "nor the device of the arrays"
    assert fingerprint({**params, "b/x": np.asfortranarray(params["b/x"])}) == known, "nor their layout in memory"
    one_bit = params["b/x"].copy()
    one_bit.view(np.uint32)[1, 2] ^= 1
    wide = {path: value.astype(np.float64) if value.dtype == np.float32 else value for path, value in params.items()}
    assert fingerprint(wide) == known, "nor JAX_ENABLE_X64"
    changes = [
        {**params, "b/x": one_bit},
        {**params, "b/x": params["b/x"].reshape(3, 2)},
        {**params, "b/x": params["b/x"].astype(ml_dtypes.bfloat16)},
        {**params, "a": np.ones((1,), np.float32)},
        {"b/y": params["b/x"], "a": params["a"]},
        {"a": params["a"]},
        {**params, "c": np.zeros(0, np.float32)},
    ]
    assert len({known, *(fingerprint(changed) for changed in changes)}) == 1 + len(changes)


def test_a_fingerprint_is_stable_across_versions():
    """Run folders contain it: after a change, the frozen weights of all older runs would be refused."""
    params = {"w": np.array([[1.0, -2.0]], np.float32)}
    assert fingerprint(params) == "25a73524decac58a3a1417739317f4f1054f27a73379fdecbcbe68e227fc7aa9"


# --------------------------------------------------------------------------------------------------------- states
class Normalized(nnx.Module):
    """A linear layer on the mean colors of batch-normalized images."""

    def __init__(self):
        self.norm = BatchNorm(3, mode="trainable")
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, image, *, labels=None, rngs=None):
        return Prediction(self.linear(self.norm(image).mean((1, 2))))


def test_statistics_are_updated_by_the_forward_pass_and_by_no_optimizer():
    config = default_config()
    config.ema.decay, config.ema.warmup, config.trainable = 0.75, False, ((r"", True),)
    bench, batch = Bench(config, Normalized(), 2, side=4), drawn_batch(8, 4, 2)
    before, (after, _) = bench.start(), bench.run(batch)
    seen = (batch["image"] / 255 - 0.5) / 0.25
    np.testing.assert_allclose(after.stats["norm/mean"], 0.1 * seen.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(after.stats["norm/var"], 0.9 + 0.1 * seen.var((0, 1, 2), ddof=1), rtol=1e-5)
    assert set(after.stats) == {"norm/mean", "norm/var"}
    moments = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(after.opt)]
    assert any("linear/kernel" in path for path in moments)
    assert not any("norm/mean" in path for path in moments)
    assert set(after.ema) == {*after.trainable, *after.stats}
    for path, first in before.raw().items():
        expected = 0.75 * first + 0.25 * after.raw()[path]
        np.testing.assert_allclose(after.ema[path], expected, rtol=1e-5, atol=1e-7)
