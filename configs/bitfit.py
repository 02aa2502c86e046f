"""BitFit: tuned biases in a frozen ViT, a linear classifier (Ben Zaken et al., ACL 2022).

    mlmoe train --config=bitfit:dataset=digits --workdir=runs/bitfit_digits
    mlmoe train --config=bitfit:targets=query+fc2,root=/data/coco --workdir=runs/bitfit

targets: all, or the layers whose biases are tuned: any of patch_embed, norm1, query, key, value, output, norm2, fc1,
fc2 and norm, separated by commas, or by + in a list of configs. prompts: number of deep prompts per block in addition,
as in vpt.py; 0 = none. pool: cls (the class token) | mean (of prompts and patches).
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER; or digits, which needs no download.
resolution: 224 | 448. backbone: a ViT in models.backbones.catalog; default dinov2_vitb14, on digits vit_digits.
preset: code (learning rate and EMA of ML-VPT's configs; the default) | paper (5e-4 and 0.9997 everywhere).
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.
precision: auto (the default: float32 on a CPU, else bfloat16) | float32 | authors (bfloat16, evaluation in float16).
"""

from mlmoe_jax.config.recipes.prompt_tuning import adapter_config


def get_config(arg=""):
    return adapter_config(arg, "bitfit", digits_rate=1e-2)
