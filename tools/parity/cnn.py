"""Make cnn_resnet.npz and cnn_convnext.npz: small random twins of ResNet and ConvNeXt (needs torch and transformers).

The twins are those of `transformers`; their weights are stored under torchvision's names. Where torchvision itself is
importable, it is checked to give the same numbers from these names.
"""

import re
from pathlib import Path

import numpy as np
import torch
from transformers import ConvNextConfig, ConvNextModel, ResNetConfig, ResNetModel

from tools.parity._values import randomise

RESNET = {"blocks": (1, 2, 1, 1), "stem": 4}
CONVNEXT = {"blocks": (1, 2, 1, 1), "widths": (8, 12, 16, 24)}
IMAGES = ((1, 64, 64), (2, 33, 39), (1, 45, 66))
TRAINING_BATCHES = (3, 3, 33, 34)
GRADIENTS = (
    "conv1.weight",
    "bn1.weight",
    "bn1.bias",
    "layer1.0.conv3.weight",
    "layer2.1.bn2.weight",
    "layer2.0.downsample.0.weight",
    "layer2.0.downsample.1.bias",
    "layer2.1.conv2.weight",
    "layer4.0.bn3.weight",
)


def resnet_twin(blocks, stem):
    widths = [stem * 4 * 2**stage for stage in range(len(blocks))]
    return ResNetModel(ResNetConfig(embedding_size=stem, hidden_sizes=widths, depths=list(blocks)))


def convnext_twin(blocks, widths):
    # transformers gives the last norm another epsilon than the authors and torchvision do.
    return ConvNextModel(ConvNextConfig(hidden_sizes=list(widths), depths=list(blocks), layer_norm_eps=1e-6))


def torchvision_name(name):
    """Return torchvision's name of a tensor of either twin."""
    name = re.sub(r"^embedder\.embedder\.convolution", "conv1", name)
    name = re.sub(r"^embedder\.embedder\.normalization", "bn1", name)
    if match := re.match(r"encoder\.stages\.(\d)\.layers\.(\d)\.(layer\.(\d)|shortcut)\.(\w+)\.(\w+)$", name):
        stage, block, _, number, kind, leaf = match.groups()
        if number is None:
            place = f"downsample.{0 if kind == 'convolution' else 1}"
        else:
            place = f"{'conv' if kind == 'convolution' else 'bn'}{int(number) + 1}"
        return f"layer{int(stage) + 1}.{block}.{place}.{leaf}"

    name = re.sub(r"^embeddings\.patch_embeddings", "features.0.0", name)
    name = re.sub(r"^embeddings\.layernorm", "features.0.1", name)
    name = re.sub(r"^layernorm", "classifier.0", name)
    if match := re.match(r"encoder\.stages\.(\d)\.downsampling_layer\.(.*)", name):
        return f"features.{2 * int(match[1])}.{match[2]}"
    if match := re.match(r"encoder\.stages\.(\d)\.layers\.(\d)\.(\w+)\.?(\w*)", name):
        stage, block, layer, leaf = match.groups()
        place = {"dwconv": "block.0.", "layernorm": "block.2.", "pwconv1": "block.3.", "pwconv2": "block.5."}
        return f"features.{2 * int(stage) + 1}.{block}.{place.get(layer, 'layer_scale')}{leaf}"
    return name


def torchvision_state(model):
    """Return a model's tensors under torchvision's names."""
    tensors = {torchvision_name(name): tensor.detach() for name, tensor in model.state_dict().items()}
    return {n: t.reshape(-1, 1, 1) if n.endswith("layer_scale") else t for n, t in tensors.items()}


def pixels(random, *shape):
    return random.randint(0, 256, (*shape, 3)).astype(np.uint8)


def network_input(image):
    """Turn u8[B,H,W,3] into f32[B,3,H,W] in −1…1."""
    return torch.from_numpy(image.astype(np.float32) / 127.5 - 1).permute(0, 3, 1, 2)


