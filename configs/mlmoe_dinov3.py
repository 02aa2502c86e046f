"""MLMoE on a frozen DINOv3: group prompts, label queries over patches and prompts, experts.

    mlmoe train --config=mlmoe_dinov3:root=/data/coco --workdir=runs/mlmoe_dinov3

For the method and the options see configs/mlmoe_dinov2.py. The default backbone is dinov3_vitb16. Accept the license of
DINOv3 on the page of its weights first (see configs/mlvpt_dinov3.py).
"""

from mlmoe_jax.config.recipes.feature_map import shrink_for_digits, use_mlmoe
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config


def get_config(arg=""):
    config, options = prompt_tuning_config(arg, digits_rate=1e-3, backbone="dinov3_vitb16", prompts=True, gates="mlp")
    use_mlmoe(config, gates=options.gates, prompts=options.prompts)
    if options.dataset == "digits":
        shrink_for_digits(config, rate=1e-3)
    return config
