"""CNN-RNN on ResNet-101 (Wang et al., CVPR 2016): labels one after another, by an LSTM and beam search.

    python -m mlmoe_jax.main --config=configs/cnn_rnn_resnet101.py:root=/data/coco --workdir=runs/cnn_rnn
    python -m mlmoe_jax.main --config=configs/cnn_rnn_resnet101.py:dataset=digits --workdir=runs/cnn_rnn_digits

The paper has VGG-16 and no code that its authors published; rate and number of epochs are ours. A label scores the
largest probability that it has at any step of any path in the beam. Its loss is that of the sequence, so that the other
keys of config.loss do nothing; an unknown label counts as absent. The backbone does not learn unless tune=yes.
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER, or digits, which needs no download.
resolution: pixels. backbone: any of models.backbones.catalog; by default resnet101, for digits vit_digits. tune:
yes | no | auto, whether the backbone learns; auto = a CNN does, as published, a ViT does not.
"""

from mlmoe_jax.config.recipes.feature_map import feature_map, small


def get_config(arg=""):
    config, options = feature_map(arg, tune="no")
    config.model.head.kind = "cnn_rnn"
    config.loss.terms.logits = 0.0  # its loss is that of the sequence
    if options.dataset == "digits":
        return small(config, rate=1e-2)
    config.augment.geometry, config.augment.flip = "random_resized_crop", True
    config.optim.name, config.optim.b1, config.optim.weight_decay = "sgd", 0.9, 1e-4
    config.optim.learning_rate, config.optim.clip_norm = 0.1, 10.0
    config.optim.schedule, config.train.epochs = "multi_step", 20
    config.train.batch_size = config.eval.batch_size = 64
    return config
