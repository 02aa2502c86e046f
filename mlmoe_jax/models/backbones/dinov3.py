"""DINOv3 (Siméoni et al., 2025), distilled on LVD-1689M: rotary positions, registers, and keys without a bias."""

from mlmoe_jax.models.backbones.entry import DINOV3_LICENCE, IMAGENET_MEAN, IMAGENET_STD, Entry
from mlmoe_jax.models.backbones.vit import ViTShape


def _dinov3(width: int, depth: int, heads: int, size: str, *, plus: bool = False) -> Entry:
    shape = ViTShape(
        width,
        depth,
        heads,
        patch=16,
        native=224,
        mlp="swiglu" if plus else "gelu",
        mlp_ratio=6.0 if plus else 4.0,
        eps=1e-5,
        layer_scale=1e-5,
        mask_token=True,
        registers=4,
        rotary_base=100.0,
        key_bias=False,
    )
    name = f"dinov3-{size}-pretrain-lvd1689m"
    address = f"https://huggingface.co/facebook/{name}/resolve/main/model.safetensors"
    return Entry(shape, IMAGENET_MEAN, IMAGENET_STD, 224, f"{name}/model.safetensors", address, DINOV3_LICENCE)


ENTRIES: dict[str, Entry] = {
    "dinov3_vits16": _dinov3(384, 12, 6, "vits16"),
    "dinov3_vits16plus": _dinov3(384, 12, 6, "vits16plus", plus=True),
    "dinov3_vitb16": _dinov3(768, 12, 12, "vitb16"),
    "dinov3_vitl16": _dinov3(1024, 24, 16, "vitl16"),
    "dinov3_vith16plus": _dinov3(1280, 32, 20, "vith16plus", plus=True),
}
