"""The precision of matmuls is a property of the model, and JAX's own setting stays as it is."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.bench import drawn_model
from helpers.programs import equations
from helpers.runs import recipe

from mlmoe_jax import load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.layers.dispatch import use_kernels
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training import loop

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2  # of resampled positions in any case


@pytest.mark.variants("precision", "method")
@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("method", ["mlvpt_digits", "lora"])
def test_all_matmuls_have_the_precision_of_the_config(tiny_vit, method, precision):
    config = load_config(method, {"model.backbone.name": "vit_digits", "model.matmul_precision": precision})
    structure, state = nnx.split(drawn_model(config, synthetic_label_space(4, 2)))
    image = jnp.zeros((1, config.data.image_size, config.data.image_size, 3))
    loss = lambda state: nnx.merge(structure, state)(image).logits.sum()  # noqa: E731
    before = jax.config.jax_default_matmul_precision
    forward = jax.make_jaxpr(loss)(state)
    assert jax.config.jax_default_matmul_precision == before
    with jax.default_matmul_precision(precision):  # as in training: some backward passes are traced later
        backward = jax.make_jaxpr(jax.grad(loss, allow_int=True))(state)
    expected = (getattr(jax.lax.Precision, precision.upper()),) * 2
    every = [*equations(forward.jaxpr), *equations(backward.jaxpr)]
    matmuls = {equation.params["precision"] for equation in every if equation.primitive.name == "dot_general"}
    assert matmuls - {HIGHEST} == {expected} - {HIGHEST}


@pytest.mark.usefixtures("run")
def test_training_computes_at_the_precision_and_by_the_kernels_of_the_config(monkeypatch, tmp_path):
    config, found = recipe("probe", model__matmul_precision="highest", model__kernels="xla"), []
    before = jax.config.jax_default_matmul_precision
    note = lambda *_: found.append((jax.config.jax_default_matmul_precision, use_kernels.value))  # noqa: E731
    monkeypatch.setattr(loop, "run_steps", note)
    monkeypatch.setattr(loop, "finish", lambda *_: {})
    loop.train(config, RunFolder(tmp_path))
    assert found == [("highest", "xla")]
    assert (jax.config.jax_default_matmul_precision, use_kernels.value) == (before, "auto")
