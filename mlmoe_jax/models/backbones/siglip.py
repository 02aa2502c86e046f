"""The vision towers of SigLIP 2 (Tschannen et al., 2025) with a fixed resolution: no class token, an attention pool."""

from mlmoe_jax.models.backbones.entry import Entry
from mlmoe_jax.models.backbones.vit import ViTShape

# Published size -> (width, blocks, heads, hidden width of the MLPs, patch)
_SIZES = {
    "base-patch16": (768, 12, 12, 3072, 16),
    "large-patch16": (1024, 24, 16, 4096, 16),
    "so400m-patch14": (1152, 27, 16, 4304, 14),
}


def _siglip2(size: str, side: int) -> Entry:
    width, depth, heads, hidden, patch = _SIZES[size]
    # The authors' code ignores the 6 pixels by which 384 exceeds a multiple of 14.
    native = side // patch * patch
    shape = ViTShape(width, depth, heads, patch, native, mlp_ratio=hidden / width, mlp="gelu_tanh", class_token=False)
    name = f"siglip2-{size}-{side}"
    address = f"https://huggingface.co/google/{name}/resolve/main/model.safetensors"
    half = (0.5,) * 3
    return Entry(shape, half, half, native, f"{name}/model.safetensors", address, "Apache-2.0")


ENTRIES: dict[str, Entry] = {
    **{f"siglip2_vitb16_{side}": _siglip2("base-patch16", side) for side in (224, 256, 384, 512)},
    **{f"siglip2_vitl16_{side}": _siglip2("large-patch16", side) for side in (256, 384, 512)},
    **{f"siglip2_so400m14_{side}": _siglip2("so400m-patch14", side) for side in (224, 384)},
}
