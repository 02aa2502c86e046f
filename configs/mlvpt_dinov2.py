"""ML-VPT on a frozen DINOv2, with the published recipe.

    python -m mlmoe_jax.main --config=configs/mlvpt_dinov2.py:dataset=coco2014,root=/data/coco --workdir=runs/coco
    python -m mlmoe_jax.main --config=configs/mlvpt_dinov2.py:dataset=voc2012,root=/data/VOCdevkit --workdir=runs/voc

dataset: coco2014 | voc2007 | voc2012. resolution: 224 | 448. backbone: dinov2_vitb14 | dinov2_vits14 | dinov2_vitl14.
preset: code (what the authors ran; the default) | paper (what they wrote).

AdamW, one-cycle, 40 epochs of batches of 64, weight decay 0.01 on everything trainable, EMA, evaluation of raw and EMA
weights each epoch, selection on test. Of the published augmentation this has the cutout; RandAugment is not here yet.
"""

from mlmoe_jax.config import default_config, parse_arg
from mlmoe_jax.presets import use_dataset, use_ml_vpt


def get_config(arg=""):
    options = parse_arg(arg, dataset="coco2014", root="", resolution=224, backbone="dinov2_vitb14", preset="code")
    config = default_config()
    use_dataset(config, options.dataset, options.root, options.resolution)
    use_ml_vpt(config, preset=options.preset)
    config.model.backbone.name = options.backbone
    config.augment.cutout = 0.5
    config.train.epochs = 40
    config.train.batch_size = 64
    config.train.patience = 6
    if options.preset == "paper":
        config.optim.learning_rate, config.ema.decay = 5e-4, 0.9997
    else:
        slow = (options.dataset == "coco2014" and options.backbone == "dinov2_vitb14") or (
            options.dataset.startswith("voc") and options.resolution == 448
        )
        config.optim.learning_rate = 1e-4 if slow else 5e-4
    return config
