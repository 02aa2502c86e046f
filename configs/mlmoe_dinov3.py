"""MLMoE on a frozen DINOv3: group prompts, label queries over patches and prompts, experts.

    mlmoe train --config=mlmoe_dinov3:root=/data/coco --workdir=runs/mlmoe_dinov3

For the method see configs/mlmoe_dinov2.py. Accept the license of DINOv3 on the page of its weights first (see
configs/mlvpt_dinov3.py).
"""

from mlmoe_jax.config.recipes.feature_map import mlmoe_config


def get_config(arg=""):
    return mlmoe_config(arg, backbone="dinov3_vitb16")
