"""E2VPT: deep prompts, additional keys and values in a frozen ViT, and pruning of prompts (Han et al., ICCV 2023).

    mlmoe train --config=e2vpt:dataset=digits --workdir=runs/e2vpt_digits
    mlmoe prune --config=e2vpt:dataset=digits --workdir=runs/e2vpt_pruned

The first command trains without pruning, most likely as in the comparison of the ML-VPT paper. The second runs the
whole procedure: train with learned masks, measure the importance of every prompt and segment, train from scratch for
every pruning level in `config.prune`, and choose a level on validation. Rerun the same command to resume.
"""

from mlmoe_jax.config import option
from mlmoe_jax.config.recipes.prompt_tuning import prompts_config


def get_config(arg=""):
    config, options = prompts_config(
        arg,
        key_values=option("model.prompts.key_values"),
        shared=option("model.prompts.share_key_values"),
    )
    prompts = config.model.prompts
    prompts.kind = "e2vpt"
    prompts.key_values, prompts.share_key_values = options.key_values, options.shared
    return config
