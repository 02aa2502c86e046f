"""The state dict of the authors' ML-VPT model on a DINOv2 ViT; `cl` is what the paper calls DC."""

from mlmoe_jax.pretrained.rules.base import Rule, Source, nested, token_set
from mlmoe_jax.pretrained.rules.vit import timm_rules

_SIDES = (("co", "co"), ("cl", "dc"))

ML_VPT_DINOV2 = Source(
    "ml_vpt_dinov2",
    "adapt_experts.W1",
    (
        *nested(timm_rules(block=r"blocks\.\d+\.(\d+)"), r"img_encoder\.", "backbone/"),
        Rule(r"img_encoder\.prompt_embeddings", "prompts/deep", token_set, part=0, axis=0),
        Rule(r"img_encoder\.deep_prompt_embeddings", "prompts/deep", token_set, part=1, axis=0),
        Rule(r"adapt_experts\.W1", "head/bank/up/kernel"),
        Rule(r"adapt_experts\.b1", "head/bank/up/bias"),
        Rule(r"adapt_experts\.W2", "head/bank/down/kernel"),
        Rule(r"adapt_experts\.b2", "head/bank/down/bias"),
        # gate rows are e·K + k, which is [M,K] flattened
        *(Rule(rf"{theirs}_gate\.W", f"head/{ours}/gate/kernel", reshape=True) for theirs, ours in _SIDES),
        *(Rule(rf"{theirs}_gate\.b", f"head/{ours}/gate/bias", reshape=True) for theirs, ours in _SIDES),
        *(Rule(rf"{theirs}_fc\.W", f"head/{ours}/classifier/kernel", reshape=True) for theirs, ours in _SIDES),
        *(Rule(rf"{theirs}_fc\.b", f"head/{ours}/classifier/bias", reshape=True) for theirs, ours in _SIDES),
    ),
)
