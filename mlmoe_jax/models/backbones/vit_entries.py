"""The named ViTs: ViT-B/16 as in the papers, DINOv2, DINOv3, and the vision towers of SigLIP 2, CLIP and TIPSv2."""

from typing import Any

from mlmoe_jax.models.backbones.entry import BackboneEntry
from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.models.layers.positions import LINEAR
from mlmoe_jax.models.published import PublishedFile, on_hub, on_server

_HALF = (0.5,) * 3


def _vit_b16(address: str, license: str, **settings: Any) -> BackboneEntry:
    """Return the entry of a ViT-B/16. `settings` are other arguments of BackboneEntry."""
    shape = ViTShape(width=768, depth=12, heads=12, patch=16, native=224)
    return BackboneEntry(shape, weights=on_server(address, license), **settings)


# Letter of a size -> width, blocks, heads, published name, MLP
_DINOV2_SIZES = {
    "s": (384, 12, 6, "small", "gelu"),
    "b": (768, 12, 12, "base", "gelu"),
    "l": (1024, 24, 16, "large", "gelu"),
    "g": (1536, 40, 24, "giant", "swiglu"),
}


def _dinov2(size: str, registers: int = 0) -> BackboneEntry:
    """Return the entry of a DINOv2 model (Oquab et al., 2023), also with registers (Darcet et al., 2024)."""
    width, depth, heads, name, mlp = _DINOV2_SIZES[size]
    # Models with registers were trained with another resampling of the position table.
    positions = {"position_offset": 0.0 if registers else 0.1, "position_antialias": bool(registers)}
    common = {"patch": 14, "native": 518, "layer_scale": 1e-5, "mask_token": True}
    shape = ViTShape(width, depth, heads, mlp=mlp, registers=registers, **common, **positions)
    repository = f"facebook/dinov2-{'with-registers-' if registers else ''}{name}"
    return BackboneEntry(shape, weights=on_hub(repository, "Apache-2.0"))


def _dinov3(width: int, depth: int, heads: int, size: str, *, plus: bool = False) -> BackboneEntry:
    """Return the entry of a DINOv3 model (Siméoni et al., 2025), distilled on LVD-1689M."""
    common = {"patch": 16, "native": 224, "eps": 1e-5, "layer_scale": 1e-5, "mask_token": True, "registers": 4}
    mlp = {"mlp": "swiglu", "mlp_ratio": 6.0} if plus else {}
    shape = ViTShape(width, depth, heads, rotary_base=100.0, key_bias=False, **common, **mlp)
    weights = on_hub(f"facebook/dinov3-{size}-pretrain-lvd1689m", "DINOv3 License", gated=True)
    return BackboneEntry(shape, weights=weights)


# Published size -> (width, blocks, heads, hidden width of the MLPs, patch)
_SIGLIP_SIZES = {
    "base-patch16": (768, 12, 12, 3072, 16),
    "large-patch16": (1024, 24, 16, 4096, 16),
    "so400m-patch14": (1152, 27, 16, 4304, 14),
}


def _siglip2(size: str, side: int) -> BackboneEntry:
    """Return the entry of the vision tower of SigLIP 2 (Tschannen et al., 2025), which has an attention pool."""
    width, depth, heads, hidden, patch = _SIGLIP_SIZES[size]
    native = side // patch * patch  # 384 is 6 pixels more than a multiple of 14
    options = {"mlp_ratio": hidden / width, "mlp": "gelu_tanh", "class_token": False, "published": side}
    shape = ViTShape(width, depth, heads, patch, native, **options)
    return BackboneEntry(shape, _HALF, _HALF, side, on_hub(f"google/siglip2-{size}-{side}", "Apache-2.0"))


_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_BASE, _LARGE = (768, 12, 12, 16), (1024, 24, 16, 14)  # width, blocks, heads, patch


def _clip(
    size: tuple[int, int, int, int], repository: str, *, side: int = 224, mlp: str = "gelu", half: bool = False
) -> BackboneEntry:
    """Return the entry of a vision tower of CLIP or OpenCLIP, from a file in OpenCLIP's format.

    CLIP: Radford et al., ICML 2021. OpenCLIP: Cherti et al., CVPR 2023. The feature `cls` is the class token after the
    final norm. The final projection, whose input this is, is left out. With `half`, images are normalized with mean and
    standard deviation 0.5, otherwise as in CLIP.
    """
    shape = ViTShape(*size, side, mlp=mlp, eps=1e-5, patch_bias=False, pre_norm=True)
    mean, std = (_HALF, _HALF) if half else (_CLIP_MEAN, _CLIP_STD)
    weights = on_hub(repository, "MIT", "open_clip_model.safetensors")
    return BackboneEntry(shape, mean, std, side, weights, resize="clip")


