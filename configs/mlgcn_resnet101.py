"""ML-GCN on ResNet-101 (Chen et al., CVPR 2019): a graph of labels makes the classifiers from their word vectors.

    python -m mlmoe_jax.main --config=configs/mlgcn_resnet101.py:root=/data/coco,vectors=glove.txt --workdir=runs/mlgcn
    python -m mlmoe_jax.main --config=configs/mlgcn_resnet101.py:dataset=digits --workdir=runs/mlgcn_digits

vectors: a text file of word vectors, as the authors have it; without one, vectors come from the training labels.
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER, or digits, which needs no download.
resolution: pixels. backbone: any of models.backbones.catalog; by default resnet101, for digits vit_digits. tune:
yes | no | auto, whether the backbone learns; auto = a CNN does, as published, a ViT does not.

SGD with momentum 0.9 and decay 1e-4, 0.1 and a tenth of it for the backbone, gradients clipped at 10, batches of 16,
crops at several scales and flips. The authors' flags end after 20 epochs at a constant rate, their paper says 100 with
0.01, a tenth of it after every 40 (schedule=paper). On VOC the authors train labels marked difficult as positive; here
they are negative, as data.difficult says.
"""

from mlmoe_jax.config.recipes.feature_map import feature_map, gcn_recipe, small
from mlmoe_jax.errors import UserError


def get_config(arg=""):
    config, options = feature_map(arg, vectors="", schedule="code")
    if options.schedule not in ("code", "paper"):
        raise UserError(f"schedule={options.schedule} is not one of code, paper")
    config.model.head.kind = "ml_gcn"
    config.model.head.graph.word_vectors = options.vectors
    if options.dataset == "digits":
        return small(config, rate=1e-2)
    gcn_recipe(config, rate=0.1, epochs=20)
    config.optim.schedule = "constant"
    if options.schedule == "paper":
        config.train.epochs, config.optim.schedule, config.optim.milestones = 100, "multi_step", (0.4, 0.8)
        config.optim.learning_rate = 0.01
    return config
