"""Full fine-tuning: train all parameters of the backbone and a linear classifier on the class token.

    mlmoe train --config=finetune:dataset=digits --workdir=runs/finetune_digits

dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER; or digits, which needs no download.
resolution: 224 | 448. backbone: any name in models.backbones.catalog; default dinov2_vitb14, on digits vit_digits.
preset: code (learning rate and EMA of the authors' configs; the default) | paper (5e-4 and 0.9997 everywhere).
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.
precision: auto (the default: float32 on a CPU, else bfloat16) | float32 | authors (bfloat16, evaluation in float16).
"""

from mlmoe_jax.config.recipes.feature_map import train_batch_norm
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config


def get_config(arg=""):
    config, _ = prompt_tuning_config(arg, digits_rate=1e-3)
    config.trainable = ((r"", True),)
    train_batch_norm(config, "yes")
    return config
