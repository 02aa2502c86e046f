"""Pretrain the small ViT that ships with the package: 10-way classification of single digits, on the train scans only.

    mlmoe train --config=pretrain_digits --workdir=runs/pretrain

writes `backbone.safetensors` into the run folder. `model.backbone.name=vit_digits` loads a copy of it,
mlmoe_jax/pretrained/files/vit_digits.safetensors. `precision@1` is the accuracy.
"""

from mlmoe_jax.config import default_config, option, parse_arg


def get_config(arg=""):
    options = parse_arg(arg, epochs=option("train.epochs", default=2))
    config = default_config()
    config.data.name = "digits_single"
    config.model.backbone.weights = "none"
    config.trainable = ((r"", True),)

    # Prompts use the patch tokens, linear probes the class token: train both to predict the digit.
    config.model.head.pool = "both"
    config.loss.terms.update({"logits": 0.0, "cls": 1.0, "patches": 1.0})
    config.loss.kind = "softmax"
    config.loss.scale = 10.0  # turns the mean over 10 labels into the cross-entropy per image
    config.optim.name = "muon"
    config.optim.learning_rate = 2e-3
    config.optim.schedule, config.optim.warmup_steps = "cosine", 200
    config.optim.weight_decay = 0.05
    config.optim.clip_norm = 1.0
    config.optim.decay_rules = ((r"(bias|scale|cls_token|pos_embed)$", 0.0), (r"^head/", 0.0))
    config.ema.decay, config.ema.warmup = 0.999, False

    config.train.epochs = options.epochs
    config.train.batch_size = 32
    config.train.log_every = 100
    config.train.save_backbone = True
    config.checkpoint.every_epochs = 0.05
    return config
