"""ADD-GCN on ResNet-101 (Ye et al., ECCV 2020): label features by attention, related by a graph of each image's own.

    python -m mlmoe_jax.main --config=configs/addgcn_resnet101.py:root=/data/coco --workdir=runs/addgcn
    python -m mlmoe_jax.main --config=configs/addgcn_resnet101.py:dataset=digits --workdir=runs/addgcn_digits

dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER, or digits, which needs no download.
resolution: pixels. backbone: any of models.backbones.catalog; by default resnet101, for digits vit_digits. tune:
yes | no | auto, whether the backbone learns; auto = a CNN does, as published, a ViT does not.

SGD with momentum 0.9 and decay 1e-4, 0.05 and a tenth of it for the backbone, gradients clipped at 10, batches of 16,
50 epochs, crops at several scales and flips. The rate falls to a tenth after 31 and 41 epochs: the authors write 30 and
40, their loop is one behind.
"""

from mlmoe_jax.config.recipes.feature_map import feature_map, gcn_recipe, small


def get_config(arg=""):
    config, options = feature_map(arg)
    config.model.head.kind = "add_gcn"
    if options.dataset == "digits":
        return small(config, rate=1e-2)
    gcn_recipe(config, rate=0.05, epochs=50)
    config.optim.milestones = (0.62, 0.82)
    config.augment.margin = 64
    return config
