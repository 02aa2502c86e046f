"""Pretrain the small ViT that ships: 10-way on pictures of one digit, from scratch, on the train scans only.

    python -m mlmoe_jax.main --config=configs/pretrain_digits.py --workdir=runs/pretrain

writes `backbone.safetensors` into the run folder; copied to mlmoe_jax/pretrained/files/vit_digits.safetensors it is
what `model.backbone.name=vit_digits` loads. `precision@1` is its accuracy.
"""

from mlmoe_jax.config import default_config, parse_arg


def get_config(arg=""):
    options = parse_arg(arg, epochs=2)
    config = default_config()
    config.data.name = "digits_single"
    config.model.backbone.weights = "none"
    config.trainable = ((r"", True),)

    # Prompts read the patch tokens and probes the class token: both are to know the digit.
    config.model.head.pool = "both"
    config.loss.terms.update({"logits": 0.0, "cls": 1.0, "patches": 1.0})
    config.loss.kind = "softmax"
    config.loss.scale = 10.0  # the mean over 10 labels becomes the cross-entropy of an image
    config.optim.name = "muon"
    config.optim.learning_rate = 2e-3
    config.optim.schedule, config.optim.warmup_steps = "cosine", 200
    config.optim.weight_decay = 0.05
    config.optim.clip_norm = 1.0
    config.optim.decay_rules = ((r"(bias|scale|cls_token|pos_embed)$", 0.0), (r"^head/", 0.0))
    config.ema.decay = 0.999

    config.train.epochs = options.epochs
    config.train.batch_size = 32
    config.train.log_every = 100
    config.train.save_backbone = True
    config.checkpoint.every_epochs = 0.05
    return config
