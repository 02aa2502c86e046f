"""Make tips.npz and text_tips.model: small twins of TIPSv2, with both towers, and a tokenizer of its kind.

The twins are models of transformers, one with the exact GELU and one with SwiGLU in the vision tower. Stored are their
weights under the names of the published files, in float16, to which they were rounded; tokens and whether they are
valid; the class tokens, patches and vectors; the scores, and the gradients of a weighted sum of the scores. The
tokenizer is trained here on a few words; its tokens of `strings()` are stored. Torch, transformers and sentencepiece
are imported where they are used, so that tests can take the cases from here without them.
"""

import io
import tempfile
from pathlib import Path

import numpy as np

from tools.parity.text_towers import WORDS, strings
from tools.parity.vit import _draw, image

VOCABULARY, LENGTH, TEMPERATURE = 420, 64, 0.05
TWINS = ("gelu", "swiglu")
TEXT = {"width": 16, "depth": 2, "heads": 2, "hidden": 20}
VISION = {"width": 16, "depth": 2, "heads": 2, "patch": 7, "native": 28}
ROWS = (*range(10, 29), 40)  # of `strings()`: texts with tokens, of which the last has too many


def weighted(shape: tuple[int, int]) -> np.ndarray:
    """Return the weights of the sum of scores whose gradients are stored."""
    return np.cos(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def _trained() -> bytes:
    """Return a SentencePiece model as the published one: byte-pair encoding with bytes for unknown letters."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(f"{one} {other}".lower() for one in WORDS for other in WORDS),
        model_writer=written,
        model_type="bpe",
        vocab_size=VOCABULARY,
        **{"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1},
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        num_threads=1,
        minloglevel=2,
    )
    return written.getvalue()


def tokenized(folder: Path) -> dict[str, np.ndarray]:
    """Return the tokens of `strings()` by transformers, and write the tokenizer to text_tips.model."""
    import transformers as hf

    (folder / "text_tips.model").write_bytes(_trained())
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "tokenizer.model").write_bytes((folder / "text_tips.model").read_bytes())
        tokenizer = hf.Tipsv2Tokenizer.from_pretrained(place)
    settings = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "np"}
    encoded = tokenizer(strings(), **settings)
    return {"tokens": encoded["input_ids"].astype(np.int16), "valid": encoded["attention_mask"].astype(bool)}


def _config(mlp: str):
    import transformers as hf

    sizes = {"hidden_size": TEXT["width"], "num_hidden_layers": TEXT["depth"], "num_attention_heads": TEXT["heads"]}
    text = sizes | {"intermediate_size": TEXT["hidden"], "vocab_size": VOCABULARY}
    vision = sizes | {"image_size": VISION["native"], "patch_size": VISION["patch"], "use_swiglu_ffn": mlp == "swiglu"}
    return hf.Tipsv2Config(text_config=text, vision_config=vision)


def twin(mlp: str, encoded: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return weights/NAME, gradient/NAME and the outputs of a twin; see the module."""
    import torch
    import transformers as hf
    from safetensors.numpy import load_file, save_file
    from transformers.core_model_loading import revert_weight_conversion

    random = np.random.RandomState(TWINS.index(mlp))
    with tempfile.TemporaryDirectory() as folder:
        hf.Tipsv2Model(_config(mlp)).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        weights = {name: _draw(name, x.shape, random) for name, x in sorted(load_file(file).items())}
        weights["temperature"] = np.asarray(TEMPERATURE, np.float16)
        save_file({name: np.asarray(x, np.float32) for name, x in weights.items()}, file, {"format": "pt"})
        model = hf.Tipsv2Model.from_pretrained(folder, attn_implementation="eager").eval()
    tokens, valid = (encoded[key][list(ROWS)] for key in ("tokens", "valid"))
    result = model(
        input_ids=torch.from_numpy(tokens).long(),
        attention_mask=torch.from_numpy(valid).long(),
        pixel_values=torch.from_numpy(image(3, 4, 4)).permute(0, 3, 1, 2).contiguous(),
    )
    scores = result.logits_per_image
    (scores * torch.from_numpy(weighted(tuple(scores.shape)))).sum().backward()
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}
    tower = result.vision_model_output
    return {
        **{f"weights/{name}": x for name, x in weights.items()},
        **{f"gradient/{name}": x.numpy() for name, x in revert_weight_conversion(model, gradients).items()},
        **{"tokens": tokens, "valid": valid, "scores": scores.detach().numpy()},
        "vectors": result.text_model_output.pooler_output.detach().numpy(),
        "cls": tower.pooler_output.detach().numpy(),
        "tokens_of_image": tower.last_hidden_state.detach().numpy(),
    }


def write(folder: Path) -> None:
    encoded = tokenized(folder)
    arrays = {f"strings/{key}": x for key, x in encoded.items()}
    for mlp in TWINS:
        arrays |= {f"{mlp}/{key}": x for key, x in twin(mlp, encoded).items()}
    np.savez_compressed(folder / "tips.npz", **arrays)
