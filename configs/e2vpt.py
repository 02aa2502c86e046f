"""E2VPT: deep prompts, additional keys and values, and pruning of prompts (Han et al., ICCV 2023).

    mlmoe train --config=e2vpt:dataset=digits --workdir=runs/e2vpt_digits
    mlmoe prune --config=e2vpt:dataset=digits --workdir=runs/e2vpt_pruned

The first command trains without pruning, most likely as in the comparison of the ML-VPT paper. The second runs the
whole procedure: train with learned masks, measure the importance of every prompt and segment, train from scratch for
every pruning level in `config.prune`, and choose a level on validation. Rerun the same command to resume.

prompts: number per block (0 = 30; 18 on digits). key_values: additional keys and values per block. shared: use one
tensor for keys and values. dropout: dropout rate of prompts.
pool: cls (the class token, as in the ML-VPT paper's comparison) | mean (of prompts and patches, as the authors' code on
MAE).
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER; or digits, which needs no download.
resolution: 224 | 448. backbone: a ViT in models.backbones.catalog; default dinov2_vitb14, on digits vit_digits.
preset: code (learning rate and EMA of the authors' configs; the default) | paper (5e-4 and 0.9997 everywhere).
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.
precision: auto (the default: float32 on a CPU, else bfloat16) | float32 | authors (bfloat16, evaluation in float16).
"""

from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config


def get_config(arg=""):
    config, options = prompt_tuning_config(
        arg, digits_rate=1e-2, prompts=0, key_values=10, shared=True, dropout=0.0, pool="cls"
    )
    prompts = config.model.prompts
    prompts.kind, prompts.count, prompts.dropout = "e2vpt", options.prompts or prompts.count, options.dropout
    prompts.key_values, prompts.share_key_values = options.key_values, options.shared
    config.model.head.pool = options.pool
    return config
