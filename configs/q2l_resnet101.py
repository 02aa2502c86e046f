"""Query2Label on ResNet-101 (Liu et al., 2021): one query per label reads the feature map through a decoder.

    mlmoe train --config=q2l_resnet101:root=/data/coco --workdir=runs/q2l
    mlmoe train --config=q2l_resnet101:dataset=digits --workdir=runs/q2l_digits

AdamW with weight decay 0.01 on all parameters, one-cycle with peak 1e-4, 80 epochs, batches of 64, EMA; batch
normalization, stem and first stage frozen; images without labels are kept. The authors' loader does not apply cutout
although their paper says so. Here it is applied.
"""

from mlmoe_jax.config.recipes.benchmarks import evaluate_like
from mlmoe_jax.config.recipes.feature_map import feature_map_config, set_q2l_training, shrink_for_digits, use_q2l


def get_config(arg=""):
    config, options = feature_map_config(arg)
    use_q2l(config)
    if options.dataset == "digits":
        return shrink_for_digits(config, rate=1e-3)
    evaluate_like(config, "q2l", metric="mAP_envelope")
    set_q2l_training(config, options.tune)
    return config
