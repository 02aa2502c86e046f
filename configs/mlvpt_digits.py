"""ML-VPT on the embedded data set: the main job, a few minutes on a laptop's CPU.

python -m mlmoe_jax.main --config=configs/mlvpt_digits.py --workdir=runs/digits
"""

from mlmoe_jax.config import default_config


def get_config(arg=""):
    config = default_config()
    config.model.prompts.kind = "group"
    config.model.prompts.num_groups = 3
    config.model.head.kind = "group_experts"
    config.loss.terms = {"logits": 0.0, "co": 1.0, "dc": 1.0, "co_gate": 1.0, "dc_gate": 1.0}
    config.optim.decay_rules = ((r"gate/bias$", 0.0),)
    config.optim.learning_rate = 5e-3
    config.train.epochs = 6
    config.ema.decay = 0.99
    return config
