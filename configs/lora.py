"""LoRA: low-rank updates in a frozen ViT, a linear classifier on the class token (Hu et al., ICLR 2022).

    python -m mlmoe_jax.main --config=configs/lora.py:dataset=digits --workdir=runs/lora_digits
    python -m mlmoe_jax.main --config=configs/lora.py:rank=8,targets=query,value,root=/data/coco --workdir=runs/lora

rank: rank of the updates. alpha: updates are multiplied by alpha / rank. targets: the updated layers of each block, any
of query, key, value, output, fc1 and fc2, separated by commas, or by + in a list of configs. dropout: dropout rate of
the inputs of the updates. prompts: number of deep prompts per block in addition to the updates, as in vpt.py; 0 = none.
pool: cls (the class token) | mean (of prompts and patches).
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER; or digits, which needs no download.
resolution: 224 | 448. backbone: a ViT in models.backbones.catalog; default dinov2_vitb14, on digits vit_digits.
preset: code (learning rate and EMA of ML-VPT's configs; the default) | paper (5e-4 and 0.9997 everywhere).
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.
precision: auto (the default: float32 on a CPU, else bfloat16) | float32 | authors (bfloat16, evaluation in float16).
"""

from mlmoe_jax.config import use_adapter
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning


def get_config(arg=""):
    own = {"rank": 8, "alpha": 8.0, "targets": ("query", "value"), "dropout": 0.0}
    config, options = prompt_tuning(arg, digits_rate=3e-3, prompts=0, pool="cls", **own)
    targets = tuple(target for part in options.targets for target in part.split("+"))
    use_adapter(config, "lora", rank=options.rank, alpha=options.alpha, targets=targets, dropout=options.dropout)
    if options.prompts:
        config.model.prompts.kind, config.model.prompts.count = "deep", options.prompts
    config.model.head.pool = options.pool
    return config
