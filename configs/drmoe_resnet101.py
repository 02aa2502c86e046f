"""DR-MoE on ResNet-101: label queries, shared and task experts, one image-dependent gate per label.

    mlmoe train --config=drmoe_resnet101:root=/data/coco --workdir=runs/drmoe
    mlmoe train --config=drmoe_resnet101:dataset=digits --workdir=runs/drmoe_digits

Adam with weight decay 1e-5 added to the gradient, learning rate 1e-4, divided by 10 after 30 and after 40 of 50 epochs,
batches of 32 (16 on VOC), random resized crops, flips and color jitter. The paper does not state the strength of the
jitter: 0.4, and 0.1 for the hue, in random order, are our choice. Contrast is scaled about the mean of all values; in
torchvision, about the mean gray.
"""

from mlmoe_jax.config.recipes.benchmarks import evaluate_like
from mlmoe_jax.config.recipes.feature_map import (
    feature_map_config,
    shrink_for_digits,
    train_batch_norm,
    use_routed_experts,
)

PRESETS = {
    "recommended": "one classifier per label, and an entropy term against the collapse of gates, as the text intends",
    "literal": "as printed, with a warning",
    "static": "recommended, with gates that do not depend on the image",
    "hsq": "the experts and gates of hsq_resnet101",
}


def get_config(arg=""):
    config, options = feature_map_config(arg, presets=PRESETS)
    use_routed_experts(config, options.preset)
    if options.dataset == "digits":
        return shrink_for_digits(config, rate=1e-3)
    evaluate_like(config, "drmoe")
    config.augment.geometry, config.augment.flip = "random_resized_crop", True
    config.augment.brightness = config.augment.contrast = config.augment.saturation = 0.4
    config.augment.hue, config.augment.jitter_order = 0.1, "random"
    config.optim.name, config.optim.learning_rate, config.optim.weight_decay = "adam", 1e-4, 1e-5
    config.optim.schedule, config.optim.milestones = "multi_step", (0.6, 0.8)
    train_batch_norm(config, options.tune)
    config.train.epochs = 50
    config.train.batch_size = 16 if options.dataset.startswith("voc") else 32
    config.eval.batch_size = 32
    return config
