"""MLMoE on a frozen DINOv3: group prompts, label queries over patches and prompts, experts.

    python -m mlmoe_jax.main --config=configs/mlmoe_dinov3.py:root=/data/coco --workdir=runs/mlmoe_dinov3

The method and all options are those of configs/mlmoe_dinov2.py, with the default backbone dinov3_vitb16. The licence of
DINOv3 has to be accepted on the page of its weights (see configs/mlvpt_dinov3.py).
"""

from mlmoe_jax.config.recipes.feature_map import small, use_mlmoe
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning


def get_config(arg=""):
    config, options = prompt_tuning(arg, digits_rate=1e-3, backbone="dinov3_vitb16", prompts=True, gates="mlp")
    use_mlmoe(config, gates=options.gates, prompts=options.prompts)
    if options.dataset == "digits":
        small(config, rate=1e-3)
    return config
