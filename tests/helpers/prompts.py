"""Prompts outside a model."""

from flax import nnx

from mlmoe_jax.config import default_config
from mlmoe_jax.models.adapters.prompts import NoPrompts, _PromptTokens
from mlmoe_jax.models.contracts import BackboneShape

WITHOUT_PROMPTS = NoPrompts(None, None, dtype=None, rngs=None)


def make_prompts(kind: type[_PromptTokens], shape: BackboneShape, rngs: nnx.Rngs, **settings) -> _PromptTokens:
    """Return prompts of a kind with the defaults of `model.prompts`, except `settings`."""
    section = default_config().model.prompts
    section.update(settings)
    return kind(section, shape, rngs=rngs)
