"""Every CNN layout fills every parameter and statistic and uses every tensor of a file."""

import numpy as np
import pytest
from flax import nnx
from helpers.layouts import load_as
from helpers.paths import PARITY
from helpers.tensor_files import assert_equal, renamed, values_of, write
from helpers.twins import below

from mlmoe_jax.models.backbones.convnext import ConvNeXt, ConvNeXtShape
from mlmoe_jax.models.backbones.efficientnet import EfficientNetLiteShape
from mlmoe_jax.models.backbones.resnet import ResNet, ResNetShape
from mlmoe_jax.pretrained.load import load_weights, recognize
from mlmoe_jax.pretrained.rules.cnn_names import CNN_LAYOUTS, TORCHVISION_CONVNEXT, TORCHVISION_RESNET

TORCHVISION = {"resnet": TORCHVISION_RESNET, "convnext": TORCHVISION_CONVNEXT}


def empty(kind: str) -> nnx.Module:
    """Return the architecture of the reference model without values."""
    blocks = (1, 2, 1, 1)
    if kind == "resnet":
        return nnx.eval_shape(lambda: ResNet(ResNetShape(blocks, stem=4), rngs=nnx.Rngs(0)))
    if kind == "efficientnet":
        shape = EfficientNetLiteShape((1, 2, 2, 1, 1, 1, 1), (16, 8, 8, 8, 16, 8, 16), stem=8, width=320)
        return nnx.eval_shape(lambda: shape.build(rngs=nnx.Rngs(0)))
    return nnx.eval_shape(lambda: ConvNeXt(ConvNeXtShape(blocks, (8, 12, 16, 24)), rngs=nnx.Rngs(0)))


def published(kind: str) -> dict[str, np.ndarray]:
    """Return the reference tensors with torchvision's names, and a classifier as in published files."""
    stored = np.load(PARITY / f"cnn_{kind}.npz")
    tensors = below(stored, "weights/")
    head = "fc" if kind == "resnet" else "classifier.2"
    return tensors | {f"{head}.weight": np.ones((5, 3), np.float32), f"{head}.bias": np.ones(5, np.float32)}


# Torchvision's names, which count stages from 1 and convolutions too, in the order of their substitution.
HUGGING_FACE_RESNET = (
    (r"^fc\.", "classifier.1."),
    (r"^(conv|bn)1\.", r"resnet.embedder.embedder.\1."),
    (r"\.downsample\.0\.", ".shortcut.conv."),
    (r"\.downsample\.1\.", ".shortcut.bn."),
    *((rf"^layer{n}\.(\d)\.", rf"resnet.encoder.stages.{n - 1}.layers.\1.") for n in range(1, 5)),
    *((rf"\.(conv|bn){n}\.", rf".layer.{n - 1}.\1.") for n in range(1, 4)),
    (r"\.conv\.", ".convolution."),
    (r"\.bn\.", ".normalization."),
)
# Of a ConvNeXt: its stem, what comes between stages, a block, the modules of a block by their place in torchvision's,
# the scale of a layer, and the classifier.
CONVNEXTS = {
    "original_convnext": (
        ("downsample_layers.0.0", "downsample_layers.0.1"),
        ("downsample_layers.{}.{}", "stages.{}.{}"),
        {"0": "dwconv", "2": "norm", "3": "pwconv1", "5": "pwconv2", "layer_scale": "gamma"},
        {"0": "norm", "2": "head"},
    ),
    "timm_convnext": (
        ("stem.0", "stem.1"),
        ("stages.{}.downsample.{}", "stages.{}.blocks.{}"),
        {"0": "conv_dw", "2": "norm", "3": "mlp.fc1", "5": "mlp.fc2", "layer_scale": "gamma"},
        {"0": "head.norm", "2": "head.fc"},
    ),
    "hugging_face_convnext": (
        ("convnext.embeddings.patch_embeddings", "convnext.embeddings.layernorm"),
        ("convnext.encoder.stages.{}.downsampling_layer.{}", "convnext.encoder.stages.{}.layers.{}"),
        {"0": "dwconv", "2": "layernorm", "3": "pwconv1", "5": "pwconv2", "layer_scale": "layer_scale_parameter"},
        {"0": "convnext.layernorm", "2": "classifier"},
    ),
}


