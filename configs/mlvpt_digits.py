"""ML-VPT on the embedded data set; takes a few minutes on a laptop's CPU.

mlmoe train --config=mlvpt_digits --workdir=runs/digits
"""

from mlmoe_jax.config import parse_arg
from mlmoe_jax.config.recipes.benchmarks import selection_options
from mlmoe_jax.config.recipes.prompt_tuning import ML_VPT_PRESETS, prompt_tuning_config, use_ml_vpt


def get_config(arg=""):
    parse_arg(arg, **selection_options(ML_VPT_PRESETS))  # which refuses other options
    config, options = prompt_tuning_config(f"dataset=digits,{arg}", digits_rate=1e-2)
    use_ml_vpt(config, preset=options.preset)
    return config
