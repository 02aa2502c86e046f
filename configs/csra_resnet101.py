"""Class-specific residual attention (CSRA, Zhu and Wu, ICCV 2021) on ResNet-101.

    mlmoe train --config=csra_resnet101:root=/data/coco --workdir=runs/csra
    mlmoe train --config=csra_resnet101:dataset=digits --workdir=runs/csra_digits

SGD with momentum 0.9 and weight decay 1e-4, learning rate 0.1 and a tenth of it for the backbone, a rise over two
epochs (of COCO or VOC 2007), divided by 10 after every fifth (on VOC, fourth) of 30 epochs, batches of 16, crops of 70
to 100 % and flips, pixels in 0 … 1. λ is 0.1 for VOC, otherwise 0.5. The authors' table has 4 heads for COCO, their
command 6.
"""

from mlmoe_jax.config.recipes.benchmarks import OWN, evaluate_like
from mlmoe_jax.config.recipes.feature_map import feature_map_config, shrink_for_digits, train_batch_norm
from mlmoe_jax.runtime.keys import IntegerKey


def get_config(arg=""):
    config, options = feature_map_config(
        arg,
        heads=IntegerKey(
            0,
            "Classifiers with temperatures of their own: 1, 2, 4, 6 or 8; 0 is 1 for VOC, otherwise 4.",
            least=0,
            most=8,
        ),
    )
    is_voc = options.dataset.startswith("voc")
    config.model.head.kind = "csra"
    config.model.head.csra.heads = options.heads or (1 if is_voc else 4)
    config.model.head.csra.weight = 0.1 if is_voc else 0.5
    if options.dataset == "digits":
        return shrink_for_digits(config, rate=1e-1)
    evaluate_like(config, "mlgcn")
    config.data.difficult_eval = "ignore"
    optim, epochs = config.optim, 30
    optim.name, optim.b1, optim.weight_decay, optim.learning_rate = "sgd", 0.9, 1e-4, 0.1
    optim.rate_rules = ((r"^backbone/", 0.1),)
    optim.schedule, optim.warmup_steps = "multi_step", 626 if is_voc else 10_260
    if options.dataset == OWN:
        optim.warmup_steps = 2 / epochs
    optim.milestones = tuple(epoch / epochs for epoch in range(4 if is_voc else 5, epochs, 4 if is_voc else 5))
    config.train.epochs, config.train.batch_size = epochs, 16
    config.augment.geometry, config.augment.crop_scale, config.augment.flip = "random_resized_crop", (0.7, 1.0), True
    config.model.backbone.normalization = "unit"
    train_batch_norm(config, options.tune)
    return config
