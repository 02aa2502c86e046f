"""The PyTorch side of full_size_parity.py: writes a random DINOv2-B of `transformers` and its outputs.

PYTHON benchmarks/full_size_parity_torch.py FOLDER SIDE SIDE …
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import Dinov2Config, Dinov2Model

folder, sides = Path(sys.argv[1]), [int(side) for side in sys.argv[2:]]
torch.manual_seed(0)
config = Dinov2Config(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, image_size=518, patch_size=14)
model = Dinov2Model(config).eval()
with torch.no_grad():
    for name, value in model.named_parameters():
        # layer scales start at 1, biases and positions at 0: draw random values, so that mistakes in them are visible
        if "lambda1" in name:
            value.uniform_(0.05, 0.5)
        elif value.ndim == 1 or "embeddings" in name:
            value.add_(0.2 * torch.randn_like(value))
model.save_pretrained(folder)
for side in sides:
    pixels = np.random.RandomState(side).standard_normal((1, 3, side, side)).astype(np.float32)
    with torch.no_grad():
        states = model(torch.from_numpy(pixels), output_hidden_states=True)
    blocks = np.stack([state.numpy() for state in states.hidden_states])
    np.savez(folder / f"{side}.npz", pixels=pixels, blocks=blocks, last=states.last_hidden_state.numpy())
