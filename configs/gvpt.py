"""GVPT: ML-VPT's group prompts without experts and gates; with one side only, VPT-CO or VPT-DC.

    mlmoe train --config=gvpt:dataset=digits --workdir=runs/gvpt_digits
    mlmoe train --config=gvpt:sides=co,root=/data/coco --workdir=runs/vpt_co

sides: both | co (labels grouped by co-occurrence) | dc (by exclusion). per_group: prompts per group; 0 = 3, or 2 with
one side, which with 5 groups gives the 10 prompts of the paper's ablation.
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER; or digits, which needs no download.
resolution: 224 | 448. backbone: a ViT in models.backbones.catalog; default dinov2_vitb14, on digits vit_digits.
preset: code (learning rate and EMA of the authors' configs; the default) | paper (5e-4 and 0.9997 everywhere).
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.
precision: auto (the default: float32 on a CPU, else bfloat16) | float32 | authors (bfloat16, evaluation in float16).
"""

from mlmoe_jax.config import choice
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config, use_ml_vpt
from mlmoe_jax.models.adapters.group_prompts import SIDES


def get_config(arg=""):
    config, options = prompt_tuning_config(arg, digits_rate=1e-2, sides=choice(SIDES), per_group=0)
    use_ml_vpt(config, preset=options.preset)
    config.model.prompts.sides = options.sides
    config.model.prompts.per_group = options.per_group or (3 if options.sides == "both" else 2)
    config.model.head.kind = "group_linear"
    config.loss.terms = {"logits": 0.0, **dict.fromkeys(SIDES[options.sides], 1.0)}
    config.optim.decay_rules = ()
    return config
