"""VPT: learned prompts in a frozen ViT, a linear classifier on the class token (Jia et al., ECCV 2022).

    mlmoe train --config=vpt:dataset=digits --workdir=runs/vpt_digits
    mlmoe train --config=vpt:variant=shallow,root=/data/coco --workdir=runs/vpt_shallow

The VPT authors' runs have a dropout of 0.1. Their code classifies the mean of prompts and patches on MAE (pool=mean).
"""

from mlmoe_jax.config import option
from mlmoe_jax.config.recipes.prompt_tuning import prompts_config
from mlmoe_jax.runtime.keys import ChoiceKey


def get_config(arg=""):
    config, options = prompts_config(
        arg,
        variant=ChoiceKey(
            "deep",
            "VPT-deep or VPT-shallow.",
            choices={"deep": "one set of prompts per block", "shallow": "one set, passed through all blocks"},
        ),
        project=option("model.prompts.project"),
    )
    prompts = config.model.prompts
    prompts.kind, prompts.project = options.variant, options.project
    return config
