"""Make vit_*.npz: small twins of the ViT family from Hugging Face's transformers (needs torch and transformers).

Each twin reads its random weights from a file in the published format, by its own loader. Stored are those weights
under the names in the file (in float16, which they were rounded to), and for each image size the tokens after the
embedding and after every block, and at the end; for SigLIP 2 also the pooled output. Its file, CLIP's and TIPSv2's have
a tower for texts, too. Torch is imported where it is used, so that tests can take the cases from here without it.
"""

import tempfile
from pathlib import Path

import numpy as np

_DINOV2 = {"patch": 7, "native": 28, "layer_scale": 1.0, "mask_token": True}
_VIT = {"patch": 7, "native": 28, "eps": 1e-12}
_DINOV3 = {
    **{"width": 24, "heads": 2, "patch": 7, "native": 28, "eps": 1e-5, "layer_scale": 1.0, "mask_token": True},
    **{"registers": 4, "rotary_base": 100.0, "key_bias": False},
}
_TIPS = {
    **{"width": 16, "heads": 2, "patch": 7, "native": 28, "layer_scale": 1.0, "mask_token": True, "registers": 1},
    **{"position_antialias": True, "position_kernel": "linear"},
}
# Each twin's architecture as keywords of ViTShape.
SHAPES = {
    "dinov2_small": {"width": 16, "depth": 3, "heads": 2, **_DINOV2},
    "dinov2_large": {"width": 24, "depth": 6, "heads": 4, **_DINOV2},
    "dinov2_giant": {"width": 16, "depth": 2, "heads": 2, "mlp": "swiglu", **_DINOV2},
    "dinov2_registers": {
        **{"width": 16, "depth": 3, "heads": 2, "registers": 4, "position_antialias": True},
        **_DINOV2,
    },
    "vit": {"width": 16, "depth": 3, "heads": 4, **_VIT},
    "vit_mae": {"width": 16, "depth": 3, "heads": 4, **_VIT},
    "dinov3": {"depth": 3, **_DINOV3},
    "dinov3_plus": {"depth": 2, "mlp": "swiglu", "mlp_ratio": 6.0, **_DINOV3},
    "siglip2": {
        **{"width": 16, "depth": 3, "heads": 2, "patch": 7, "native": 28, "mlp_ratio": 3.75},
        **{"mlp": "gelu_tanh", "class_token": False},
    },
    "clip": {
        **{"width": 16, "depth": 3, "heads": 2, "patch": 7, "native": 28, "mlp": "quick_gelu", "eps": 1e-5},
        **{"patch_bias": False, "pre_norm": True},
    },
    "tipsv2": {"depth": 3, "mlp_ratio": 3.75, **_TIPS},
    "tipsv2_giant": {"depth": 2, "mlp": "swiglu", **_TIPS},
}
# The index of a twin is the seed of its weights.
SEEDED = (
    *("dinov2_giant", "dinov2_large", "dinov2_registers", "dinov2_small", "vit", "vit_mae"),
    *("dinov3", "dinov3_plus", "siglip2", "clip", "tipsv2", "tipsv2_giant"),
)
# Batch, and rows and columns of patches: native, larger, not square, and not square with as many patches as native.
SIZES = ((2, 4, 4), (1, 6, 6), (1, 3, 5), (1, 2, 8))


def image(batch: int, rows: int, columns: int, patch: int = 7) -> np.ndarray:
    """Return f32[B,H,W,3], the same on every machine."""
    height, width = rows * patch, columns * patch
    i = np.arange(batch * height * width * 3)
    return (np.sin(0.37 * i) + 0.5 * np.cos(0.011 * i)).reshape(batch, height, width, 3).astype(np.float32)


