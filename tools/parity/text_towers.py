"""Make text_towers.npz, text_towers.json and text_{clip,siglip2}.json: text towers and tokenizers of transformers.

Each twin is a whole model of transformers, with a small image tower, under the names of the published files. Stored are
its weights in float16, to which they were rounded, token numbers and whether they are valid, the vectors of the texts,
gradients, and the published scores between the texts and images. The tokenizers are trained here on a few words, with
the parts of the published ones; their tokens of `strings()` are stored, and so are the images that the processors of
both models make of `pictures()`. text_towers.json has the parameters and tensors
of the towers at full size, on torch's meta device, which holds no values. Torch and transformers are imported where
they are used, so that tests can take the cases from here without them.
"""

import json
import re
import tempfile
from pathlib import Path

import numpy as np

from tools.parity.vit import _draw, image

VOCABULARY, NUM_STRINGS = 700, 1000
LENGTHS = {"clip": 77, "siglip2": 64}
SIZES = {"width": 16, "depth": 2, "heads": 2, "hidden": 40, "output": 12}
TOWERS = ("clip_quick_gelu", "clip_gelu", "siglip2")
GRADIENTS = {  # of these tensors of the text tower
    "text_model.embeddings.token_embedding.weight",
    "text_model.embeddings.position_embedding.weight",
    "text_model.encoder.layers.0.self_attn.q_proj.weight",
    "text_model.encoder.layers.1.mlp.fc1.weight",
    "text_model.final_layer_norm.weight",
}

# --------------------------------------------------------------------------------------------------------------- texts
_WORDS = """
a photo of the large small cat dog traffic light dining table potted plant motorbike person airplane
itap art origami video game bad zebra giraffe refrigerator skateboard 12 1999 T-shirt hot-dog
traffic_light don't it's WE'LL I'd Ärger Straße ΣΊΣΥΦΟΣ İstanbul naïve café cafe\u0301 crème-brûlée Ωmega ﬁsh
猫 犬 自転車 交通信号灯 고양이 사과 кошка собака قطة חתול แมว बिल्ली
🐱 🚲 👩\u200d🚒 🇫🇷 👍🏽 ☕️ 🧑\u200d🦽 ½ ² ™ € ¿qué? …
<eos> </w> <|endoftext|> &amp; <b> {} C++ a/b 3.14 #1 100% “quoted” ‘s co\u200bop x\u00ady
"""
WORDS = _WORDS.split()
BLANKS = ("", " ", "\t\n", "  \u00a0 ", "...", "!?", "_", "\u3000", "\x00", "\ufeff")


def strings() -> list[str]:
    """Return texts with accents, emoji, CJK, blanks and punctuation, some of them too long; equal on every machine."""
    random = np.random.RandomState(0)
    texts = list(BLANKS)
    while len(texts) < NUM_STRINGS:
        count = random.randint(60, 200) if len(texts) % 40 == 0 else random.randint(1, 12)
        words = [WORDS[index] for index in random.randint(0, len(WORDS), count)]
        words = [word.upper() if case < 0.2 else word for word, case in zip(words, random.rand(count), strict=True)]
        marks = [(" ", " ", " ", " ", ", ", "  ", "\n", ". ", "")[index] for index in random.randint(0, 9, count)]
        texts.append("".join(word + mark for word, mark in zip(words, marks, strict=True)))
    return texts


