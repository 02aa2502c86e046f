"""SSF: learned scales and shifts of the outputs of all layers of a frozen ViT (Lian et al., NeurIPS 2022).

mlmoe train --config=ssf:dataset=digits --workdir=runs/ssf_digits
mlmoe train --config=ssf:root=/data/coco --workdir=runs/ssf
"""

from mlmoe_jax.config.recipes.prompt_tuning import adapter_config


def get_config(arg=""):
    return adapter_config(arg, "ssf", digits_rate=1e-2)
