"""Make peft.npz: LoRA, rsLoRA and DoRA of PEFT on small models of transformers (needs torch, transformers and peft).

Stored are the random weights of a DINOv2 and of a ViT (rounded to float16), and for each adapter the two files that
PEFT writes, the logits of two images, and the gradients of Σ logits² / 2 by tensor of the adapter.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

SHAPE = {"width": 16, "depth": 2, "heads": 2, "patch": 7, "native": 28}
LABELS = 3
# name -> the kind of the model, and options of peft.LoraConfig; `layers` are of ours
CASES = {
    "lora": ("dinov2", {"r": 3, "lora_alpha": 5, "layers": ("query", "value")}),
    "rslora": ("vit", {"r": 4, "lora_alpha": 2, "use_rslora": True, "layers": ("key", "output", "fc1", "fc2")}),
    "dora": ("dinov2", {"r": 2, "lora_alpha": 6, "use_dora": True, "layers": ("query", "output", "fc1", "fc2")}),
}
# transformers 5, and the names of transformers 4
NAMES = {
    "query": ("q_proj", "attention.query"),
    "key": ("k_proj", "attention.key"),
    "value": ("v_proj", "attention.value"),
    "output": ("o_proj", "attention.output.dense"),
    "fc1": ("fc1", "intermediate.dense"),
    "fc2": ("fc2", "layer.output.dense"),
}


def images() -> np.ndarray:
    """Return f32[2,28,28,3], equal on every machine."""
    i = np.arange(2 * 28 * 28 * 3)
    return (np.sin(0.37 * i) + 0.5 * np.cos(0.011 * i)).reshape(2, 28, 28, 3).astype(np.float32)


def base(kind: str):
    """Return a classifier of transformers with random weights."""
    import torch
    import transformers as hf

    common = {
        "hidden_size": SHAPE["width"],
        "num_hidden_layers": SHAPE["depth"],
        "num_attention_heads": SHAPE["heads"],
        "image_size": SHAPE["native"],
        "patch_size": SHAPE["patch"],
        "num_labels": LABELS,
    }
    if kind == "dinov2":
        model = hf.Dinov2ForImageClassification(hf.Dinov2Config(**common))
    else:
        vit = hf.ViTConfig(**common, intermediate_size=64, hidden_act="gelu", layer_norm_eps=1e-6)
        model = hf.ViTForImageClassification(vit)
    random = np.random.RandomState(len(kind))
    with torch.no_grad():
        for name, value in sorted(model.state_dict().items()):
            noise = random.standard_normal(tuple(value.shape)) * (0.3 if value.ndim < 2 else 0.25)
            noise += name.endswith(("norm1.weight", "norm2.weight", "norm.weight", "lambda1", "before.weight"))
            if kind == "dinov2" and name == "classifier.weight":
                noise[:, SHAPE["width"] :] = 0  # no part of a class token
            value.copy_(torch.from_numpy(noise.astype(np.float16).astype(np.float32)))
    return model.eval()


def published(kind: str) -> dict[str, np.ndarray]:
    """Return the weights of `base` by their names in a published file."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as folder:
        base(kind).save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def adapted(name: str):
    """Return the model of a case with its adapter, whose values are random."""
    import peft
    import torch

    kind, options = CASES[name]
    options = dict(options)
    model, layers = base(kind), options.pop("layers")
    present = {module for module, _ in model.named_modules()}
    targets = [one for layer in layers for one in NAMES[layer] if any(m.endswith(f".{one}") for m in present)]
    model = peft.get_peft_model(
        model, peft.LoraConfig(**options, target_modules=targets, modules_to_save=["classifier"])
    )
    random = np.random.RandomState(7)
    with torch.no_grad():
        for parameter, value in sorted(model.named_parameters()):
            if "lora_" in parameter:
                noise = torch.from_numpy(random.standard_normal(tuple(value.shape)).astype(np.float32))
                value.copy_(value * (1 + 0.2 * noise) if "magnitude" in parameter else 0.3 * noise)
    return model.eval()


def case(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a case."""
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.numpy import load_file

    model = adapted(name)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        options = json.loads((Path(folder) / "adapter_config.json").read_text())
    options["target_modules"] = sorted(options["target_modules"])  # the order of a set
    del options["peft_version"]
    config = json.dumps(options, sort_keys=True)
    logits = model(torch.from_numpy(images()).permute(0, 3, 1, 2).contiguous()).logits
    (logits.square().sum() / 2).backward()
    for value in model.parameters():
        if value.grad is not None:
            value.data.copy_(value.grad)
    gradients = {key: value.numpy() for key, value in get_peft_model_state_dict(model).items()}
    arrays = {f"adapter/{key}": value for key, value in tensors.items()}
    arrays |= {f"gradient/{key}": gradients[key] for key in tensors}
    return {"config": np.frombuffer(config.encode(), np.uint8), "logits": logits.detach().numpy(), **arrays}


def write(folder: Path) -> None:
    stored = {}
    for kind in ("dinov2", "vit"):
        stored |= {f"{kind}/{key}": value.astype(np.float16) for key, value in published(kind).items()}
    for name in CASES:
        stored |= {f"{name}/{key}": value for key, value in case(name).items()}
    np.savez_compressed(folder / "peft.npz", **stored)
