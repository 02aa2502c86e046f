"""ML-Decoder (Ridnik et al., WACV 2023) on ResNet-101: one decoder layer and fixed queries, one per group of labels.

    mlmoe train --config=ml_decoder_resnet101:root=/data/coco --workdir=runs/ml_decoder
    mlmoe train --config=ml_decoder_resnet101:dataset=digits,groups=5 --workdir=runs/mld_digits

Adam with weight decay 1e-4 on matrices, added to the gradient, one-cycle with peak 1e-4, 40 epochs, batches of 56, EMA,
the asymmetric loss with 4, 0 and 0.05 summed over images and labels, cutout, and the RandAugment of UDA that the
authors' code imports. A trained backbone gets pixels in 0 … 1 without normalization, as the authors' TResNet.
"""

from mlmoe_jax.config.recipes.benchmarks import evaluate_like, follow
from mlmoe_jax.config.recipes.feature_map import feature_map_config, is_tuned, shrink_for_digits, train_batch_norm
from mlmoe_jax.models.heads.query import ML_DECODER_SETTINGS
from mlmoe_jax.runtime.keys import IntegerKey


def get_config(arg=""):
    groups = IntegerKey(100, "Most queries; with as many labels or fewer, each has its own (full decoding).", least=0)
    config, options = feature_map_config(arg, groups=groups)
    config.model.head.kind = "query"
    config.model.head.decoder.update({"queries": options.groups, **ML_DECODER_SETTINGS})
    config.loss.kind, config.loss.reduce, config.loss.scale = "asymmetric", "sum", 1.0
    config.loss.gamma_neg, config.loss.clip, config.loss.eps = 4.0, 0.05, 1e-8
    if options.dataset == "digits":
        return shrink_for_digits(config, rate=1e-3)

    def normalization(backbone):
        return "unit" if is_tuned(options.tune, backbone) else "auto"

    evaluate_like(config, "asl")
    config.augment.cutout, config.augment.randaugment = 0.5, "uda"
    follow(config, "model.backbone.normalization", normalization, "model.backbone.name")
    config.optim.name, config.optim.learning_rate, config.optim.weight_decay = "adam", 1e-4, 1e-4
    config.optim.decay_rules = ((r"(bias|scale|gamma)$", 0.0),)
    config.train.epochs, config.train.batch_size = 40, 56
    train_batch_norm(config, options.tune)
    config.ema.decay = 0.9997
    return config
