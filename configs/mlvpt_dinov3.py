"""ML-VPT on a frozen DINOv3, with the recipe of configs/mlvpt_dinov2.py.

    mlmoe train --config=mlvpt_dinov3:root=/data/coco --workdir=runs/dinov3
    mlmoe train --config=mlvpt_dinov3:root=/data/coco,backbone=clip_vitb16 --workdir=runs/clip

For the download, accept the license of DINOv3 at huggingface.co/facebook/dinov3-vitb16-pretrain-lvd1689m, and set
HF_TOKEN. With the weights in a file, add --config.model.backbone.weights=FILE.
Any ViT is a backbone, such as a SigLIP 2 or CLIP.
"""

from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config, use_ml_vpt


def get_config(arg=""):
    config, options = prompt_tuning_config(arg, digits_rate=1e-2, backbone="dinov3_vitb16")
    use_ml_vpt(config, preset=options.preset)
    return config
