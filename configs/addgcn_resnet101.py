"""ADD-GCN on ResNet-101 (Ye et al., ECCV 2020): label features by attention, and one label graph per image.

    mlmoe train --config=addgcn_resnet101:root=/data/coco --workdir=runs/addgcn
    mlmoe train --config=addgcn_resnet101:dataset=digits --workdir=runs/addgcn_digits

SGD with momentum 0.9 and weight decay 1e-4, learning rate 0.05 and a tenth of it for the backbone, gradients clipped at
10, batches of 16, 50 epochs, multi-scale crops and flips. The rate is divided by 10 after 31 and 41 epochs: the authors
write 30 and 40, but their loop is off by one. Labels marked difficult count as in configs/mlgcn_resnet101.py.
"""

from mlmoe_jax.config.recipes.feature_map import feature_map_config, set_gcn_training, shrink_for_digits


def get_config(arg=""):
    config, options = feature_map_config(arg)
    config.model.head.kind = "add_gcn"
    if options.dataset == "digits":
        return shrink_for_digits(config, rate=1e-2)
    set_gcn_training(config, options.tune, rate=0.05, epochs=50)
    config.optim.milestones = (0.62, 0.82)
    config.augment.margin = 64
    return config
