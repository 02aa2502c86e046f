"""ML-VPT on a frozen DINOv2, with the published recipe.

    python -m mlmoe_jax.main --config=configs/mlvpt_dinov2.py:dataset=coco2014,root=/data/coco --workdir=runs/coco
    python -m mlmoe_jax.main --config=configs/mlvpt_dinov2.py:dataset=voc2012,root=/data/VOCdevkit --workdir=runs/voc

dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256. resolution: 224 | 448. backbone: a DINOv2, by default
dinov2_vitb14.
preset: code (what the authors ran; the default) | paper (what they wrote).

AdamW, one-cycle, 40 epochs of batches of 64, weight decay 0.01 on everything trainable, EMA, evaluation of raw and EMA
weights each epoch, selection on test. Pictures are resized to squares, then cutout and RandAugment, as published.
"""

from mlmoe_jax.config import default_config, parse_arg
from mlmoe_jax.presets import use_dataset, use_ml_vpt


def get_config(arg=""):
    options = parse_arg(arg, dataset="coco2014", root="", resolution=224, backbone="dinov2_vitb14", preset="code")
    config = default_config()
    use_dataset(config, options.dataset, options.root, options.resolution)
    use_ml_vpt(config, preset=options.preset)
    config.model.backbone.name = options.backbone
    config.augment.cutout, config.augment.randaugment = 0.5, "uda"
    config.train.epochs = 40
    config.train.batch_size = 64
    config.train.patience = 6
    if options.preset == "paper":
        config.optim.learning_rate, config.ema.decay = 5e-4, 0.9997
    else:
        slow = {
            "coco2014": options.backbone == "dinov2_vitb14",
            "voc2007": options.resolution == 448,
            "voc2012": options.resolution == 448,
            "vg256": True,
        }
        config.optim.learning_rate = 1e-4 if slow.get(options.dataset) else 5e-4
    return config
