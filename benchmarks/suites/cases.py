"""Cases for measured processes, and their sizes by platform."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHORT = {
    "dinov2_vits14": "DINOv2-S",
    "dinov2_vitb14": "DINOv2-B",
    "dinov2_vitl14": "DINOv2-L",
    "resnet101": "ResNet-101",
    "vit_digits": "ViT (digits)",
}
METHODS = {"ml-vpt": "ML-VPT", "vpt": "VPT", "lora": "LoRA", "q2l": "Q2L", "dr-moe": "DR-MoE"}
ON_VIT = ("ml-vpt", "vpt", "lora")


@dataclass(frozen=True)
class Settings:
    """The sizes of the cases, from the command line or else by platform.

    `models` are METHOD or METHOD@BACKBONE, `rounds` the number of rounds, and `photos` a folder of photographs.
    """

    platform: str
    models: tuple[str, ...]
    batches: tuple[int, ...]
    resolutions: tuple[int, ...]
    dtypes: tuple[str, ...]
    modes: tuple[str, ...]
    rounds: int
    quick: bool
    photos: Path | None = None


BY_PLATFORM = {
    "cpu": {
        "models": ("ml-vpt@dinov2_vitb14",),
        "batches": (8,),
        "resolutions": (224,),
        "dtypes": ("float32", "bfloat16"),
    },
    "gpu": {
        "models": ("ml-vpt@dinov2_vits14", "ml-vpt@dinov2_vitb14", "ml-vpt@dinov2_vitl14", "q2l", "dr-moe"),
        "batches": (1, 8, 64, 256),
        "resolutions": (224, 448),
        "dtypes": ("float32", "bfloat16"),
    },
}
BY_PLATFORM["tpu"] = BY_PLATFORM["gpu"] | {"dtypes": ("bfloat16",)}
QUICK = {"models": ("ml-vpt@vit_digits",), "batches": (2,), "resolutions": (32,), "dtypes": ("float32",)}


def model_of(name: str) -> tuple[str, str]:
    """Return the method and the backbone of METHOD[@BACKBONE]."""
    method, _, backbone = name.partition("@")
    if method not in METHODS:
        raise SystemExit(f"--models: {method!r} is not one of {', '.join(METHODS)}")
    return method, backbone or ("dinov2_vitb14" if method in ON_VIT else "resnet101")


def case(model: str, mode: str, *, batch: int, resolution: int, dtype: str, **changes: Any) -> dict[str, Any]:
    """Return a case with the sizes of the paper: 80 labels, 5 groups, 3 prompts per group and side."""
    method, backbone = model_of(model)
    sizes = {"batch": batch, "resolution": resolution, "dtype": dtype, "labels": 80, "groups": 5, "per_group": 3}
    return {"method": method, "backbone": backbone, "mode": mode, **sizes, **changes}


def images_per_device(settings: Settings, resolution: int) -> int:
    """Return the batch of one accelerator for the suites that choose it: 64 images at 224 px, 16 at 448 px."""
    if settings.quick or settings.platform == "cpu":
        return settings.batches[0]
    return max(1, 64 * 224**2 // resolution**2)


def title(of: dict[str, Any]) -> str:
    """Return the name of a case: "ML-VPT, DINOv2-B, 224 px"."""
    return f"{METHODS[of['method']]}, {sizes_of(of)}"


def sizes_of(of: dict[str, Any]) -> str:
    return f"{SHORT.get(of['backbone'], of['backbone'])}, {of['resolution']} px"


def key(of: dict[str, Any], *sides: str) -> str:
    """Return a text that identifies a case and its sides."""
    return " ".join([*(f"{name}={value}" for name, value in of.items()), "|", ", ".join(sides)])
