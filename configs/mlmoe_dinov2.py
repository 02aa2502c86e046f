"""MLMoE combines ML-VPT and DR-MoE: group prompts in a frozen DINOv2, label queries over patches and prompts, experts.

    mlmoe train --config=mlmoe_dinov2:root=/data/coco --workdir=runs/mlmoe
    mlmoe train --config=mlmoe_dinov2:dataset=digits --workdir=runs/mlmoe_digits

The query of each label attends to all patches and to the prompts of its own co-occurrence and discriminative groups.
Shared and task experts process the result, weighted by one gate per label and image. Prompts, decoder, experts and
gates are trained together.

prompts: false omits the group prompts: label queries and experts on a frozen ViT. gates: mlp | linear | static.
preset, precision: see configs/linear_probe.py.
dataset, root, resolution, backbone and recipe: as in configs/mlvpt_dinov2.py.
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.
"""

from mlmoe_jax.config.recipes.feature_map import shrink_for_digits, use_mlmoe
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config


def get_config(arg=""):
    config, options = prompt_tuning_config(arg, digits_rate=1e-3, prompts=True, gates="mlp")
    use_mlmoe(config, gates=options.gates, prompts=options.prompts)
    if options.dataset == "digits":
        shrink_for_digits(config, rate=1e-3)
    return config
