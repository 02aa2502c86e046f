"""ML-Decoder (Ridnik et al., WACV 2023) on ResNet-101: one decoder layer and fixed queries, one per group of labels.

    mlmoe train --config=ml_decoder_resnet101:root=/data/coco --workdir=runs/ml_decoder
    mlmoe train --config=ml_decoder_resnet101:dataset=digits,groups=5 --workdir=runs/mld_digits

groups: maximum number of queries; if it reaches the number of labels, each label has its own query (full decoding).
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER; or digits, which needs no download.
resolution: in pixels. backbone: any name in models.backbones.catalog; default resnet101, on digits vit_digits.
tune: train the backbone, yes | no | auto; auto trains a CNN, as published, but not a ViT.
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.

Adam with weight decay 1e-4 on matrices, added to the gradient, one-cycle with peak 1e-4, 40 epochs, batches of 56, EMA,
the asymmetric loss with 4, 0 and 0.05 summed over images and labels, cutout, and the RandAugment of UDA that the
authors' code imports. A trained backbone gets pixels in 0 … 1 without normalization, as the authors' TResNet.
"""

from mlmoe_jax.config.recipes.benchmarks import evaluate_like, follow
from mlmoe_jax.config.recipes.feature_map import feature_map_config, is_tuned, shrink_for_digits, train_batch_norm
from mlmoe_jax.models.heads.query import ML_DECODER_SETTINGS


def get_config(arg=""):
    config, options = feature_map_config(arg, groups=100)
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
    config.data.exif = "ignore"
    config.optim.name, config.optim.learning_rate, config.optim.weight_decay = "adam", 1e-4, 1e-4
    config.optim.decay_rules = ((r"(bias|scale|gamma)$", 0.0),)
    config.train.epochs, config.train.batch_size = 40, 56
    train_batch_norm(config, options.tune)
    config.ema.decay = 0.9997
    return config
