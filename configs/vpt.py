"""VPT: learned prompts in a frozen ViT, a linear classifier on the class token (Jia et al., ECCV 2022).

    mlmoe train --config=vpt:dataset=digits --workdir=runs/vpt_digits
    mlmoe train --config=vpt:variant=shallow,root=/data/coco --workdir=runs/vpt_shallow

The VPT authors' runs have a dropout of 0.1. Their code classifies the mean of prompts and patches on MAE (pool=mean).
"""

from mlmoe_jax.config import option
from mlmoe_jax.config.recipes.prompt_tuning import PROMPTS, prompt_tuning_config
from mlmoe_jax.runtime.keys import ChoiceKey


def get_config(arg=""):
    config, options = prompt_tuning_config(
        arg,
        digits_rate=1e-2,
        variant=ChoiceKey(
            "deep",
            "VPT-deep or VPT-shallow.",
            choices={"deep": "one set of prompts per block", "shallow": "one set, passed through all blocks"},
        ),
        prompts=PROMPTS,
        dropout=option("model.prompts.dropout"),
        pool=option("model.head.pool"),
        project=option("model.prompts.project"),
    )
    prompts = config.model.prompts
    prompts.kind, prompts.count = options.variant, options.prompts or prompts.count
    prompts.dropout, prompts.project = options.dropout, options.project
    config.model.head.pool = options.pool
    return config
