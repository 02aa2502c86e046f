"""AdaptFormer: a bottleneck beside the MLP of each block of a frozen ViT (Chen et al., NeurIPS 2022).

    mlmoe train --config=adaptformer:dataset=digits --workdir=runs/adaptformer_digits
    mlmoe train --config=adaptformer:bottleneck=64,root=/data/coco --workdir=runs/adaptformer

The dropout follows the authors' code, and the input the paper.
"""

from mlmoe_jax.config.recipes.prompt_tuning import adapter_config


def get_config(arg=""):
    return adapter_config(arg, "adaptformer", digits_rate=3e-3)
