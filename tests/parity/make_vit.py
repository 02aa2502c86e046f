"""Make vit_*.npz: small twins of the ViT family from Hugging Face's transformers (needs torch and transformers).

python tests/parity/make_vit.py

Each twin reads its random weights from a file in the published format, by its own loader. Stored are those weights
under the names in the file (in float16, which they were rounded to), and for each image size the tokens after the
embedding and after every block, and at the end. Torch is imported where it is used, so that tests can take the cases
from here without it.
"""

import tempfile
from pathlib import Path

import numpy as np

_DINOV2 = {"patch": 7, "native": 28, "layer_scale": 1.0, "mask_token": True}
_VIT = {"patch": 7, "native": 28, "eps": 1e-12}
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
}
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
    common |= {"intermediate_size": 4 * shape["width"], "layer_norm_eps": shape["eps"]}
    if name == "vit":
        return hf.ViTModel, hf.ViTConfig(**common)
    decoder = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    decoder = {f"decoder_{key}": value for key, value in decoder.items()}
    return hf.ViTMAEForPreTraining, hf.ViTMAEConfig(**common, **decoder, mask_ratio=0.0)


def _draw(name: str, shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """Return values that make every tensor of a file count, rounded to float16."""
    noise = random.standard_normal(shape)
    if name.endswith("lambda1"):
        noise = 0.5 + 0.2 * noise
    elif name.endswith(".weight"):
        noise = 1 + 0.2 * noise if len(shape) == 1 else noise / np.sqrt(np.prod(shape[1:]))
    else:
        noise = 0.3 * noise
    return noise.astype(np.float16)


def _tokens(model, name: str, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens after the embedding and every block f32[L+1,B,T,D], and after the last norm f32[B,T,D]."""
    import torch

    encoder, after = getattr(model, "vit", model), []

    def keep(module, inputs, output):
        after.append((output[0] if isinstance(output, tuple) else output).numpy())

    blocks = [module for module in encoder.modules() if type(module).__name__.endswith("Layer")]
    assert len(blocks) == SHAPES[name]["depth"]
    hooks = [module.register_forward_hook(keep) for module in (encoder.embeddings, *blocks)]
    options = {} if name.startswith("dinov2") else {"interpolate_pos_encoding": True}
    if name == "vit_mae":  # increasing noise keeps the patches in order
        patches = pixels.shape[1] * pixels.shape[2] // SHAPES[name]["patch"] ** 2
        options["noise"] = torch.arange(patches, dtype=torch.float32).repeat(len(pixels), 1)
    with torch.no_grad():
        last = encoder(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), **options).last_hidden_state
    for hook in hooks:
        hook.remove()
    return np.stack(after), last.numpy()


def twin(name: str) -> dict[str, np.ndarray]:
    """Return a twin's weights, weights/{name in the file}, and its tokens, {rows}x{columns}/blocks and …/last."""
    from safetensors.numpy import load_file, save_file

    kind, config = _twin(name)
    random = np.random.RandomState(sorted(SHAPES).index(name))
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
        place = f"{size[1]}x{size[2]}"
        arrays[f"{place}/blocks"], arrays[f"{place}/last"] = _tokens(model.eval(), name, image(*size))
    return arrays


if __name__ == "__main__":
    for name in SHAPES:
        np.savez_compressed(Path(__file__).with_name(f"vit_{name}.npz"), **twin(name))
