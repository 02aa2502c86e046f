"""MLMoE joins both papers: group prompts in a frozen DINOv2, label queries over patches and group tokens, experts.

    python -m mlmoe_jax.main --config=configs/mlmoe_dinov2.py:root=/data/coco --workdir=runs/mlmoe
    python -m mlmoe_jax.main --config=configs/mlmoe_dinov2.py:dataset=digits --workdir=runs/mlmoe_digits

A label's query sees all patches and the prompts of its own co-occurrence and discriminative groups; shared and task
experts, weighed by a gate a label and image, work on what it found. Prompts, decoder, experts and gates train together.

prompts: false leaves the group prompts out: label queries and experts on a frozen ViT. gates: mlp | linear | static.
preset: code | paper, whose learning rate and EMA (see configs/linear_probe.py).
dataset, root, resolution, backbone: as in configs/mlvpt_dinov2.py, whose recipe it has.
"""

from mlmoe_jax.config.recipes.feature_map import small, use_routed_experts
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning


def get_config(arg=""):
    config, options = prompt_tuning(arg, digits_rate=1e-3, prompts=True, gates="mlp")
    use_routed_experts(config, "recommended")
    config.model.head.routing.gate = options.gates
    config.model.head.routing.entropy = "off"  # DR-MoE's weight is nothing beside a loss of this scale
    config.model.head.decoder.encoder_layers = 0  # a frozen ViT's patches have seen one another
    config.model.head.decoder.decoder_layers = 1
    if options.prompts:
        config.model.prompts.kind = "group"
    if options.dataset == "digits":
        small(config, rate=1e-3)
    return config
