"""The PyTorch side of input_pipeline.py: reads its request from stdin, prints images per second of one thread."""

import json
import sys
import time

import numpy as np
import torch
from PIL import Image, ImageDraw
from torchvision.transforms import Compose, Normalize, RandAugment, ToTensor

files, size, seconds, full = json.load(sys.stdin)
torch.set_num_threads(1)


def cutout(image: Image.Image) -> Image.Image:
    """Cover a square of half the side with one random color."""
    x, y = np.random.randint(0, size, 2).tolist()
    corners = [max(0, x - size // 4), max(0, y - size // 4), min(size, x + size // 4), min(size, y + size // 4)]
    ImageDraw.Draw(image).rectangle(corners, fill=tuple(np.random.randint(0, 256, 3).tolist()))
    return image


finish = [ToTensor(), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
transform = Compose([cutout, RandAugment(2, 9), *finish] if full else finish)


class Pictures(torch.utils.data.Dataset):
    """The files, over and over."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, row: int) -> torch.Tensor:
        image = Image.open(files[row % len(files)]).convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
        return transform(image)


batches = iter(torch.utils.data.DataLoader(Pictures(), batch_size=16))
next(batches)
started, images = time.perf_counter(), 0
while time.perf_counter() - started < seconds:
    images += len(next(batches))
print(images / (time.perf_counter() - started))
