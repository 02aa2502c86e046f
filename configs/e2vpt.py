"""E2VPT: deep prompts, further keys and values, and pruning of prompts (Han et al., ICCV 2023).

    python -m mlmoe_jax.main --config=configs/e2vpt.py:dataset=digits --workdir=runs/e2vpt_digits
    python -m mlmoe_jax.main --mode=prune --config=configs/e2vpt.py:dataset=digits --workdir=runs/e2vpt_pruned

The first trains without pruning, as the ML-VPT paper most likely compared it. The second is the whole procedure: a
training with learned masks, the importance of every prompt and segment, one training from scratch for every level of
pruning in `config.prune`, the choice among them on validation; a stopped one goes on with the same command.

prompts: how many a block (0 = 30; 18 on digits). key_values: further keys and values a block. shared: they are the same
tensor. dropout: of prompts.
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER, or digits, which needs no download.
resolution: 224 | 448. backbone: a ViT of models.backbones.catalog; by default dinov2_vitb14, for digits vit_digits.
preset: code (learning rate and EMA of the authors' configs; the default) | paper (5e-4 and 0.9997 everywhere).
"""

from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning


def get_config(arg=""):
    config, options = prompt_tuning(arg, digits_rate=1e-2, prompts=0, key_values=10, shared=True, dropout=0.0)
    prompts = config.model.prompts
    prompts.kind, prompts.count, prompts.dropout = "e2vpt", options.prompts or prompts.count, options.dropout
    prompts.key_values, prompts.share_key_values = options.key_values, options.shared
    return config
