"""Linear probing: a frozen backbone and one linear classifier on its class token.

mlmoe train --config=linear_probe:dataset=digits --workdir=runs/linear_digits
mlmoe train --config=linear_probe:dataset=coco2014,root=/data/coco --workdir=runs/linear
"""

from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config


def get_config(arg=""):
    config, _ = prompt_tuning_config(arg, digits_rate=1e-1)
    return config
