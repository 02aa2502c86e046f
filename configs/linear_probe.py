"""Linear probing: a frozen backbone and one linear classifier on its class token.

python -m mlmoe_jax.main --config=configs/linear_probe.py:dataset=digits --workdir=runs/linear_digits
"""

from mlmoe_jax.config import default_config, parse_arg


def get_config(arg=""):
    parse_arg(arg, dataset="digits")
    config = default_config()
    config.optim.learning_rate = 1e-2
    config.train.epochs = 6
    config.ema.decay = 0.99
    return config
