"""Linear probing: a frozen backbone and one linear classifier on its class token.

    python -m mlmoe_jax.main --config=configs/linear_probe.py:dataset=digits --workdir=runs/linear_digits

dataset: digits | coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER for all but digits. backbone: a name
of mlmoe_jax.pretrained.catalog; by default vit_digits for digits, dinov2_vitb14 for the rest.
"""

from mlmoe_jax.config import default_config, parse_arg
from mlmoe_jax.presets import use_dataset


def get_config(arg=""):
    options = parse_arg(arg, dataset="digits", root="", resolution=0, backbone="")
    digits = options.dataset == "digits"
    config = default_config()
    use_dataset(config, options.dataset, options.root, options.resolution or (64 if digits else 224))
    config.model.backbone.name = options.backbone or ("vit_digits" if digits else "dinov2_vitb14")
    config.optim.learning_rate = 1e-1 if digits else 1e-3
    config.train.epochs = 8 if digits else 40
    if digits:
        config.ema.decay = 0.99
        config.eval.every_epochs = 2
    return config
