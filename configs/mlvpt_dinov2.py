"""ML-VPT on a frozen DINOv2, with the published recipe.

    mlmoe train --config=mlvpt_dinov2
    mlmoe train --config=mlvpt_dinov2:dataset=voc2012,root=/data/VOCdevkit --workdir=runs/voc

AdamW, one-cycle, 40 epochs, batches of 64, weight decay 0.01 on all trainable parameters, EMA, evaluation of raw and
EMA weights after each epoch, selection on test. Images are resized to squares of 224 or 448 pixels, followed by cutout
and RandAugment, as published.
"""

from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config, use_ml_vpt


def get_config(arg=""):
    config, options = prompt_tuning_config(arg, digits_rate=1e-2)
    use_ml_vpt(config, preset=options.preset)
    return config
