"""The backbones that have a name: architecture, preprocessing, and the file that holds their published weights."""

from dataclasses import dataclass

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.convnext import ConvNeXtShape
from mlmoe_jax.models.backbones.resnet import ResNetShape
from mlmoe_jax.models.backbones.vit import ViTShape

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


HUB = "https://huggingface.co/facebook"


META = "https://dl.fbaipublicfiles.com"


TORCHVISION = "https://download.pytorch.org/models"


@dataclass(frozen=True)
class Entry:
    """One backbone. `file` is looked for in the package, then in the cache folder; `address` is where it is published.

    mean, std: of each channel, for pixel values in 0…1. image_size: the usual input side in pixels. final_norm: whether
    the papers read its features after the last LayerNorm. sha256: of the file, where its publisher says it; otherwise
    the first download is pinned (the hub's own checksums are used in any case).
    """

    shape: ViTShape | ResNetShape | ConvNeXtShape
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_size: int
    file: str
    address: str
    licence: str
    final_norm: bool = True
    sha256: str = ""


def _dinov2(width: int, depth: int, heads: int, size: str, *, mlp: str = "gelu", registers: int = 0) -> Entry:
    # Models with registers were trained with another resampling of their positions.
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
    address = f"{HUB}/{name}/resolve/main/model.safetensors"
    return Entry(shape, IMAGENET_MEAN, IMAGENET_STD, 224, f"{name}/model.safetensors", address, "Apache-2.0")


def _vit_b16(address: str, licence: str, *, half: bool, final_norm: bool) -> Entry:
    shape = ViTShape(width=768, depth=12, heads=12, patch=16, native=224)
    mean, std = ((0.5,) * 3, (0.5,) * 3) if half else (IMAGENET_MEAN, IMAGENET_STD)
    return Entry(shape, mean, std, 224, address.rpartition("/")[2], address, licence, final_norm)


def _torchvision(shape: ResNetShape | ConvNeXtShape, file: str) -> Entry:
    return Entry(shape, IMAGENET_MEAN, IMAGENET_STD, 224, file, f"{TORCHVISION}/{file}", "BSD-3-Clause")


CATALOG: dict[str, Entry] = {
    "vit_digits": Entry(
        ViTShape(width=128, depth=5, heads=4, patch=8, native=64),
        (0.5, 0.5, 0.5),
        (0.25, 0.25, 0.25),
        64,
        "vit_digits.safetensors",
        "this package; configs/pretrain_digits.py makes it again",
        "Apache-2.0",
    ),
    "dinov2_vits14": _dinov2(384, 12, 6, "small"),
    "dinov2_vitb14": _dinov2(768, 12, 12, "base"),
    "dinov2_vitl14": _dinov2(1024, 24, 16, "large"),
    "dinov2_vitg14": _dinov2(1536, 40, 24, "giant", mlp="swiglu"),
    "dinov2_vits14_reg": _dinov2(384, 12, 6, "small", registers=4),
    "dinov2_vitb14_reg": _dinov2(768, 12, 12, "base", registers=4),
    "dinov2_vitl14_reg": _dinov2(1024, 24, 16, "large", registers=4),
    "dinov2_vitg14_reg": _dinov2(1536, 40, 24, "giant", mlp="swiglu", registers=4),
    # "IN1k" of the ML-VPT paper: pretrained on ImageNet-21k, then on 1k
    "vit_b16_in1k": _vit_b16(
        "https://github.com/rwightman/pytorch-image-models/releases/download/v0.1-vitjx/jx_vit_base_p16_224-80ecf9dd.pth",
        "Apache-2.0",
        half=True,
        final_norm=True,
    ),
    "vit_b16_in21k": _vit_b16(
        "https://storage.googleapis.com/vit_models/augreg/"
        "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz",
        "Apache-2.0",
        half=True,
        final_norm=False,
    ),
    "vit_b16_mae": _vit_b16(
        f"{META}/mae/pretrain/mae_pretrain_vit_base.pth", "CC-BY-NC-4.0", half=False, final_norm=False
    ),
    "vit_b16_mocov3": _vit_b16(
        f"{META}/moco-v3/vit-b-300ep/linear-vit-b-300ep.pth.tar", "CC-BY-NC-4.0", half=False, final_norm=False
    ),
    "resnet50": _torchvision(ResNetShape((3, 4, 6, 3)), "resnet50-0676ba61.pth"),
    "resnet101": _torchvision(ResNetShape((3, 4, 23, 3)), "resnet101-5d3b4d8f.pth"),
    "convnext_tiny": _torchvision(ConvNeXtShape((3, 3, 9, 3), (96, 192, 384, 768)), "convnext_tiny-983f1562.pth"),
    "convnext_small": _torchvision(ConvNeXtShape((3, 3, 27, 3), (96, 192, 384, 768)), "convnext_small-0c510722.pth"),
    "convnext_base": _torchvision(ConvNeXtShape((3, 3, 27, 3), (128, 256, 512, 1024)), "convnext_base-6075fbad.pth"),
    "convnext_large": _torchvision(ConvNeXtShape((3, 3, 27, 3), (192, 384, 768, 1536)), "convnext_large-ea097f82.pth"),
}


def entry(name: str) -> Entry:
    """Return the entry of a backbone; UserError lists the names for an unknown one."""
    if name not in CATALOG:
        raise UserError(f"there is no backbone '{name}'; model.backbone.name is one of {', '.join(CATALOG)}")
    return CATALOG[name]