def _train(kind: str):
    """Return the vocabulary {token: number} and the merges of a tokenizer of VOCABULARY tokens, as published ones."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    if kind == "clip":
        tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
        tokenizer.normalizer = normalizers.Lowercase()
        words = pre_tokenizers.Split(Regex(r"[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        first = [*letters, *(f"{letter}</w>" for letter in letters)]
        last = ["<|startoftext|>", "<|endoftext|>"]
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", "▁")])
        first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
        last = []
    suffix = {"end_of_word_suffix": "</w>"} if kind == "clip" else {}
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=first if kind != "clip" else [], show_progress=False, **suffix
    )
    corpus = [f"{one} {other}" for one in WORDS for other in WORDS]
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    merges = merges[: VOCABULARY - len(first) - len(last)] if kind == "clip" else merges
    if kind != "clip":
        return model["vocab"], merges
    tokens = [*first, *("".join(pair) for pair in merges), *last]
    return {token: number for number, token in enumerate(tokens)}, merges


def _tokenizer(kind: str):
    """Return the tokenizer of transformers, padding to the length of its towers on the right."""
    import transformers as hf

    vocabulary, merges = _train(kind)
    assert len(vocabulary) == VOCABULARY
    settings = {"vocab": vocabulary, "merges": merges, "model_max_length": LENGTHS[kind], "padding_side": "right"}
    if kind == "clip":
        return hf.CLIPTokenizer(**settings)
    return hf.Siglip2Tokenizer(**settings, add_bos_token=False, add_eos_token=True)


def tokenized(kind: str, folder: Path) -> dict[str, np.ndarray]:
    """Return the tokens of `strings()`, which transformers is given as they are, and write text_{kind}.json."""
    tokenizer = _tokenizer(kind)
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        (folder / f"text_{kind}.json").write_bytes((Path(place) / "tokenizer.json").read_bytes())
    encoded = tokenizer(strings(), padding="max_length", truncation=True, max_length=LENGTHS[kind], return_tensors="np")
    return {"tokens": encoded["input_ids"].astype(np.int16), "valid": encoded["attention_mask"].astype(bool)}


# -------------------------------------------------------------------------------------------------------------- images
SIDE = 28
SIDES = ((40, 61), (61, 40), (28, 28), (28, 31), (33, 200), (120, 77), (19, 22), (301, 67))  # height, width


def pictures() -> list[np.ndarray]:
    """Return images u8[h,w,3] of several sizes; of some, half a pixel is cropped beside the center."""
    random = np.random.RandomState(1)
    return [random.randint(0, 256, (*sides, 3)).astype(np.uint8) for sides in SIDES]


def prepared(kind: str) -> np.ndarray:
    """Return u8[n,SIDE,SIDE,3], the images of the processor of transformers before their values are normalized."""
    import transformers as hf
    from PIL import Image

    square = {"height": SIDE, "width": SIDE}
    settings = {"do_rescale": False, "do_normalize": False}
    if kind == "clip":
        processor = hf.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square, **settings)
    else:  # the filter in the published preprocessor_config.json, as in the authors' code
        processor = hf.SiglipImageProcessorPil(size=square, resample=Image.Resampling.BILINEAR, **settings)
    images = [Image.fromarray(picture) for picture in pictures()]
    return np.stack(processor(images, return_tensors="np")["pixel_values"]).astype(np.uint8).transpose(0, 2, 3, 1)


# -------------------------------------------------------------------------------------------------------------- towers
def _model(name: str):
    import transformers as hf

    text = {
        "hidden_size": SIZES["width"],
        "num_hidden_layers": SIZES["depth"],
        "num_attention_heads": SIZES["heads"],
        "intermediate_size": SIZES["hidden"],
        "vocab_size": VOCABULARY,
    }
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    vision |= {"image_size": 28, "patch_size": 7}
    if name == "siglip2":  # the published files of a fixed size of images are of this class
        text |= {"max_position_embeddings": LENGTHS[name], "projection_size": vision["hidden_size"]}
        return hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=vision))
    text |= {"bos_token_id": VOCABULARY - 2, "eos_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 1}
    text |= {"hidden_act": name.removeprefix("clip_")}
    vision |= {"hidden_act": name.removeprefix("clip_")}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=SIZES["output"]))


def weighted(width: int) -> np.ndarray:
    """Return f32[E], the weights of the sum of a vector whose gradient is stored."""
    return np.cos(np.arange(width, dtype=np.float32))


def twin(name: str, encoded: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return weights/NAME, gradient/NAME, and `tokens`, `valid`, `vectors`, `scores` f32[images, texts] of a twin."""
    import torch

    model = _model(name).eval()
    random = np.random.RandomState(TOWERS.index(name))
    weights = {key: _draw(key, tuple(x.shape), random) for key, x in sorted(model.state_dict().items())}
    weights["logit_scale"] = np.asarray(np.reshape(2.3, weights["logit_scale"].shape), np.float16)
    model.load_state_dict({key: torch.from_numpy(np.array(x, np.float32)) for key, x in weights.items()})
    tokens, valid = (torch.from_numpy(encoded[key][:40]) for key in ("tokens", "valid"))
    # The published tokenizer of SigLIP 2 gives no mask: its tower attends to padding.
    mask = {} if name == "siglip2" else {"attention_mask": valid.long()}
    pixels = torch.from_numpy(image(3, 4, 4)).permute(0, 3, 1, 2).contiguous()
    result = model(input_ids=tokens.long(), pixel_values=pixels, **mask)
    features = model.get_text_features(input_ids=tokens.long(), **mask).pooler_output
    _check(name, model, tokens.long(), mask, features)
    (features @ torch.from_numpy(weighted(features.shape[1]))).sum().backward()
    gradients = {key: x.grad.numpy() for key, x in model.named_parameters() if key in GRADIENTS}
    return {
        **{f"weights/{key}": x for key, x in weights.items()},
        **{f"gradient/{key}": x for key, x in gradients.items()},
        "tokens": tokens.numpy(),
        "valid": valid.numpy(),
        "vectors": features.detach().numpy(),
        "scores": result.logits_per_image.detach().numpy(),
    }


