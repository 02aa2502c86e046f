"""GVPT: ML-VPT's group prompts in a frozen ViT, without experts and gates; with one side only, VPT-CO or VPT-DC.

    mlmoe train --config=gvpt:dataset=digits --workdir=runs/gvpt_digits
    mlmoe train --config=gvpt:sides=co,root=/data/coco --workdir=runs/vpt_co

With one side, 2 prompts per group and 5 groups are the 10 prompts of the paper's ablation.
"""

from mlmoe_jax.config import option
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config, use_ml_vpt
from mlmoe_jax.models.adapters.group_prompts import SIDES
from mlmoe_jax.runtime.keys import IntegerKey


def get_config(arg=""):
    config, options = prompt_tuning_config(
        arg,
        digits_rate=1e-2,
        sides=option("model.prompts.sides"),
        per_group=IntegerKey(0, "Prompts per label group; 0 is 3, or 2 with one side.", least=0, most=1_000),
    )
    use_ml_vpt(config, preset=options.preset)
    config.model.prompts.sides = options.sides
    config.model.prompts.per_group = options.per_group or (3 if options.sides == "both" else 2)
    config.model.head.kind = "group_linear"
    config.loss.terms = {"logits": 0.0, **dict.fromkeys(SIDES[options.sides], 1.0)}
    config.optim.decay_rules = ()
    return config
