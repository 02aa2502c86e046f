"""The linear classifier on the class token (linear probing, VPT, full fine-tuning)."""

import jax
from flax import nnx

from mlmoe_jax.models.contracts import CLS, Features, Prediction
from mlmoe_jax.models.initializers import torch_linear


class LinearHead(nnx.Module):
    """logits = V·cls + b, drawn as torch.nn.Linear draws them."""

    read = (CLS,)

    def __init__(self, width: int, labels: int, *, rngs: nnx.Rngs):
        draw = torch_linear(width)
        self.classifier = nnx.Linear(width, labels, kernel_init=draw, bias_init=draw, rngs=rngs)

    def __call__(self, features: Features) -> Prediction:
        """Classify `features.cls` f32[B,D] into K labels."""
        logits = self.classifier(features.cls.astype(jax.numpy.float32))
        return Prediction(logits, terms={"logits": logits})
