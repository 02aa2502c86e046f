"""ML-VPT on the embedded data set: the main job, a few minutes on a laptop's CPU.

python -m mlmoe_jax.main --config=configs/mlvpt_digits.py --workdir=runs/digits
"""

from mlmoe_jax.config import default_config, parse_arg
from mlmoe_jax.presets import use_dataset, use_ml_vpt


def get_config(arg=""):
    options = parse_arg(arg, preset="code")
    config = default_config()
    use_dataset(config, "digits", "", 64)
    use_ml_vpt(config, preset=options.preset)
    config.model.prompts.num_groups = 3
    config.optim.learning_rate = 1e-2
    config.train.epochs = 8
    config.ema.decay = 0.99
    config.eval.every_epochs = 2
    return config
