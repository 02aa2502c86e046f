"""ML-VPT on a frozen ViT-B/16, with the published recipe of configs/mlvpt_dinov2.py.

    mlmoe train --config=mlvpt_vit:backbone=mae,root=/data/coco --workdir=runs/coco_mae

For in1k, prompts are read after the last LayerNorm, for other weights before it, as in the authors' code. With
preset=paper, images for the supervised ViTs are normalized with 0.5, as in their training, and not with ImageNet's mean
and standard deviation.
"""

from mlmoe_jax.config.recipes.prompt_tuning import VIT_B16, prompt_tuning_config, use_ml_vpt


def get_config(arg=""):
    config, options = prompt_tuning_config(arg, digits_rate=1e-2, backbone="in1k", backbones=VIT_B16)
    use_ml_vpt(config, preset=options.preset)
    if options.backbone in VIT_B16:
        config.model.backbone.name = f"vit_b16_{options.backbone}"
    return config
