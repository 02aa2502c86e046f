"""ML-VPT on a frozen DINOv2, with the published recipe.

    mlmoe train --config=mlvpt_dinov2
    mlmoe train --config=mlvpt_dinov2:dataset=voc2012,root=/data/VOCdevkit --workdir=runs/voc

dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256 (docs/datasets.md); or digits, which needs no download.
root: the folder of the data set, by default $MLMOE_DATA/NAME or data/NAME.
resolution: 224 | 448. backbone: a DINOv2, default dinov2_vitb14; on digits vit_digits.
preset: code (the authors' code; the default) | paper (the text of the paper).
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.
precision: auto (the default: float32 on a CPU, else bfloat16) | float32 | authors (bfloat16, evaluation in float16).

AdamW, one-cycle, 40 epochs, batches of 64, weight decay 0.01 on all trainable parameters, EMA, evaluation of raw and
EMA weights after each epoch, selection on test. Images are resized to squares, followed by cutout and RandAugment, as
published.
"""

from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config, use_ml_vpt


def get_config(arg=""):
    config, options = prompt_tuning_config(arg, digits_rate=1e-2)
    use_ml_vpt(config, preset=options.preset)
    return config
