"""DINOv2 (Oquab et al., 2023), also with registers (Darcet et al., 2024)."""

from mlmoe_jax.models.backbones.entry import IMAGENET_MEAN, IMAGENET_STD, Entry
from mlmoe_jax.models.backbones.vit import ViTShape


def _dinov2(width: int, depth: int, heads: int, size: str, *, mlp: str = "gelu", registers: int = 0) -> Entry:
    # Models with registers were trained with another resampling of the position table.
    shape = ViTShape(
        width,
        depth,
        heads,
        patch=14,
        native=518,
        mlp=mlp,
        layer_scale=1e-5,
        mask_token=True,
        position_offset=0.0 if registers else 0.1,
        position_antialias=bool(registers),
        registers=registers,
    )
    name = f"dinov2-with-registers-{size}" if registers else f"dinov2-{size}"
    address = f"https://huggingface.co/facebook/{name}/resolve/main/model.safetensors"
    return Entry(shape, IMAGENET_MEAN, IMAGENET_STD, 224, f"{name}/model.safetensors", address, "Apache-2.0")


ENTRIES: dict[str, Entry] = {
    "dinov2_vits14": _dinov2(384, 12, 6, "small"),
    "dinov2_vitb14": _dinov2(768, 12, 12, "base"),
    "dinov2_vitl14": _dinov2(1024, 24, 16, "large"),
    "dinov2_vitg14": _dinov2(1536, 40, 24, "giant", mlp="swiglu"),
    "dinov2_vits14_reg": _dinov2(384, 12, 6, "small", registers=4),
    "dinov2_vitb14_reg": _dinov2(768, 12, 12, "base", registers=4),
    "dinov2_vitl14_reg": _dinov2(1024, 24, 16, "large", registers=4),
    "dinov2_vitg14_reg": _dinov2(1536, 40, 24, "giant", mlp="swiglu", registers=4),
}
