"""VPT: learned prompts in a frozen ViT, a linear classifier on the class token (Jia et al., ECCV 2022).

    mlmoe train --config=vpt:dataset=digits --workdir=runs/vpt_digits
    mlmoe train --config=vpt:variant=shallow,root=/data/coco --workdir=runs/vpt_shallow

variant: deep (one set of prompts per block) | shallow (one set, passed through all blocks). prompts: number of prompts
(0 = as in the ML-VPT paper: 30; 18 on digits). dropout: dropout rate of prompts, 0.1 in the VPT authors' runs. project:
width in which prompts are learned before a linear layer; 0 = the backbone's width, without this layer.
pool: cls (the class token, as in the ML-VPT paper's comparison) | mean (of prompts and patches, as the authors' code on
MAE).
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER; or digits, which needs no download.
resolution: 224 | 448. backbone: a ViT in models.backbones.catalog; default dinov2_vitb14, on digits vit_digits.
preset: code (learning rate and EMA of the authors' configs; the default) | paper (5e-4 and 0.9997 everywhere).
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.
precision: auto (the default: float32 on a CPU, else bfloat16) | float32 | authors (bfloat16, evaluation in float16).
"""

from mlmoe_jax.config import choice
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config


def get_config(arg=""):
    config, options = prompt_tuning_config(
        arg, digits_rate=1e-2, variant=choice(("deep", "shallow")), prompts=0, dropout=0.0, pool="cls", project=0
    )
    prompts = config.model.prompts
    prompts.kind, prompts.count = options.variant, options.prompts or prompts.count
    prompts.dropout, prompts.project = options.dropout, options.project
    config.model.head.pool = options.pool
    return config