def convnext_name(name: str, layout: str) -> str:
    """Return the name of a tensor of torchvision's ConvNeXt in another layout."""
    stem, (between, block), modules, classifier = CONVNEXTS[layout]
    match name.split("."):
        case ["features", "0", place, leaf]:
            return f"{stem[int(place)]}.{leaf}"
        case ["features", number, place, "block", module, leaf]:
            return f"{block.format(int(number) // 2, place)}.{modules[module]}.{leaf}"
        case ["features", number, place, "layer_scale"]:
            return f"{block.format(int(number) // 2, place)}.{modules['layer_scale']}"
        case ["features", number, place, leaf]:
            return f"{between.format(int(number) // 2, place)}.{leaf}"
        case [_, place, leaf]:
            return f"{classifier[place]}.{leaf}"


def convnext(tensors: dict[str, np.ndarray], layout: str) -> dict[str, np.ndarray]:
    """Return the tensors of torchvision's ConvNeXt in another layout, where scales have one axis."""
    flat = {name: tensor.reshape(-1) if "layer_scale" in name else tensor for name, tensor in tensors.items()}
    return {convnext_name(name, layout): tensor for name, tensor in flat.items()}


def without(prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def layouts() -> dict[str, tuple[str, dict[str, np.ndarray]]]:
    resnet, torchvision = published("resnet"), published("convnext")
    found = {
        "hugging_face_resnet": ("resnet", renamed(resnet, *HUGGING_FACE_RESNET)),
        "torchvision_resnet": ("resnet", resnet),
        "torchvision_convnext": ("convnext", torchvision),
        **{layout: ("convnext", convnext(torchvision, layout)) for layout in CONVNEXTS},
    }
    for kind in ("resnet", "convnext"):
        found[f"hugging_face_{kind} alone"] = kind, without(f"{kind}.", found[f"hugging_face_{kind}"][1])
    return found


LAYOUTS = layouts()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The values loaded from torchvision's layout, by kind of backbone."""
    values = {}
    for kind, source in TORCHVISION.items():
        module = empty(kind)
        load_as(source, module, write(tmp_path_factory.mktemp(kind) / "w.safetensors", published(kind)))
        values[kind] = values_of(module)
    return values


@pytest.mark.variants("layout")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_fills_every_value(reference, tmp_path, layout):
    kind, tensors = LAYOUTS[layout]
    module = empty(kind)
    report = load_weights(module, write(tmp_path / "w.safetensors", tensors))
    assert report.layout == layout.removesuffix(" alone")
    assert set(report.loaded) == set(reference[kind])
    assert_equal(module, reference[kind])
    assert all(n.startswith(("fc.", "classifier.", "head.")) or n.endswith("_tracked") for n in report.unused)


@pytest.mark.parametrize("kind", ["resnet", "convnext"])
def test_our_own_layout(reference, tmp_path, kind):
    module = empty(kind)
    assert load_weights(module, write(tmp_path / "w.safetensors", reference[kind])).layout == "own_cnn"
    assert_equal(module, reference[kind])


def test_every_value_of_efficientnet_is_filled(tmp_path):
    tensors, module = below(np.load(PARITY / "efficientnet.npz"), "weights/"), empty("efficientnet")
    report = load_weights(module, write(tmp_path / "w.safetensors", tensors))
    assert (report.layout, set(report.loaded), report.missing) == ("efficientnet_pytorch", {*values_of(module)}, ())
    assert {name for name in report.unused if not name.endswith(".num_batches_tracked")} == {"_fc.weight", "_fc.bias"}
    assert len(report.loaded) + len(report.unused) == len(tensors)


def test_each_layout_is_recognized(reference):
    files = {layout: tensors for layout, (_, tensors) in LAYOUTS.items()} | {"own_cnn": reference["resnet"]}
    names = {layout: layout.removesuffix(" alone") for layout in files}
    assert {*names.values(), "efficientnet_pytorch"} == {layout.name for layout in CNN_LAYOUTS}
    for layout, tensors in files.items():
        assert recognize(tensors).name == names[layout]
