"""The vision towers of CLIP (Radford et al., ICML 2021) and OpenCLIP (Cherti et al., CVPR 2023), without projection.

`cls` is the class token after the last norm, which the projection into the space of texts would read.
"""

from mlmoe_jax.models.backbones.entry import Entry
from mlmoe_jax.models.backbones.vit import ViTShape

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5,) * 3
_BASE, _LARGE = (768, 12, 12, 16), (1024, 24, 16, 14)  # width, blocks, heads, patch


def _clip(
    size: tuple[int, int, int, int],
    repository: str,
    *,
    side: int = 224,
    mlp: str = "gelu",
    mean: tuple[float, float, float] = _MEAN,
    std: tuple[float, float, float] = _STD,
) -> Entry:
    """Return the entry of a model in a repository with the files of OpenCLIP."""
    width, depth, heads, patch = size
    shape = ViTShape(width, depth, heads, patch, side, mlp=mlp, eps=1e-5, patch_bias=False, pre_norm=True)
    file = "open_clip_model.safetensors"
    address = f"https://huggingface.co/{repository}/resolve/main/{file}"
    return Entry(shape, mean, std, side, f"{repository.partition('/')[2]}/{file}", address, "MIT")


ENTRIES: dict[str, Entry] = {
    # OpenAI's weights
    "clip_vitb16": _clip(_BASE, "timm/vit_base_patch16_clip_224.openai", mlp="quick_gelu"),
    "clip_vitl14": _clip(_LARGE, "timm/vit_large_patch14_clip_224.openai", mlp="quick_gelu"),
    "clip_vitl14_336": _clip(_LARGE, "timm/vit_large_patch14_clip_336.openai", side=336, mlp="quick_gelu"),
    # LAION's, trained on LAION-2B and on DataComp-1B
    "openclip_vitb16_laion2b": _clip(_BASE, "laion/CLIP-ViT-B-16-laion2B-s34B-b88K"),
    "openclip_vitl14_laion2b": _clip(_LARGE, "laion/CLIP-ViT-L-14-laion2B-s32B-b82K", mean=_HALF, std=_HALF),
    "openclip_vitb16_datacomp": _clip(_BASE, "laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K"),
    "openclip_vitl14_datacomp": _clip(_LARGE, "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K"),
}
