"""Make optim.npz: schedules and trajectories of torch.optim on a small quadratic (torch 2.13, CPU).

The loss is ½ vᵀHv − bᵀv, v the three parameters one after the other.
"""

from pathlib import Path

import numpy as np
import torch

SHAPES = {"head/kernel": (4, 3), "head/bias": (3,), "prompts/deep": (5,)}
PEAK, DECAY, STEPS = 0.05, 0.3, 40
RATE = {"prompts/deep": 0.1}
NO_DECAY = ("head/bias",)
# Not 5: torch divides by zero where pct_start * total_steps = 1.
TOTALS = (1, 2, 3, 4, 6, 7, 10, 50, 200)


def schedules():
    arrays = {}
    for total in TOTALS:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK, total_steps=total, pct_start=0.2)
        rows = []
        for step in range(total):
            rows.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]))
            optimizer.step()
            if step + 1 < total:
                schedule.step()
        arrays[f"one_cycle/{total}"] = np.array(rows).T
    return arrays


def problem():
    random = np.random.default_rng(0)
    size = sum(int(np.prod(shape)) for shape in SHAPES.values())
    half = random.normal(size=(size, size)) / size**0.5
    return {
        "H": (half @ half.T + 0.1 * np.eye(size)).astype(np.float32),
        "b": random.normal(size=size).astype(np.float32),
        "start": random.normal(size=size).astype(np.float32),
    }


def trajectory(name, arrays, clip_norm=0.0):
    start = torch.from_numpy(arrays["start"]).split([int(np.prod(shape)) for shape in SHAPES.values()])
    params = {
        path: torch.nn.Parameter(x.reshape(shape).clone())
        for (path, shape), x in zip(SHAPES.items(), start, strict=True)
    }
    groups = [{"params": [p], "weight_decay": 0.0 if path in NO_DECAY else DECAY} for path, p in params.items()]
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=PEAK),
        "adam": lambda: torch.optim.Adam(groups, lr=PEAK),
        "sgd": lambda: torch.optim.SGD(groups, lr=PEAK, momentum=0.9),
    }[name]()
    peaks = [PEAK * RATE.get(path, 1.0) for path in params]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peaks, total_steps=STEPS, pct_start=0.2)
    H, b = torch.from_numpy(arrays["H"]), torch.from_numpy(arrays["b"])
    rows = []
    for step in range(STEPS):
        v = torch.cat([p.flatten() for p in params.values()])
        optimizer.zero_grad()
        (0.5 * v @ H @ v - b @ v).backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(params.values(), clip_norm)
        optimizer.step()
        if step + 1 < STEPS:
            schedule.step()
        rows.append(torch.cat([p.detach().flatten() for p in params.values()]).numpy())
    return np.stack(rows)


def write(folder: Path) -> None:
    arrays = problem()
    arrays |= {
        "adamw": trajectory("adamw", arrays),
        "sgd": trajectory("sgd", arrays),
        "adamw_clip": trajectory("adamw", arrays, clip_norm=0.5),
        "sgd_clip": trajectory("sgd", arrays, clip_norm=0.5),
        "adam": trajectory("adam", arrays),
        "adam_clip": trajectory("adam", arrays, clip_norm=0.5),
    }
    np.savez_compressed(folder / "optim.npz", **schedules(), **arrays)
