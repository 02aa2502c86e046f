"""Evaluation in another precision than training: `eval.dtype`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.programs import equations

from mlmoe_jax.config import load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.models.apply import PlacedModel, make_eval_step
from mlmoe_jax.runs.assemble import abstract_parts, evaluated_definition
from mlmoe_jax.runs.restore import open_run
from mlmoe_jax.runtime.sharding import make_mesh
from mlmoe_jax.training.build_steps import abstract_steps


def types(step, parts) -> set[str]:
    """Return the types of the operands of all matrix products and convolutions of a step, on two images."""
    number = jax.ShapeDtypeStruct((2,), jnp.float32)
    batch = {"image": jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.uint8), "id": number, "mask": number}
    program = step.trace({**parts.trainable, **parts.stats}, parts.frozen, batch).jaxpr
    names = ("dot_general", "conv_general_dilated")
    every = (equation for equation in equations(program.jaxpr) if equation.primitive.name in names)
    return {str(operand.aval.dtype) for equation in every for operand in equation.invars}


@pytest.mark.variants("name")
@pytest.mark.usefixtures("tiny_vit")
@pytest.mark.parametrize("name", ["mlvpt_dinov2", "e2vpt", "q2l_resnet101", "drmoe_resnet101"])
def test_a_method_evaluates_in_float16_and_trains_in_bfloat16(name):
    config = load_config(f"{name}:dataset=digits", [("model.dtype", "bfloat16"), ("eval.dtype", "float16")])
    space, look = synthetic_label_space(4, config.model.prompts.num_groups), Preprocess(64, (0.5,) * 3, (0.25,) * 3)
    parts, mesh = abstract_parts(config, space), make_mesh(config.mesh)
    placed = PlacedModel(definition=parts.definition, preprocess=look, mesh=mesh)
    evaluated = types(make_eval_step(replace(placed, definition=evaluated_definition(config, parts, space))), parts)
    trained = types(make_eval_step(placed), parts)
    assert evaluated - {"float32"} == {"float16"}
    assert trained - {"float32"} == {"bfloat16"}


@pytest.mark.usefixtures("tiny_vit")
def test_the_steps_of_a_training_evaluate_in_the_type_of_evaluation():
    config = load_config("mlvpt_digits", [("eval.dtype", "float16")])
    parts, steps = abstract_steps(config, make_mesh(config.mesh))
    assert "float16" in types(steps.eval_step, parts)


@pytest.mark.slow
def test_a_run_is_evaluated_in_the_type_that_is_asked_for(run):
    image = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    batch, logits = {"image": image, "id": np.arange(2), "mask": np.ones(2)}, {}
    for dtype in ("same", "float16"):
        opened = open_run(run("published").folder, [("eval.dtype", dtype)])
        step = make_eval_step(opened)
        logits[dtype] = np.asarray(step(opened.values, opened.frozen, batch)["logits"])
    assert 0 < np.abs(logits["float16"] - logits["same"]).max() < 0.02
