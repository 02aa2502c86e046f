"""PyTorch's input pipeline, as in many training scripts: a DataLoader of decoded, resized and augmented JPEG files.

Kinds: `pil` decodes, resizes and augments with Pillow and torchvision's first transforms; `v2` decodes with Pillow and
uses torchvision.transforms.v2 on tensors; `v2-decode` also decodes with torchvision.
"""

from __future__ import annotations

import numpy as np
import protocol
import torch
from PIL import Image, ImageDraw
from torchvision.transforms import Compose, Normalize, RandAugment, ToTensor, v2

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageFiles(torch.utils.data.Dataset):
    """The files, over and over."""

    def __init__(self, files: list[str], size: int, kind: str, full: bool):
        self.files, self.size, self.kind = files, size, kind
        if kind == "pil":
            finish = [ToTensor(), Normalize(MEAN, STD)]
            self.transform = Compose([self.cutout, RandAugment(2, 9), *finish] if full else finish)
        else:
            resize = v2.Resize((size, size), antialias=True)
            finish = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
            augment = [v2.RandomErasing(p=1.0, scale=(0.25, 0.25), ratio=(1, 1), value=0), v2.RandAugment(2, 9)]
            self.transform = v2.Compose([resize, *(augment if full else []), *finish])

    def cutout(self, image: Image.Image) -> Image.Image:
        """Cover a square of half the side with one random color."""
        side = self.size
        x, y = np.random.randint(0, side, 2).tolist()
        corners = [max(0, x - side // 4), max(0, y - side // 4), min(side, x + side // 4), min(side, y + side // 4)]
        ImageDraw.Draw(image).rectangle(corners, fill=tuple(np.random.randint(0, 256, 3).tolist()))
        return image

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, row: int) -> torch.Tensor:
        file = self.files[row % len(self.files)]
        if self.kind == "v2-decode":
            from torchvision.io import ImageReadMode, decode_image, read_file

            return self.transform(decode_image(read_file(file), ImageReadMode.RGB))
        image = Image.open(file).convert("RGB")
        if self.kind == "pil":
            return self.transform(image.resize((self.size,) * 2, Image.Resampling.BILINEAR))
        return self.transform(v2.functional.pil_to_tensor(image))


def measure(files: list[str], size: int, seconds: float, kind: str, full: bool) -> dict[str, float]:
    """Return images per second of one thread, with `full` including cutout and RandAugment."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = iter(torch.utils.data.DataLoader(ImageFiles(files, size, kind, full), batch_size=16))
    measured = protocol.images_per_second(batches, seconds)
    torch.set_num_threads(threads)
    return measured
