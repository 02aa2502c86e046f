"""BitFit: tuned biases in a frozen ViT, a linear classifier (Ben Zaken et al., ACL 2022).

mlmoe train --config=bitfit:dataset=digits --workdir=runs/bitfit_digits
mlmoe train --config=bitfit:targets=query+fc2,root=/data/coco --workdir=runs/bitfit
"""

from mlmoe_jax.config.recipes.prompt_tuning import adapter_config


def get_config(arg=""):
    return adapter_config(arg, "bitfit", digits_rate=1e-2)
