"""GateVPT: prompts passed through a frozen ViT, with one learned gate per block (Yoo et al., ICML 2023).

    mlmoe train --config=gatevpt:dataset=digits --workdir=runs/gatevpt_digits
    mlmoe train --config=gatevpt:root=/data/coco,temperature=true --workdir=runs/gatevpt

Gates start nearly closed, at sigmoid(-10) as in the authors' code; their example has 5. Their runs learn temperatures
and have a dropout of 0.1.
"""

from mlmoe_jax.config import option
from mlmoe_jax.config.recipes.prompt_tuning import prompts_config


def get_config(arg=""):
    config, options = prompts_config(
        arg,
        gates=option("model.prompts.gated", default=True, doc="Gates; without them it is VPT-shallow."),
        gate_init=option("model.prompts.gate_init"),
        temperature=option(
            "model.prompts.learn_temperature", doc="Learn an attention temperature per block, within 0.01 … 10."
        ),
    )
    prompts = config.model.prompts
    prompts.kind = "shallow"
    prompts.gated, prompts.gate_init, prompts.learn_temperature = options.gates, options.gate_init, options.temperature
    return config
