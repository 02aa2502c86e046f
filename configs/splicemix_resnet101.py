"""SpliceMix-CL on ResNet-101: mosaics of two by two images, and the consistency of their cells with the images.

    mlmoe train --config=splicemix_resnet101:root=/data/coco --workdir=runs/splicemix
    mlmoe train --config=splicemix_resnet101:dataset=digits --workdir=runs/splicemix_digits

A linear classifier of the largest value of each channel. SGD as in configs/addgcn_resnet101.py, for 80 epochs, divided
by 10 after 39 and 59: the authors write 40 and 60, and subtract 1. On COCO, batches of 32, the rate 0.05 and a rise
over three epochs; on VOC 16, 0.01 and none, and difficult labels are absent in training. The authors clip gradients on
VOC only. `models.mosaics` has what differs in the mosaics.
"""

from mlmoe_jax.config import option
from mlmoe_jax.config.recipes.benchmarks import OWN
from mlmoe_jax.config.recipes.feature_map import feature_map_config, set_gcn_training, shrink_for_digits


def get_config(arg=""):
    config, options = feature_map_config(
        arg,
        consistency=option(
            "augment.splice_consistency", default=True, doc="The consistency loss; without it, it is SpliceMix."
        ),
    )
    is_voc = options.dataset.startswith("voc")
    config.model.head.kind, config.model.head.pool = "linear", "max"
    config.augment.mix, config.augment.splice_consistency = "splicemix", options.consistency
    if options.dataset == "digits":
        return shrink_for_digits(config, rate=1e-2)
    set_gcn_training(config, options.tune, rate=0.01 if is_voc else 0.05, epochs=80)
    config.data.difficult_train = "negative"
    config.optim.milestones = (39 / 80, 59 / 80)
    config.augment.margin = 64
    if not is_voc:
        config.train.batch_size, config.optim.clip_norm = 32, 0.0
        config.optim.warmup_steps = 3 / 80 if options.dataset == OWN else 3 * 2_565
    return config
