"""Train on your own images: a folder of images and one table of labels. Copy this file and adapt it.

    mlmoe data --config=own_csv:root=photos    # inspects the data
    mlmoe train --config=own_csv:root=photos --workdir=runs/photos
    mlmoe predict --workdir=runs/photos --images=new_photos

`photos/labels.csv` lists the path of each image, relative to `photos`, and its labels. An empty field means none:

    image,labels
    beach/001.jpg,sea;boat
    002.jpg,

For a table with one column per class (1, 0, or empty for unknown), pass label_column= (empty):

    image,sea,boat
    beach/001.jpg,1,1
    002.jpg,0,

With the option names, the labels are the names of the file, and the backbone is the one that they belong to. The fit is
drawn towards the classifiers that the vectors give, as far as this lowers the loss of cross-validation. Labels without
images keep the scores of their names.

On a CNN, a linear classifier is fitted to the features of all images, to convergence. Nothing is held out, and the
metrics are of cross-validation. With fit=steps it is trained by steps instead, as a ViT always is, with a tenth of the
images held out. With tune=yes, all weights of the backbone are trained, too. A run keeps its backbone.
"""

import os

from ml_collections import ConfigDict

from mlmoe_jax.config import default_config, parse_arg
from mlmoe_jax.config.recipes.benchmarks import TABLE_OPTIONS, use_own_images
from mlmoe_jax.config.recipes.prompt_tuning import use_ml_vpt
from mlmoe_jax.data.labels.name_vectors import read_name_vectors
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.build import backbone_shape
from mlmoe_jax.pretrained.locate import is_local
from mlmoe_jax.runtime.keys import ChoiceKey, IntegerKey, PathKey, TextKey
from mlmoe_jax.runtime.progress import status

PREFERRED = ("dinov2_vitb14", "dinov2_vits14")  # the best first
INSTALLED = "efficientnet_lite0"  # part of the package
BACKBONE_RATES = {"cnn": 0.1, "vit": 3e-3}  # of a trained backbone, as factors of the rate of the classifier


def get_config(arg="", run=None):
    options = parse_arg(
        arg,
        root=PathKey("", "Folder of the images and their labels, or an address such as hf://datasets/USER/NAME."),
        **TABLE_OPTIONS,
        backbone=TextKey(
            "",
            "Backbone, a value of model.backbone.name; if empty, DINOv2 if its weights are on this machine, else "
            "EfficientNet-Lite0, which needs no download.",
        ),
        resolution=IntegerKey(
            0,
            "Side of the images, for a ViT a multiple of its patch size; 0 is 224, with names the backbone's own.",
            unit="pixels",
            least=0,
        ),
        names=PathKey("", "Vectors of the label names, of `mlmoe encode` (docs/labels-by-name.md)."),
        fit=ChoiceKey(
            "logistic",
            "How a linear classifier is trained.",
            choices={"logistic": "to convergence", "steps": "by steps, as a ViT always is"},
        ),
        tune=ChoiceKey(
            "no",
            "Whether the backbone is trained, too.",
            choices={"no": "it is frozen", "yes": "by steps, with a linear classifier"},
        ),
        epochs=IntegerKey(0, "Passes over the training images in training by steps; 0 is 20.", least=0),
    )
    if options.tune == "yes" and options.names:
        raise UserError("tune=yes changes the features that names are compared with; leave one of them out")
    config = default_config()

    # ---- the data set
    # table={split}.csv if each split has a table of its own; data.test_splits=("test",) if a column "split" or a table
    # test.csv defines this split
    use_own_images(config, options)
    config.data.image_size = options.resolution or 224

    # ---- the method
    config.model.backbone.name = options.backbone
    if options.names:
        use_names(config, options.names, options.resolution)
    elif not options.backbone:
        config.model.backbone.name = run.model.backbone.name if run else best_backbone()
    if options.tune == "yes":
        use_tuned_backbone(config)
    elif backbone_shape(config).takes_adapters and not options.names:
        use_prompts(config)
    else:
        use_cached_features(config, "cosine" if options.names else "linear")
    if config.data.cache_features != "no" and options.fit == "logistic":
        use_logistic_regression(config)
        if options.epochs:
            status("epochs has no effect on a fit to convergence; fit=steps trains by steps")
    else:
        patience = 0 if options.tune == "yes" else 5  # a tuned backbone is at its best when the rate has fallen
        use_steps(config, options.epochs or 20, patience)
    config.eval.batch_size = 32

    # ---- heads with label queries, if you choose one: a linear path beside them, with the rate of a linear probe
    config.model.head.residual = "pooled"
    config.optim.rate_rules += ((r"^head/pooled/", 1e-2 / config.optim.learning_rate),)
    return config