def _twin(name: str):
    """Return the class whose published files the twin stands for, and its configuration."""
    import transformers as hf

    shape = SHAPES[name]
    common = {
        "hidden_size": shape["width"],
        "num_hidden_layers": shape["depth"],
        "num_attention_heads": shape["heads"],
        "image_size": shape["native"],
        "patch_size": shape["patch"],
    }
    if name == "dinov2_registers":
        config = hf.Dinov2WithRegistersConfig(**common, num_register_tokens=shape["registers"])
        return hf.Dinov2WithRegistersModel, config
    if name.startswith("dinov2"):
        return hf.Dinov2Model, hf.Dinov2Config(**common, use_swiglu_ffn=shape.get("mlp") == "swiglu")
    if name.startswith("dinov3"):
        hidden = 4 * shape["width"]  # two thirds of 6 for the gated ones
        further = {"num_register_tokens": 4, "layerscale_value": 1.0, "use_gated_mlp": name == "dinov3_plus"}
        further |= {"hidden_act": "silu"} if name == "dinov3_plus" else {}
        return hf.DINOv3ViTModel, hf.DINOv3ViTConfig(**common, **further, intermediate_size=hidden)
    if name in ("siglip2", "clip"):
        text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        text |= {"vocab_size": 11, "max_position_embeddings": 5, "bos_token_id": 1, "eos_token_id": 2}
        vision = common | {"intermediate_size": int(shape.get("mlp_ratio", 4) * shape["width"])}
        if name == "siglip2":
            text["projection_size"] = shape["width"]
            return hf.SiglipModel, hf.SiglipConfig(text_config=text, vision_config=vision)
        return hf.CLIPModel, hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    if name.startswith("tipsv2"):
        text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        gated = shape.get("mlp") == "swiglu"
        vision = common | {"mlp_ratio": shape.get("mlp_ratio", 4), "use_swiglu_ffn": gated}
        return hf.Tipsv2Model, hf.Tipsv2Config(text_config=text | {"vocab_size": 11}, vision_config=vision)
    common |= {"intermediate_size": 4 * shape["width"], "layer_norm_eps": shape["eps"]}
    if name == "vit":
        return hf.ViTModel, hf.ViTConfig(**common)
    decoder = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    decoder = {f"decoder_{key}": value for key, value in decoder.items()}
    return hf.ViTMAEForPreTraining, hf.ViTMAEConfig(**common, **decoder, mask_ratio=0.0)


def _draw(name: str, shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """Return values that make every tensor of a file count, rounded to float16."""
    noise = random.standard_normal(shape)
    if name.endswith(("lambda1", "gamma")):
        noise = 0.5 + 0.2 * noise
    elif name.endswith(".weight"):
        noise = 1 + 0.2 * noise if len(shape) == 1 else noise / np.sqrt(np.prod(shape[1:]))
    else:
        noise = 0.3 * noise
    return np.asarray(noise, np.float16)


def _tokens(model, name: str, pixels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tokens before and after every block, `blocks` f32[L+1,B,T,D], and after the norm, `last` f32[B,T,D].

    For SigLIP 2 also the `pooled` output f32[B,D].
    """
    import torch

    encoder, after = getattr(model, "vit", getattr(model, "vision_model", model)), []

    def keep(module, inputs, output):
        after.append((output[0] if isinstance(output, tuple) else output).numpy())

    blocks = [module for module in encoder.modules() if type(module).__name__.endswith("Layer")]
    assert len(blocks) == SHAPES[name]["depth"]
    embedded = encoder.pre_layrnorm if name == "clip" else encoder.embeddings
    hooks = [module.register_forward_hook(keep) for module in (embedded, *blocks)]
    options = {} if name.startswith(("dino", "tips")) else {"interpolate_pos_encoding": True}
    if name == "vit_mae":  # increasing noise keeps the patches in order
        patches = pixels.shape[1] * pixels.shape[2] // SHAPES[name]["patch"] ** 2
        options["noise"] = torch.arange(patches, dtype=torch.float32).repeat(len(pixels), 1)
    with torch.no_grad():
        output = encoder(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), **options)
        last = output.last_hidden_state
        # Hugging Face's CLIP normalizes the class token only, OpenCLIP all tokens.
        last = encoder.post_layernorm(last) if name == "clip" else last
    for hook in hooks:
        hook.remove()
    pooled = {"pooled": output.pooler_output.numpy()} if name == "siglip2" else {}
    return {"blocks": np.stack(after), "last": last.numpy(), **pooled}


def twin(name: str) -> dict[str, np.ndarray]:
    """Return a twin's weights, weights/{name in the file}, and its tokens, {rows}x{columns}/{key of _tokens}."""
    from safetensors.numpy import load_file, save_file

    kind, config = _twin(name)
    random = np.random.RandomState(SEEDED.index(name))
    with tempfile.TemporaryDirectory() as folder:
        kind(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        # transformers 5 writes the decoder of ViT-MAE under a name that the published file does not have
        names = {key.replace("decoder_encoder.layer", "decoder_layers"): x for key, x in load_file(file).items()}
        weights = {key: _draw(key, value.shape, random) for key, value in sorted(names.items())}
        save_file({key: value.astype(np.float32) for key, value in weights.items()}, file, {"format": "pt"})
        model, report = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    arrays = {f"weights/{key}": value for key, value in weights.items()}
    for size in SIZES:
        arrays |= {f"{size[1]}x{size[2]}/{key}": x for key, x in _tokens(model.eval(), name, image(*size)).items()}
    return arrays


def write(folder: Path) -> None:
    for name in SHAPES:
        np.savez_compressed(folder / f"vit_{name}.npz", **twin(name))
