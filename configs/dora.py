"""DoRA: low-rank updates of directions and learned lengths in a frozen ViT (Liu et al., ICML 2024).

mlmoe train --config=dora:dataset=digits --workdir=runs/dora_digits
mlmoe train --config=dora:rank=8,targets=query+value,root=/data/coco --workdir=runs/dora
"""

from mlmoe_jax.config.recipes.prompt_tuning import adapter_config


def get_config(arg=""):
    return adapter_config(arg, "dora", digits_rate=3e-3)