def best_backbone() -> str:
    """Return the best backbone whose weights are on this machine, and print its name."""
    for name in PREFERRED:
        if is_local(catalog.entry(name).weights):
            status(f"backbone: {name}, whose weights are on this machine; choose another one with :backbone=NAME")
            return name
    better = f"a better one, which is downloaded once, is :backbone={PREFERRED[-1]}"
    status(f"backbone: {INSTALLED}, which is installed; {better}")
    return INSTALLED


def use_prompts(config: ConfigDict) -> None:
    """Set ML-VPT for a ViT. Label groups are computed from your training labels."""
    use_ml_vpt(config)
    config.model.prompts.num_groups = 2  # at most the number of your labels
    config.augment.flip = True  # False if left and right matter
    config.augment.cutout = 0.5
    config.augment.randaugment = "uda"
    config.optim.learning_rate = 5e-4


def use_names(config: ConfigDict, names: str, resolution: int) -> None:
    """Set the vectors of the label names, and without a choice the backbone of the vectors and its images."""
    config.model.head.names, config.data.classes = names, os.path.abspath(names)  # data.classes is below data.root
    if not config.model.backbone.name:
        config.model.backbone.name = read_name_vectors(names).backbone
    config.data.update(catalog.entry(config.model.backbone.name).images)
    config.data.image_size = resolution or config.data.image_size


def use_cached_features(config: ConfigDict, head: str) -> None:
    """Set a linear probe for a CNN, or for vectors of names, with features that are computed once.

    On two thousand photographs no other head was better (docs/results.md, "On photographs").
    """
    use_classifier(config, head)
    config.data.cache_features = "float32"  # with fit=steps, "no" to augment the images, with config.augment


def use_classifier(config: ConfigDict, head: str) -> None:
    """Set a classifier of the image's feature, its loss and its rate."""
    config.model.head.kind = head
    config.loss.kind, config.loss.reduce, config.loss.scale = "bce", "mean", 1.0
    config.optim.learning_rate, config.optim.weight_decay = 1e-2, 1e-2


def use_tuned_backbone(config: ConfigDict) -> None:
    """Set a linear classifier and fine-tuning of the backbone, with a smaller rate and augmented images."""
    use_classifier(config, "linear")
    config.trainable = ((r"", True),)
    kind = "vit" if backbone_shape(config).takes_adapters else "cnn"
    config.optim.rate_rules = ((r"^backbone/", BACKBONE_RATES[kind]),)
    config.model.backbone.batch_norm = "running"  # statistics of small batches would be noise
    config.augment.geometry, config.augment.crop_scale = "random_resized_crop", (0.5, 1.0)
    config.augment.flip = True  # False if left and right matter


def use_logistic_regression(config: ConfigDict) -> None:
    """Set the fit to convergence, with thresholds and metrics of cross-validation."""
    config.train.fit = "logistic"
    config.data.val_split = ""  # "val", if a column "split" or a table val.csv defines it, to score it too
    config.eval.select_on = "none"
    config.thresholds.at_end = True


def use_steps(config: ConfigDict, epochs: int, patience: int) -> None:
    """Set training by steps, which holds out images to choose the best epoch."""
    config.data.val_fraction = 0.1  # 0 if there is a split "val"
    config.train.epochs = epochs
    config.train.batch_size = 32
    config.train.patience = patience  # epochs without a better validation mAP; 0 is all epochs
    config.ema.decay = 0.995  # averages about 200 steps
    config.report.samples = 16  # images that the report shows with attention and gates; 0 for none
