"""A tiny ML-VPT with the weights of the authors' PyTorch code, and what that code computed on a CPU in float32."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from helpers.paths import PARITY
from helpers.prompts import make_prompts
from mlmoe_jax.config import default_config
from mlmoe_jax.models.adapters.group_prompts import GroupPrompts
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.group_experts import GroupExpertsHead
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.training.objective import Objective

TERMS = {"co": "co_logit", "dc": "dc_logit", "co_gate": "moe_co_logit", "dc_gate": "moe_dc_logit"}
LOSSES = {"co": "loss_co_cls", "dc": "loss_cl_cls", "co_gate": "loss_co_moe_cls", "dc_gate": "loss_cl_moe_cls"}
PROMPTS = ("img_encoder.prompt_embeddings", "img_encoder.deep_prompt_embeddings")
GRADIENTS = {
    "head/bank/up/kernel": "adapt_experts.W1",
    "head/bank/up/bias": "adapt_experts.b1",
    "head/bank/down/kernel": "adapt_experts.W2",
    "head/bank/down/bias": "adapt_experts.b2",
    "head/co/gate/kernel": "co_gate.W",
    "head/co/classifier/kernel": "co_fc.W",
    "head/co/classifier/bias": "co_fc.b",
    "head/dc/gate/kernel": "cl_gate.W",
    "head/dc/classifier/kernel": "cl_fc.W",
    "head/dc/classifier/bias": "cl_fc.b",
}


class Golden:
    """The model, its input, and the arrays of the authors' code.

    Args:
      dtype: type of the matrix products; None = float32.
      precision: of float32 products.
    """

    def __init__(self, dtype=None, precision: str = "highest"):
        self.arrays = np.load(PARITY / "mlvpt.npz")
        self.case = json.loads((PARITY / "mlvpt.json").read_text())
        self.model = nnx.eval_shape(lambda: tiny_model(self.case, dtype, precision))
        self.report = load_weights(self.model, PARITY / "mlvpt.weights.npz")
        i = np.arange(2 * 3 * 56 * 56, dtype=np.float64)
        flat = np.sin(0.05 * i) + 0.3 * np.cos(0.003 * i)
        self.image = jnp.asarray(flat.reshape(2, 3, 56, 56).transpose(0, 2, 3, 1), jnp.float32)

    def loss_and_gradient(self) -> tuple[jax.Array, dict, dict]:
        """Return the loss, its parts, and its gradient by trainable path."""
        definition, params, _ = ModelDef.split(self.model)
        settings = default_config().loss
        settings.terms = dict.fromkeys(TERMS, 1.0)
        batch = {"label": jnp.asarray(self.case["target"]), "label_mask": jnp.ones((2, 7)), "mask": jnp.ones(2)}
        objective = Objective(settings)

        def loss(trainable, frozen):
            return objective(definition.merge(trainable, frozen)(self.image), batch)

        trainable = {path: value for path, value in params.items() if not path.startswith("backbone/")}
        frozen = {path: value for path, value in params.items() if path.startswith("backbone/")}
        (total, parts), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable, frozen)
        return total, parts, gradient

    def reference_gradient(self) -> dict[str, np.ndarray]:
        """Return the authors' gradient by path, in the shapes of their tensors."""
        prompts = np.concatenate([self.arrays[f"grad/{name}"] for name in PROMPTS])
        return {"prompts/deep": prompts, **{path: self.arrays[f"grad/{name}"] for path, name in GRADIENTS.items()}}


def tiny_model(case: dict, dtype=None, precision: str = "highest") -> Classifier:
    rngs = nnx.Rngs(0)
    shape = ViTShape(48, 3, 4, 14, 56, layer_scale=1.0, mask_token=True, position_offset=0.1)
    sides = {"co": case["co_group"], "dc": case["dc_group"]}
    return Classifier(
        ViT(shape, dtype=dtype, rngs=rngs),
        make_prompts(GroupPrompts, shape, rngs, num_groups=2, per_group=3),
        GroupExpertsHead(48, sides, groups=2, per_group=3, dtype=dtype, rngs=rngs),
        final_norm=True,
        precision=precision,
    )
