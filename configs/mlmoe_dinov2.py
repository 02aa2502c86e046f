"""MLMoE combines ML-VPT and DR-MoE: group prompts in a frozen DINOv2, label queries over patches and prompts, experts.

    mlmoe train --config=mlmoe_dinov2:root=/data/coco --workdir=runs/mlmoe
    mlmoe train --config=mlmoe_dinov2:dataset=digits --workdir=runs/mlmoe_digits

The query of each label attends to all patches and to the prompts of its own co-occurrence and discriminative groups.
Shared and task experts process the result, weighted by one gate per label and image. Prompts, decoder, experts and
gates are trained together. The recipe follows configs/mlvpt_dinov2.py.
"""

from mlmoe_jax.config.recipes.feature_map import mlmoe_config


def get_config(arg=""):
    return mlmoe_config(arg, backbone="dinov2_vitb14")
