"""Full fine-tuning: train all parameters of the backbone and a linear classifier on the class token.

mlmoe train --config=finetune:dataset=digits --workdir=runs/finetune_digits
"""

from mlmoe_jax.config.recipes.feature_map import train_batch_norm
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config


def get_config(arg=""):
    config, _ = prompt_tuning_config(arg, digits_rate=1e-3)
    config.trainable = ((r"", True),)
    train_batch_norm(config, "yes")
    return config
