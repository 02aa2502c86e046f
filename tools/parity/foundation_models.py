"""Make foundation_models.json: tensors, parameters and multiply-adds of DINOv3, SigLIP 2, CLIP and TIPSv2 at full size.

The models of transformers on torch's meta device, which holds no values, in the configurations of the published files;
with the names that they are saved under. Multiply-adds are counted by torch.utils.flop_counter for one image: matrix
products, the patch convolution and attention.
"""

import json
import re
from pathlib import Path

import torch
import transformers as hf
from torch.utils.flop_counter import FlopCounterMode
from transformers.core_model_loading import revert_weight_conversion

SIGLIP = {"vitb16": (768, 12, 12, 3072, 16), "vitl16": (1024, 24, 16, 4096, 16), "so400m14": (1152, 27, 16, 4304, 14)}
SIDES = {"vitb16": (224, 256, 384, 512), "vitl16": (256, 384, 512), "so400m14": (224, 378)}


def _common(width: int, depth: int, heads: int, hidden: int, patch: int, side: int) -> dict[str, int | str]:
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads, "patch_size": patch}
    return {**sizes, "intermediate_size": hidden, "image_size": side, "attn_implementation": "eager"}


def _dinov3(width: int, depth: int, heads: int, plus: bool = False):
    kind = {"use_gated_mlp": plus, "hidden_act": "silu" if plus else "gelu", "num_register_tokens": 4}
    return hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**_common(width, depth, heads, 4 * width, 16, 224), **kind)), 224


def _siglip(size: str, side: int):
    return hf.SiglipVisionModel(hf.SiglipVisionConfig(**_common(*SIGLIP[size], side))), side


def _clip(width: int, depth: int, heads: int, patch: int, side: int = 224):
    return hf.CLIPVisionModel(hf.CLIPVisionConfig(**_common(width, depth, heads, 4 * width, patch, side))), side


def _tips(width: int, depth: int, heads: int, ratio: float = 4, gated: bool = False):
    common = _common(width, depth, heads, 0, 14, 448)
    del common["intermediate_size"]
    return hf.Tipsv2VisionModel(hf.Tipsv2VisionConfig(**common, mlp_ratio=ratio, use_swiglu_ffn=gated)), 448


MODELS = {
    "dinov3_vits16": lambda: _dinov3(384, 12, 6),
    "dinov3_vits16plus": lambda: _dinov3(384, 12, 6, plus=True),
    "dinov3_vitb16": lambda: _dinov3(768, 12, 12),
    "dinov3_vitl16": lambda: _dinov3(1024, 24, 16),
    "dinov3_vith16plus": lambda: _dinov3(1280, 32, 20, plus=True),
    **{
        f"siglip2_{size}_{384 if side == 378 else side}": lambda size=size, side=side: _siglip(size, side)
        for size, sides in SIDES.items()
        for side in sides
    },
    "clip_vitb16": lambda: _clip(768, 12, 12, 16),
    "clip_vitl14": lambda: _clip(1024, 24, 16, 14),
    "clip_vitl14_336": lambda: _clip(1024, 24, 16, 14, 336),
    "tipsv2_vitb14": lambda: _tips(768, 12, 12),
    "tipsv2_vitl14": lambda: _tips(1024, 24, 16),
    "tipsv2_so400m14": lambda: _tips(1152, 27, 16, 4304 / 1152),
    "tipsv2_vitg14": lambda: _tips(1536, 40, 24, gated=True),
}


def measured(name: str) -> dict:
    """Return the tensors {name: shape}, the parameters, the side of images, and the multiply-adds of a model."""
    with torch.device("meta"), torch.no_grad():
        model, side = MODELS[name]()
        with FlopCounterMode(display=False) as counter:
            model.eval()(torch.zeros(1, 3, side, side))
    tower = "vision_model." if name.startswith(("siglip", "clip")) else ""
    tensors = model.state_dict()
    if name.startswith("tips"):  # transformers has other names than the file
        tensors = revert_weight_conversion(model, tensors)
    return {
        "parameters": sum(value.numel() for value in model.parameters()),
        "side": side,
        "multiply_adds": counter.get_total_flops() // 2,
        "tensors": {
            tower + re.sub(r"(?:model\.)?(layers?|blocks)\.\d+\.", r"\1.*.", key): list(value.shape)
            for key, value in tensors.items()
        },
    }


def write(folder: Path) -> None:
    content = json.dumps({name: measured(name) for name in MODELS}, indent=1)
    compact = re.sub(r"\[\s+([^]]*?)\s+\]", lambda found: f"[{re.sub(chr(10) + ' *', ' ', found[1])}]", content)
    (folder / "foundation_models.json").write_text(compact + "\n")
