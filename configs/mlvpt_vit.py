"""ML-VPT on a frozen ViT-B/16, with the published recipe of configs/mlvpt_dinov2.py.

    mlmoe train --config=mlvpt_vit:backbone=mae,root=/data/coco --workdir=runs/coco_mae

backbone: in1k (supervised, ImageNet-21k then 1k) | in21k (supervised) | mae | mocov3. For in1k, prompts are read after
the last LayerNorm, for other weights before it, as in the authors' code.
dataset: coco2014 | voc2007 | voc2012 | nuswide | vg256, with root=FOLDER; or digits. resolution: 224 | 448.
preset: code (the authors' code; the default) | paper (the text of the paper; images for the supervised ViTs are then
normalized with 0.5, as in their training, and not with ImageNet's mean and standard deviation).
selection=held_out, or preset=held_out: select weights and fit thresholds on a tenth of the training images, not test.
precision: auto (the default: float32 on a CPU, else bfloat16) | float32 | authors (bfloat16, evaluation in float16).
"""

from mlmoe_jax.config.recipes.prompt_tuning import VIT_B16, prompt_tuning_config, use_ml_vpt
from mlmoe_jax.errors import UserError


def get_config(arg=""):
    config, options = prompt_tuning_config(arg, digits_rate=1e-2, backbone="in1k")
    use_ml_vpt(config, preset=options.preset)
    if options.dataset != "digits":
        if options.backbone not in VIT_B16:
            raise UserError(f"backbone={options.backbone} is not one of {', '.join(VIT_B16)}")
        config.model.backbone.name = f"vit_b16_{options.backbone}"
    return config
