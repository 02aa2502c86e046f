"""Initial values are those of the whole model to the last bit, and only missing ones are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.build import build_model
from mlmoe_jax.models.params import draw_missing


def values(module: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(module))
    return {"/".join(map(str, path)): variable.get_value() for path, variable in state}


def same_bits(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        assert (ours[path].dtype, ours[path].weak_type) == (value.dtype, value.weak_type), path
        np.testing.assert_array_equal(ours[path], value, err_msg=path)


class Pair(nnx.Module):
    """A linear layer, and a value that counts how often it is computed."""

    def __init__(self, computed: list, rngs: nnx.Rngs):
        def counted() -> np.ndarray:
            computed.append(1)
            return np.float32([1, 2])

        self.counted = nnx.Param(jax.pure_callback(counted, jax.ShapeDtypeStruct((2,), jnp.float32)) * 2)
        self.linear = nnx.Linear(3, 4, rngs=rngs)


def test_only_values_that_are_missing_are_computed():
    computed: list[int] = []

    def build() -> Pair:
        return Pair(computed, nnx.Rngs(3))

    whole, pair = values(build()), nnx.eval_shape(build)
    del computed[:]
    draw_missing(pair, build, drawable=("linear/kernel",))
    assert isinstance(pair.linear.bias.get_value(), jax.ShapeDtypeStruct)
    np.testing.assert_array_equal(pair.linear.kernel[...], whole["linear/kernel"])
    nnx.update(pair, nnx.from_flat_state({("linear", "bias"): nnx.Param(jnp.full(4, 7.0))}))  # as from a file
    pair.counted.set_value(jnp.zeros(2))
    draw_missing(pair, build)
    same_bits(values(pair), {**whole, "linear/bias": jnp.full(4, 7.0), "counted": jnp.zeros(2)})
    assert not computed

    again = nnx.eval_shape(build)
    draw_missing(again, build)
    same_bits(values(again), whole)
    assert computed == [1]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_vit")
@pytest.mark.parametrize("name", ["mlvpt_digits", "drmoe_resnet101:dataset=digits", "e2vpt:dataset=digits"])
def test_a_model_gets_the_values_that_it_would_get_as_a_whole(name):
    from mlmoe_jax.config import load_config

    config = load_config(name, [])
    space = synthetic_label_space(4, config.model.prompts.num_groups)

    def build() -> nnx.Module:
        return build_model(config, space, rngs=nnx.Rngs(5))

    model = nnx.eval_shape(build)
    draw_missing(model, build)
    same_bits(values(model), values(build()))
