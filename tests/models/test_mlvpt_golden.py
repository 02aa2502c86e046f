"""ML-VPT against the arrays that the authors' PyTorch code gave for a tiny model (float32, CPU).

`A` and `B` are two formulas for the weights; B's matrices have full rank, which makes it the sharper test.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY

from mlmoe_jax.config import default_config
from mlmoe_jax.models.adapters.prompts import DeepPrompts
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.group_experts import GroupExpertsHead
from mlmoe_jax.models.layers import recompute
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.training.objective import Objective

FORWARD, LOSS, GRADIENT = 2e-5, 1e-5, {"A": 1e-3, "B": 1e-4}
TERMS = {"co": "co_logit", "dc": "dc_logit", "co_gate": "moe_co_logit", "dc_gate": "moe_dc_logit"}


def error(ours, theirs) -> float:
    """Return the largest difference relative to the largest reference entry."""
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


class Golden:
    def __init__(self, phase: str):
        name = "mlvpt_dinov2_img56_mask" + ("_B" if phase == "B" else "")
        self.arrays = np.load(PARITY / f"{name}.npz")
        self.case = json.loads((PARITY / f"{name}.json").read_text())
        self.model = tiny_model(self.case)
        self.report = load_weights(self.model, PARITY / f"{name}.weights.npz")
        i = np.arange(2 * 3 * 56 * 56, dtype=np.float64)
        flat = np.sin(0.05 * i) + 0.3 * np.cos(0.003 * i)
        self.image = jnp.asarray(flat.reshape(2, 3, 56, 56).transpose(0, 2, 3, 1), jnp.float32)


def tiny_model(case: dict) -> Classifier:
    rngs = nnx.Rngs(0)
    shape = ViTShape(48, 3, 4, 14, 56, layer_scale=1.0, mask_token=True, position_offset=0.1)
    return Classifier(
        ViT(shape, rngs=rngs),
        DeepPrompts(3, 48, 14, count=12, mask=np.eye(12, dtype=bool), rngs=rngs),
        GroupExpertsHead(48, {"co": case["co_group"], "dc": case["dc_group"]}, groups=2, per_group=3, rngs=rngs),
        final_norm=True,
        precision="highest",
    )


@pytest.fixture(scope="module", params=["A", pytest.param("B", marks=pytest.mark.slow)])
def golden(request):
    with jax.default_matmul_precision("highest"):
        yield Golden(request.param)


def test_every_tensor_of_the_authors_file_is_used(golden):
    assert golden.report.source == "ml_vpt_dinov2"
    assert golden.report.unused == ()
    assert len(golden.report.loaded) == len(golden.case["weights"]) - 1  # two prompt tensors become one


def test_prompts_and_experts(golden):
    features = golden.model.backbone(golden.image, golden.model.prompts(2), read=("prompts",))
    assert error(features.prompts, golden.arrays["prompt_features"]) < FORWARD
    assert error(golden.model.head.experts(features.prompts), golden.arrays["expert_out"]) < FORWARD
    before = golden.model.backbone(golden.image, golden.model.prompts(2), read=("prompts",), norm=False)
    assert error(before.prompts, golden.arrays["prenorm_features"][:, 1:13]) < FORWARD


def test_all_tokens_after_the_last_norm(golden):
    features = golden.model.backbone(golden.image, golden.model.prompts(2), read=("cls", "prompts", "patches"))
    ours = jnp.concatenate([features.cls[:, None], features.prompts, features.patches], axis=1)
    assert error(ours, golden.arrays["norm_features"]) < FORWARD


def test_logits_and_gates(golden):
    prediction = golden.model(golden.image)
    assert error(prediction.logits, golden.arrays["logit"]) < FORWARD
    for ours, theirs in TERMS.items():
        assert error(prediction.terms[ours], golden.arrays[theirs]) < FORWARD, ours
    for side in ("co", "dc"):
        ours = prediction.gates[side]
        assert error(jnp.moveaxis(ours, 2, 1), golden.arrays[f"gate_{side}"]) < FORWARD
        features = golden.model.backbone(golden.image, golden.model.prompts(2), read=("prompts",))
        np.testing.assert_allclose(golden.model.head.gates(features.prompts)[side], ours, atol=1e-7)


def test_loss_and_gradients(golden, request):
    definition, params, _ = ModelDef.split(golden.model)
    settings = default_config().loss
    settings.terms = {"co": 1.0, "dc": 1.0, "co_gate": 1.0, "dc_gate": 1.0}
    ones = jnp.ones((2, 7))
    batch = {"label": jnp.asarray(golden.case["target"]), "label_mask": ones, "mask": jnp.ones(2)}
    objective = Objective(settings)

    def loss(trainable, frozen):
        return objective(definition.merge(trainable, frozen)(golden.image), batch)

    trainable = {path: value for path, value in params.items() if not path.startswith("backbone/")}
    frozen = {path: value for path, value in params.items() if path.startswith("backbone/")}
    (total, parts), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable, frozen)
    assert error(total, golden.arrays["loss"]) < LOSS
    theirs = {"co": "loss_co_cls", "dc": "loss_cl_cls", "co_gate": "loss_co_moe_cls", "dc_gate": "loss_cl_moe_cls"}
    for name, reference in theirs.items():
        assert error(parts[f"loss/{name}"], golden.arrays[reference]) < LOSS, name

    tolerance = GRADIENT[golden.case.get("phase", "A")]
    prompts = gradient["prompts/deep"][:, 0]
    reference = {"prompts": ("img_encoder.prompt_embeddings", "img_encoder.deep_prompt_embeddings")}
    stacked = np.concatenate([golden.arrays[f"grad/{name}"] for name in reference["prompts"]])
    assert error(prompts, stacked) < tolerance
    names = {
        "head/bank/up/kernel": "adapt_experts.W1",
        "head/bank/up/bias": "adapt_experts.b1",
        "head/bank/down/kernel": "adapt_experts.W2",
        "head/bank/down/bias": "adapt_experts.b2",
    }
    for ours, side in (("co", "co"), ("dc", "cl")):
        names[f"head/{ours}/gate/kernel"] = f"{side}_gate.W"
        names[f"head/{ours}/classifier/kernel"] = f"{side}_fc.W"
        names[f"head/{ours}/classifier/bias"] = f"{side}_fc.b"
        assert not np.any(gradient[f"head/{ours}/gate/bias"]), "the authors' code never applies the gate bias"
    for ours, name in names.items():
        expected = golden.arrays[f"grad/{name}"]
        assert error(gradient[ours].reshape(expected.shape), expected) < tolerance, ours
    assert set(names) | {"prompts/deep", "head/co/gate/bias", "head/dc/gate/bias"} == set(gradient)


def test_tanh_gelu_is_detected(golden, monkeypatch):
    monkeypatch.setattr(recompute, "_below", lambda x: 0.5 * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3))))
    assert error(golden.model(golden.image).logits, golden.arrays["logit"]) > FORWARD
