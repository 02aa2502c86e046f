"""timm, the multi-label example of its training guide, in a loop of ours: its script is no part of the package.

AdamW with a cosine, batches of 32 and the script's crops, flips and colors, at a rate of 3e-4 in place of 1e-4, since
these trainings have fewer steps. All images are trained on, and the last weights count.
"""

from __future__ import annotations

from pathlib import Path

import timm
import torch
from PIL import Image
from task import Scores, Task, carry_out, write_losses
from timm.data import create_transform, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.task import MultiLabelClassificationTask
from torch.utils.data import DataLoader, Dataset

BATCH, RATE, DECAY, WORKERS, WARMUP = 32, 3e-4, 0.01, 2, 0.1
MODEL = "model.pt"


class Images(Dataset):
    """Images with their targets."""

    def __init__(self, paths: list[Path], targets: torch.Tensor, transform):
        self.paths, self.targets, self.transform = paths, targets, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(Image.open(self.paths[row]).convert("RGB")), self.targets[row]


def make_model(task: Task, **settings) -> torch.nn.Module:
    torch.set_num_threads(task.threads)
    model = timm.create_model("tf_efficientnet_lite0", num_classes=len(task.classes), **settings)
    return model.to(memory_format=torch.channels_last)


def train(task: Task, run: Path) -> None:
    torch.manual_seed(task.seed)
    model = make_model(task, pretrained=True, pretrained_cfg_overlay={"file": task.weights})
    transform = create_transform(**resolve_data_config({}, model=model), is_training=True, color_jitter=0.4)
    paths = [path for path, _ in task.rows]
    images = Images(paths, torch.tensor(task.targets, dtype=torch.float32), transform)
    loader = DataLoader(images, BATCH, shuffle=True, drop_last=True, num_workers=WORKERS, persistent_workers=True)
    steps = task.epochs * len(loader)
    optimizer = create_optimizer_v2(model, "adamw", lr=RATE, weight_decay=DECAY)
    warmup = {"warmup_t": round(WARMUP * steps), "warmup_lr_init": 1e-6}
    schedule = CosineLRScheduler(optimizer, t_initial=steps, t_in_epochs=False, warmup_prefix=False, **warmup)
    together = MultiLabelClassificationTask(model)
    step, losses = 0, []
    for _ in range(task.epochs):
        model.train()
        total = 0.0
        for pixels, targets in loader:
            loss = together(pixels.contiguous(memory_format=torch.channels_last), targets)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            schedule.step_update(step)
            total += loss.item()
        losses.append(total / len(loader))
    write_losses(run, losses)
    torch.save(model.state_dict(), run / MODEL)


def score(task: Task, run: Path, paths: list[Path]) -> Scores:
    model = make_model(task)
    model.load_state_dict(torch.load(run / MODEL))
    model.eval()
    transform = create_transform(**resolve_data_config({}, model=model))
    loader = DataLoader(Images(paths, torch.zeros(len(paths)), transform), BATCH, num_workers=WORKERS)
    with torch.inference_mode():
        parts = [model(pixels.contiguous(memory_format=torch.channels_last)).sigmoid() for pixels, _ in loader]
    return zip([path.name for path in paths], torch.cat(parts).numpy(), strict=True)


if __name__ == "__main__":
    carry_out(train, score)
