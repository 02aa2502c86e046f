"""The PyTorch side of the benchmarks, a process with the protocol of protocol.py:

    python benchmarks/peers/torch_worker.py

It needs torch and, per case, transformers (ViT) or torchvision (ResNet, input pipeline).
"""

from __future__ import annotations

import io
import time
from typing import Any

import protocol
import torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def facts() -> dict[str, Any]:
    """Return versions and the device."""
    packages = protocol.versions("torch", "torchvision", "transformers", "pillow")
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"platform": device().type, "devices": [kind], "threads": torch.get_num_threads(), "packages": packages}


def device_peak() -> int | None:
    """Return the peak of GPU memory in bytes; None on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------- programs
def model_of(case: dict[str, Any]) -> torch.nn.Module:
    """Build the model of a case with random values, on the device."""
    if case["method"] == "ml-vpt":
        from vit import PromptedViT

        model = PromptedViT(case["backbone"], case["resolution"], case["labels"], case["groups"], case["per_group"])
    else:
        import cnn

        build = {"q2l": cnn.QueryClassifier, "dr-moe": cnn.RoutedExperts}[case["method"]]
        model = build(case["labels"], case["resolution"])
    return model.to(device())


def asymmetric(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the asymmetric loss with gamma 2 and 0, as in the training code of ML-VPT and Q2L."""
    p = logits.float().sigmoid()
    with torch.no_grad():
        focus = torch.where(labels > 0, 1.0, p**2)
    correct = torch.where(labels > 0, p, 1 - p)
    return -(focus * correct.clamp(min=1e-5).log()).mean()


def rate(case: dict[str, Any]) -> protocol.Program:
    """Return a square matmul, or an addition of two vectors, as `_rate` in jax_worker.py."""
    size, product = case["size"], case["what"] == "product"
    first = torch.rand((size, size) if product else size, device=device()).to(getattr(torch, case["dtype"]))
    second, output, operation = first.clone(), torch.empty_like(first), torch.mm if product else torch.add
    moved = 3 * first.numel() * first.element_size()
    known = {"flops": 2 * size**3 if product else size, "bytes": moved}
    return protocol.Program(lambda: operation(first, second, out=output), wait, known)


def build(case: dict[str, Any]) -> protocol.Program:
    """Return the program of a case: one step of training, of inference, or the prediction of one encoded image."""
    if case["mode"] == "rate":
        return rate(case)
    torch.manual_seed(0)
    began = time.perf_counter()
    model = model_of(case)
    low = case["dtype"] == "bfloat16"
    if low:  # autocast would cast them in every step
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and not module.weight.requires_grad:
                module.to(torch.bfloat16)
    torch.set_float32_matmul_precision(case.get("float32_products", "highest"))
    mean, std = (torch.tensor(values, device=device()).view(3, 1, 1) for values in (MEAN, STD))
    scale, shift = 1 / (255 * std), mean / std

    def logits_of(image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast(device().type, torch.bfloat16, enabled=low):
            return model(image.permute(0, 3, 1, 2).float() * scale - shift)

    if case["compile"]:
        logits_of = torch.compile(logits_of)
    side = case["resolution"]
    image = torch.randint(0, 256, (case["batch"], side, side, 3), dtype=torch.uint8, device=device())
    labels = torch.randint(0, 2, (case["batch"], case["labels"]), device=device()).float()
    step = {"train": _training, "infer": _inference, "predict": _prediction}[case["mode"]](
        model, logits_of, image, labels
    )
    built = time.perf_counter() - began
    step()  # with case["compile"], the first step compiles
    wait()
    return protocol.Program(
        step, wait, {"build_seconds": built, "compile_seconds": time.perf_counter() - began - built}
    )


def _training(model, logits_of, image, labels):
    """Return a step with AdamW and, except for DR-MoE, the moving average of the trainable parameters."""
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    average = [parameter.detach().clone() for parameter in trainable] if model.averaged else []
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, weight_decay=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = sum(asymmetric(logits, labels) for logits in logits_of(image))
        loss.backward()
        optimizer.step()
        if average:
            torch._foreach_lerp_(average, [parameter.detach() for parameter in trainable], 1e-3)

    return step


def _inference(model, logits_of, image, labels):
    model.eval()

    @torch.inference_mode()
    def step() -> None:
        logits_of(image)[0].float().mean(0).sigmoid()

    return step


def _prediction(model, logits_of, image, labels):
    """Return a step from one encoded image to probabilities on the host."""
    import numpy as np
    from PIL import Image

    model.eval()
    content = protocol.encoded_image()

    @torch.inference_mode()
    def step() -> None:
        opened = Image.open(io.BytesIO(content)).convert("RGB")
        pixels = np.array(opened.resize((image.shape[1],) * 2, Image.Resampling.BILINEAR))
        logits_of(torch.from_numpy(pixels)[None].to(device()))[0].float().mean(0).sigmoid().cpu()

    return step


# ------------------------------------------------------------------------------------------------------- functions
def loader(**options) -> dict[str, float]:
    """Return the speed of a DataLoader; see loader.py."""
    from loader import measure

    return measure(**options)


if __name__ == "__main__":
    protocol.serve(protocol.Session(facts, build, device_peak, [loader]))
