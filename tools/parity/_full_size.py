"""The PyTorch side of the measurement `full_size_parity`: writes a random model of `transformers` and its outputs.

PYTHON tools/parity/_full_size.py FOLDER BACKBONE SIDE SIDE …
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers as hf

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
TOWER = {**BASE, "intermediate_size": 3072, "patch_size": 16, "image_size": 224}
MODELS = {
    "dinov2_vitb14": lambda: hf.Dinov2Model(hf.Dinov2Config(**BASE, image_size=518, patch_size=14)),
    "dinov3_vitb16": lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**TOWER, num_register_tokens=4)),
    "siglip2_vitb16_224": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**TOWER)),
    "clip_vitb16": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**TOWER)),
    "tipsv2_vitb14": lambda: hf.Tipsv2VisionModel(hf.Tipsv2VisionConfig(**BASE)),
}


def main():
    folder, name, sides = Path(sys.argv[1]), sys.argv[2], [int(side) for side in sys.argv[3:]]
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            # layer scales start at 1, biases and positions at 0; random values reveal errors in them
            if "lambda1" in parameter:
                value.uniform_(0.05, 0.5)
            elif value.ndim == 1 or "embeddings" in parameter:
                value.add_(0.2 * torch.randn_like(value))
    model.save_pretrained(folder)
    blocks = []
    *_, last_block = (module for module in model.modules() if type(module).__name__.endswith("Layer"))
    last_block.register_forward_hook(lambda _, inputs, output: blocks.append(output))
    options = {} if name.startswith(("dino", "tips")) else {"interpolate_pos_encoding": True}
    for side in sides:
        pixels = np.random.RandomState(side).standard_normal((1, 3, side, side)).astype(np.float32)
        with torch.no_grad():
            output = model(torch.from_numpy(pixels), **options)
            block = blocks.pop()
            block = block[0] if isinstance(block, tuple) else block
            # CLIP's own code normalizes the class token only
            last = model.post_layernorm(block) if name.startswith("clip") else output.last_hidden_state
        np.savez(folder / f"{side}.npz", pixels=pixels, block=block, last=last, pooled=output.pooler_output)


if __name__ == "__main__":
    main()