def _tips(width: int, depth: int, heads: int, size: str, **settings: Any) -> BackboneEntry:
    """Return the entry of a vision tower of TIPSv2 (Cao et al., CVPR 2026).

    It has the shape of DINOv2 with one register, which is a second class token. The feature `cls` is the first class
    token, which the authors compare with texts. The first was trained with the texts of web pages, the second with
    generated captions. Images are not normalized. `settings` are other arguments of ViTShape.
    """
    positions = {"position_antialias": True, "position_kernel": LINEAR}
    common = {"patch": 14, "native": 448, "layer_scale": 1.0, "mask_token": True, "registers": 1}
    shape = ViTShape(width, depth, heads, **common, **positions, **settings)
    folder = "https://storage.googleapis.com/tips_data/v2_0/checkpoints/pytorch"
    weights = on_server(f"{folder}/tips_v2_oss_{size}_vision.npz", "CC-BY-4.0")
    return BackboneEntry(shape, (0.0,) * 3, (1.0,) * 3, 448, weights)


VITS: dict[str, BackboneEntry] = {
    "vit_digits": BackboneEntry(  # configs/pretrain_digits.py reproduces it
        ViTShape(width=128, depth=5, heads=4, patch=8, native=64),
        _HALF,
        (0.25, 0.25, 0.25),
        64,
        PublishedFile("vit_digits.safetensors", "Apache-2.0", package="mlmoe_jax/pretrained/files"),
    ),
    # "IN1k" of the ML-VPT paper: pretrained on ImageNet-21k, then on 1k
    "vit_b16_in1k": _vit_b16(
        "https://github.com/rwightman/pytorch-image-models/releases/download/v0.1-vitjx/jx_vit_base_p16_224-80ecf9dd.pth",
        "Apache-2.0",
        mean=_HALF,
        std=_HALF,
    ),
    "vit_b16_in21k": _vit_b16(
        "https://storage.googleapis.com/vit_models/augreg/"
        "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz",
        "Apache-2.0",
        mean=_HALF,
        std=_HALF,
        final_norm=False,
    ),
    "vit_b16_mae": _vit_b16(
        "https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_base.pth",
        "CC-BY-NC-4.0",
        final_norm=False,
    ),
    "vit_b16_mocov3": _vit_b16(
        "https://dl.fbaipublicfiles.com/moco-v3/vit-b-300ep/linear-vit-b-300ep.pth.tar",
        "CC-BY-NC-4.0",
        final_norm=False,
    ),
    **{f"dinov2_vit{size}14": _dinov2(size) for size in _DINOV2_SIZES},
    **{f"dinov2_vit{size}14_reg": _dinov2(size, registers=4) for size in _DINOV2_SIZES},
    "dinov3_vits16": _dinov3(384, 12, 6, "vits16"),
    "dinov3_vits16plus": _dinov3(384, 12, 6, "vits16plus", plus=True),
    "dinov3_vitb16": _dinov3(768, 12, 12, "vitb16"),
    "dinov3_vitl16": _dinov3(1024, 24, 16, "vitl16"),
    "dinov3_vith16plus": _dinov3(1280, 32, 20, "vith16plus", plus=True),
    **{f"siglip2_vitb16_{side}": _siglip2("base-patch16", side) for side in (224, 256, 384, 512)},
    **{f"siglip2_vitl16_{side}": _siglip2("large-patch16", side) for side in (256, 384, 512)},
    **{f"siglip2_so400m14_{side}": _siglip2("so400m-patch14", side) for side in (224, 384)},
    # OpenAI's weights
    "clip_vitb16": _clip(_BASE, "timm/vit_base_patch16_clip_224.openai", mlp="quick_gelu"),
    "clip_vitl14": _clip(_LARGE, "timm/vit_large_patch14_clip_224.openai", mlp="quick_gelu"),
    "clip_vitl14_336": _clip(_LARGE, "timm/vit_large_patch14_clip_336.openai", side=336, mlp="quick_gelu"),
    # LAION's, trained on LAION-2B and on DataComp-1B
    "openclip_vitb16_laion2b": _clip(_BASE, "laion/CLIP-ViT-B-16-laion2B-s34B-b88K"),
    "openclip_vitl14_laion2b": _clip(_LARGE, "laion/CLIP-ViT-L-14-laion2B-s32B-b82K", half=True),
    "openclip_vitb16_datacomp": _clip(_BASE, "laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K"),
    "openclip_vitl14_datacomp": _clip(_LARGE, "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K"),
    "tipsv2_vitb14": _tips(768, 12, 12, "b14"),
    "tipsv2_vitl14": _tips(1024, 24, 16, "l14"),
    "tipsv2_so400m14": _tips(1152, 27, 16, "so14", mlp_ratio=4304 / 1152),
    "tipsv2_vitg14": _tips(1536, 40, 24, "g14", mlp="swiglu"),
}
