"""ML-GCN on ResNet-101 (Chen et al., CVPR 2019): classifiers computed from word vectors by a label graph.

    mlmoe train --config=mlgcn_resnet101:root=/data/coco,vectors=glove.txt --workdir=runs/mlgcn
    mlmoe train --config=mlgcn_resnet101:dataset=digits --workdir=runs/mlgcn_digits

SGD with momentum 0.9 and weight decay 1e-4, a tenth of the learning rate for the backbone, gradients clipped at 10,
batches of 16, multi-scale crops and flips. The authors use word vectors of a file. On VOC, labels marked difficult are
positive in training and left out of metrics. The authors' code, and metrics.preset=mlgcn, leave them out of the AP only
and count them as negative in precision, recall and F1.
"""

from mlmoe_jax.config import option
from mlmoe_jax.config.recipes.feature_map import feature_map_config, set_gcn_training, shrink_for_digits
from mlmoe_jax.runtime.keys import ChoiceKey


def get_config(arg=""):
    config, options = feature_map_config(
        arg,
        vectors=option("model.head.graph.word_vectors"),
        schedule=ChoiceKey(
            "code",
            "Learning rate.",
            choices={
                "code": "20 epochs at a constant rate of 0.1, as the authors' flags",
                "paper": "100 epochs at 0.01, divided by 10 after every 40",
            },
        ),
    )
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
