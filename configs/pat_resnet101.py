"""PAT (Xie et al., ICML 2024) on ResNet-101: an image and its four quarters, against overfitting to co-occurrences.

    mlmoe train --config=pat_resnet101:root=/data/coco --workdir=runs/pat
    mlmoe train --config=pat_resnet101:dataset=digits --workdir=runs/pat_digits

The asymmetric loss with 4, 0 and 0.05, summed, of the image and of its quarters. AdamW with weight decay 1e-4,
one-cycle with peak 1e-4, 80 epochs, stopped early, batches of 128, EMA, cutout, RandAugment, pixels in 0 … 1.
"""

from mlmoe_jax.config.recipes.benchmarks import evaluate_like
from mlmoe_jax.config.recipes.feature_map import feature_map_config, shrink_for_digits, train_batch_norm


def get_config(arg=""):
    config, options = feature_map_config(arg)
    config.model.head.kind = "pat"
    loss = config.loss
    loss.kind, loss.reduce, loss.gamma_neg, loss.clip, loss.eps = "asymmetric", "sum", 4.0, 0.05, 1e-8
    loss.terms.logits, loss.terms.cls, loss.terms.quarters = 0.0, 1.0, 1.0
    if options.dataset == "digits":
        return shrink_for_digits(config, rate=1e-2)
    evaluate_like(config, "mlvpt", metric="mAP_envelope")
    config.data.truncated = "read"  # as the authors' code opens images
    config.augment.cutout, config.augment.randaugment = 0.5, "uda"
    config.model.backbone.normalization = "unit"
    config.optim.learning_rate, config.optim.weight_decay = 1e-4, 1e-4
    config.train.epochs, config.train.batch_size, config.train.patience = 80, 128, 1
    train_batch_norm(config, options.tune)
    config.ema.decay = 0.9997
    return config
