"""ML-GCN on ResNet-101 (Chen et al., CVPR 2019): classifiers computed from word vectors by a label graph.

    mlmoe train --config=mlgcn_resnet101:root=/data/coco,vectors=glove.txt --workdir=runs/mlgcn
    mlmoe train --config=mlgcn_resnet101:dataset=digits --workdir=runs/mlgcn_digits

vectors: a text file of word vectors, as the authors use; by default, vectors are computed from the training labels.
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER; or digits, which needs no download.
resolution: in pixels. backbone: any name in models.backbones.catalog; default resnet101, on digits vit_digits.
tune: train the backbone, yes | no | auto; auto trains a CNN, as published, but not a ViT.
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.

SGD with momentum 0.9 and weight decay 1e-4, learning rate 0.1 and a tenth of it for the backbone, gradients clipped at
10, batches of 16, multi-scale crops and flips. The authors' flags train 20 epochs at a constant rate. Their paper says
100 epochs at 0.01, divided by 10 after every 40 (schedule=paper). On VOC, labels marked difficult are positive in
training and left out of metrics. The authors' code, and metrics.preset=mlgcn, leave them out of the AP only and count
them as negative in precision, recall and F1.
"""

from mlmoe_jax.config import choice
from mlmoe_jax.config.recipes.feature_map import feature_map_config, set_gcn_training, shrink_for_digits


def get_config(arg=""):
    config, options = feature_map_config(arg, vectors="", schedule=choice(("code", "paper")))
    config.model.head.kind = "ml_gcn"
    config.model.head.graph.word_vectors = options.vectors
    if options.dataset == "digits":
        return shrink_for_digits(config, rate=1e-2)
    set_gcn_training(config, options.tune, rate=0.1, epochs=20)
    config.optim.schedule = "constant"
    if options.schedule == "paper":
        config.train.epochs, config.optim.schedule, config.optim.milestones = 100, "multi_step", (0.4, 0.8)
        config.optim.learning_rate = 0.01
    return config