def forward(model):
    """Return weights, images and the maps after the stem and each stage, row-major with channels last."""
    arrays = {}
    for name, tensor in torchvision_state(model).items():
        arrays[f"weights/{name}"] = tensor.numpy().astype(np.float16 if tensor.is_floating_point() else np.int64)
    random = np.random.RandomState(1)
    for shape in IMAGES:
        image, size = pixels(random, *shape), f"{shape[1]}x{shape[2]}"
        arrays[f"image/{size}"] = image
        with torch.no_grad():
            out = model(network_input(image), output_hidden_states=True)
        for index, hidden in enumerate(out.hidden_states):
            arrays[f"map{index}/{size}"] = hidden.permute(0, 2, 3, 1).contiguous().numpy()
        arrays[f"cls/{size}"] = out.pooler_output.flatten(1).numpy()
    return arrays


def gradients(model, image, target):
    """Return the gradients of Σ cls·target, under torchvision's names."""
    model.zero_grad()
    (model(network_input(image)).pooler_output.flatten(1) * target).sum().backward()
    found = {torchvision_name(name): parameter.grad.numpy().copy() for name, parameter in model.named_parameters()}
    return {name: found[name] for name in GRADIENTS}


def training(model):
    """Return three training passes: outputs, the statistics after them, and gradients with and without training."""
    random = np.random.RandomState(2)
    batches = pixels(random, *TRAINING_BATCHES)
    target = torch.from_numpy(random.randn(model.config.hidden_sizes[-1]).astype(np.float32))
    arrays = {"train/image": batches, "train/target": target.numpy()}
    for name, value in gradients(model, batches[0], target).items():
        arrays[f"gradient/eval/{name}"] = value
    model.train()
    with torch.no_grad():
        outputs = [model(network_input(batch)).pooler_output.flatten(1).numpy() for batch in batches]
    arrays["train/cls"] = np.stack(outputs)
    for name, tensor in torchvision_state(model).items():
        if name.endswith(("running_mean", "running_var")):
            arrays[f"after/{name}"] = tensor.numpy().copy()
    for name, value in gradients(model, batches[0], target).items():
        arrays[f"gradient/train/{name}"] = value
    return arrays


def make_resnet():
    model = randomise(resnet_twin(**RESNET), seed=0)
    return forward(model) | training(model)


def make_convnext():
    return forward(randomise(convnext_twin(**CONVNEXT), seed=0))


def check_against_torchvision():
    """Check that torchvision's own modules take the renamed weights and give the twins' numbers."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt
    from torchvision.models.resnet import Bottleneck, ResNet

    blocks, widths = CONVNEXT["blocks"], CONVNEXT["widths"]
    settings = [CNBlockConfig(*three) for three in zip(widths, (*widths[1:], None), blocks, strict=True)]
    twins = (
        # torchvision's ResNet has one width.
        (randomise(resnet_twin((2, 1, 1, 1), 64), 3), ResNet(Bottleneck, [2, 1, 1, 1]), "fc"),
        (randomise(convnext_twin(**CONVNEXT), 3), ConvNeXt(settings, stochastic_depth_prob=0.5), "classifier.2"),
    )
    for twin, theirs, head in twins:
        parent, _, leaf = head.rpartition(".")
        theirs.get_submodule(parent).register_module(leaf, torch.nn.Identity())
        theirs.load_state_dict(torchvision_state(twin))
        for shape in IMAGES:
            image = network_input(pixels(np.random.RandomState(4), *shape))
            with torch.no_grad():
                expected, found = twin(image).pooler_output.flatten(1), theirs.eval()(image)
            assert (expected - found).abs().max() <= 1e-5 * expected.abs().max()


def write(folder: Path) -> None:
    for name, make in (("cnn_resnet", make_resnet), ("cnn_convnext", make_convnext)):
        np.savez_compressed(folder / f"{name}.npz", **make())
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        print("torchvision is not here: its names and numbers were not compared again")
    else:
        check_against_torchvision()
