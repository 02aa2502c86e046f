"""CNN-RNN on ResNet-101 (Wang et al., CVPR 2016): labels as a sequence, predicted by an LSTM and beam search.

    mlmoe train --config=cnn_rnn_resnet101:root=/data/coco --workdir=runs/cnn_rnn
    mlmoe train --config=cnn_rnn_resnet101:dataset=digits --workdir=runs/cnn_rnn_digits

The paper uses VGG-16 and its authors published no code. Learning rate and number of epochs are our choice. The score of
a label is its largest probability at any step of any path in the beam. The head computes the loss of the sequence, so
config.loss has no effect. An unknown label counts as absent.
"""

from mlmoe_jax.config.recipes.benchmarks import evaluate_like
from mlmoe_jax.config.recipes.feature_map import feature_map_config, shrink_for_digits


def get_config(arg=""):
    config, options = feature_map_config(arg, tune="no")
    config.model.head.kind = "cnn_rnn"
    config.loss.terms.logits = 0.0  # the head computes the loss of the sequence
    if options.dataset == "digits":
        return shrink_for_digits(config, rate=1e-2)
    evaluate_like(config, "drmoe")
    config.augment.geometry, config.augment.flip = "random_resized_crop", True
    config.optim.name, config.optim.b1, config.optim.weight_decay = "sgd", 0.9, 1e-4
    config.optim.learning_rate, config.optim.clip_norm = 0.1, 10.0
    config.optim.schedule, config.train.epochs = "multi_step", 20
    config.train.batch_size = config.eval.batch_size = 64
    return config
