"""ML-VPT against the arrays that the authors' PyTorch code gave for a tiny model (float32, CPU)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.golden import GRADIENTS, LOSSES, TERMS, Golden
from helpers.twins import error

from mlmoe_jax.models.experts import apply_bank

FORWARD, LOSS, GRADIENT = 2e-5, 1e-5, 1e-4


@pytest.fixture(scope="module")
def golden():
    with jax.default_matmul_precision("highest"):
        yield Golden()


@pytest.fixture(scope="module")
def computed(golden):
    """What the model and its parts return, all from one program."""

    @jax.jit
    def run(image):
        model, prompts = golden.model, golden.model.prompts(2)
        every = model.backbone(image, prompts, read=("cls", "prompts", "patches"))
        after, before = (model.backbone(image, prompts, read=("prompts",), norm=norm).prompts for norm in (True, False))
        tokens = jnp.concatenate([every.cls[:, None], every.prompts, every.patches], axis=1)
        return tokens, after, before, apply_bank(model.head.bank, after), model(image)

    return run(golden.image)


def test_every_tensor_of_the_authors_file_is_used(golden):
    assert golden.report.layout == "ml_vpt_dinov2"
    assert golden.report.unused == ()
    assert len(golden.report.loaded) == len(golden.case["weights"]) - 1  # two prompt tensors become one


def test_tokens_prompts_and_experts(golden, computed):
    tokens, after, before, experts, *_ = computed
    assert error(tokens, golden.arrays["norm_features"]) < FORWARD
    assert error(after, golden.arrays["prompt_features"]) < FORWARD
    assert error(before, golden.arrays["prenorm_features"][:, 1:13]) < FORWARD
    assert error(experts, golden.arrays["expert_out"]) < FORWARD


def test_logits_and_gates(golden, computed):
    *_, prediction = computed
    assert error(prediction.logits, golden.arrays["logit"]) < FORWARD
    for ours, theirs in TERMS.items():
        assert error(prediction.terms[ours], golden.arrays[theirs]) < FORWARD, ours
    for side in ("co", "dc"):
        ours = prediction.gates[side]
        assert error(jnp.moveaxis(ours, 2, 1), golden.arrays[f"gate_{side}"]) < FORWARD


def test_loss_and_gradients(golden):
    total, parts, gradient = golden.loss_and_gradient()
    assert total == pytest.approx(golden.arrays["loss"].item(), rel=LOSS)
    for name, reference in LOSSES.items():
        assert parts[f"loss/{name}"] == pytest.approx(golden.arrays[reference].item(), rel=LOSS), name
    for path, expected in golden.reference_gradient().items():
        assert error(gradient[path].reshape(expected.shape), expected) < GRADIENT, path
    unused = {f"head/{side}/gate/bias" for side in ("co", "dc")}
    assert not any(np.any(gradient[path]) for path in unused), "the authors' code never applies the gate bias"
    assert {*GRADIENTS, "prompts/deep"} | unused == set(gradient)