def _check(name: str, model, tokens, mask: dict, features) -> None:
    """Assert that other classes of transformers, and its rule for old checkpoints of CLIP, give the same vectors."""
    import torch
    import transformers as hf

    if name == "siglip2":
        settings = {key: value for key, value in model.config.text_config.to_dict().items() if key != "model_type"}
        other = hf.Siglip2TextModel(hf.Siglip2TextConfig(**settings)).eval()
        other.load_state_dict(model.text_model.state_dict())
        again = other(input_ids=tokens).pooler_output
    else:
        model.text_model.eos_token_id = 2  # the end token is then the largest number
        again = model.get_text_features(input_ids=tokens, **mask).pooler_output
    assert torch.equal(features, again)


# ---------------------------------------------------------------------------------------------------------- full size
# Backbone -> width, blocks, heads and hidden width of its text tower
FULL = {
    "clip_vitb16": (512, 12, 8, 2048),
    "clip_vitl14": (768, 12, 12, 3072),
    "siglip2_vitb16_224": (768, 12, 12, 3072),
    "siglip2_vitl16_256": (1024, 24, 16, 4096),
    "siglip2_so400m14_224": (1152, 27, 16, 4304),
    "tipsv2_vitb14": (768, 12, 12, 3072),
    "tipsv2_vitl14": (1024, 12, 16, 4096),
    "tipsv2_so400m14": (1152, 27, 16, 4304),
    "tipsv2_vitg14": (1536, 12, 24, 6144),
}


def measured(backbone: str) -> dict:
    """Return the number of parameters of a text tower, its projection included, and its tensors {name: shape}."""
    import torch
    import transformers as hf
    from transformers.core_model_loading import revert_weight_conversion

    width, depth, heads, hidden = FULL[backbone]
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    sizes["intermediate_size"] = hidden
    with torch.device("meta"):
        if backbone.startswith("clip"):
            model = hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(**sizes, projection_dim=width))
        elif backbone.startswith("tips"):
            model = hf.Tipsv2TextModel(hf.Tipsv2TextConfig(**sizes))
        else:
            model = hf.SiglipTextModel(hf.SiglipTextConfig(**sizes, vocab_size=256_000))
    prefix = {"clip": "", "tips": "text_encoder."}.get(backbone[:4], "text_model.")
    named = revert_weight_conversion(model, model.state_dict()) if backbone.startswith("tips") else model.state_dict()
    tensors = {re.sub(r"(layers|resblocks)\.\d+\.", r"\1.*.", prefix + key): list(x.shape) for key, x in named.items()}
    return {"parameters": sum(x.numel() for x in model.parameters()), "tensors": tensors}


def write(folder: Path) -> None:
    content = json.dumps({name: measured(name) for name in FULL}, indent=1)
    compact = re.sub(r"\[\s+([^]]*?)\s+\]", lambda found: f"[{re.sub(chr(10) + ' *', ' ', found[1])}]", content)
    (folder / "text_towers.json").write_text(compact + "\n")
    arrays = {}
    for kind in LENGTHS:
        encoded = tokenized(kind, folder)
        arrays |= {f"{kind}/strings/{key}": x for key, x in encoded.items()} | {f"{kind}/images": prepared(kind)}
        for name in TOWERS:
            if name.startswith(kind):
                arrays |= {f"{name}/{key}": x for key, x in twin(name, encoded).items()}
    np.savez_compressed(folder / "text_towers.npz", **arrays)
