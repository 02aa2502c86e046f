"""LoRA and rsLoRA: low-rank updates in a frozen ViT, a linear classifier (Hu et al., ICLR 2022).

mlmoe train --config=lora:dataset=digits --workdir=runs/lora_digits
mlmoe train --config=lora:rank=8,targets=query+value,root=/data/coco --workdir=runs/lora
"""

from mlmoe_jax.config.recipes.prompt_tuning import adapter_config


def get_config(arg=""):
    return adapter_config(arg, "lora", digits_rate=3e-3)
