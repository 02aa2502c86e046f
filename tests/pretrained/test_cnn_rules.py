"""Every CNN layout fills every parameter and statistic and uses every tensor of a file."""

import re

import numpy as np
import pytest
from flax import nnx
from helpers.layouts import load_as
from helpers.paths import PARITY
from helpers.tensor_files import values_of, write
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


# Layouts as ordered substitutions on torchvision's names; <n> becomes n − 1, and <<n>> n // 2 (see `renamed`).
HUGGING_FACE_RESNET = (
    (r"^fc\.", "classifier.1."),
    (r"^(conv|bn)1\.", r"resnet.embedder.embedder.\1."),
    (r"^layer(\d)\.(\d)\.", r"resnet.encoder.stages.<\1>.layers.\2."),
    (r"\.downsample\.0\.", ".shortcut.conv."),
    (r"\.downsample\.1\.", ".shortcut.bn."),
    (r"\.(conv|bn)(\d)\.", r".layer.<\2>.\1."),
    (r"\.conv\.", ".convolution."),
    (r"\.bn\.", ".normalization."),
)
CONVNEXT_STAGES = (
    (r"^features\.(\d)\.(\d)\.block\.(\d)", r"stages.<<\1>>.\2.LAYER\3"),
    (r"^features\.(\d)\.(\d)\.layer_scale", r"stages.<<\1>>.\2.SCALE"),
)
ORIGINAL_CONVNEXT = (
    *CONVNEXT_STAGES,
    (r"^features\.(\d)\.(\d)\.", r"downsample_layers.<<\1>>.\2."),
    (r"^classifier\.0", "norm"),
    (r"^classifier\.2", "head"),
    ("LAYER0", "dwconv"),
    ("LAYER2", "norm"),
    ("LAYER3", "pwconv1"),
    ("LAYER5", "pwconv2"),
    ("SCALE", "gamma"),
)
TIMM_CONVNEXT = (
    *CONVNEXT_STAGES,
    (r"^stages\.(<<\d>>)\.(\d)\.", r"stages.\1.blocks.\2."),
    (r"^features\.0\.", "stem."),
    (r"^features\.(\d)\.(\d)\.", r"stages.<<\1>>.downsample.\2."),
    (r"^classifier\.0", "head.norm"),
    (r"^classifier\.2", "head.fc"),
    ("LAYER0", "conv_dw"),
    ("LAYER2", "norm"),
    ("LAYER3", "mlp.fc1"),
    ("LAYER5", "mlp.fc2"),
    ("SCALE", "gamma"),
)
HUGGING_FACE_CONVNEXT = (
    *CONVNEXT_STAGES,
    (r"^stages\.(<<\d>>)\.(\d)\.", r"convnext.encoder.stages.\1.layers.\2."),
    (r"^features\.0\.0", "convnext.embeddings.patch_embeddings"),
    (r"^features\.0\.1", "convnext.embeddings.layernorm"),
    (r"^features\.(\d)\.(\d)\.", r"convnext.encoder.stages.<<\1>>.downsampling_layer.\2."),
    (r"^classifier\.0", "convnext.layernorm"),
    (r"^classifier\.2", "classifier"),
    ("LAYER0", "dwconv"),
    ("LAYER2", "layernorm"),
    ("LAYER3", "pwconv1"),
    ("LAYER5", "pwconv2"),
    ("SCALE", "layer_scale_parameter"),
)


def renamed(tensors: dict[str, np.ndarray], substitutions: tuple[tuple[str, str], ...]) -> dict[str, np.ndarray]:
    """Return tensors with the names of another layout; <n> becomes n − 1 (torchvision counts from 1), <<n>> n // 2."""
    result = {}
    for name, tensor in tensors.items():
        for pattern, replacement in substitutions:
            name = re.sub(pattern, replacement, name)
        name = re.sub(r"<<(\d)>>", lambda match: str(int(match[1]) // 2), name)
        name = re.sub(r"<(\d)>", lambda match: str(int(match[1]) - 1), name)
        result[name] = tensor.reshape(-1) if name.endswith(("gamma", "layer_scale_parameter")) else tensor
    return result


def without(prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def layouts() -> dict[str, tuple[str, dict[str, np.ndarray]]]:
    resnet, convnext = published("resnet"), published("convnext")
    theirs = {
        "hugging_face_resnet": ("resnet", renamed(resnet, HUGGING_FACE_RESNET)),
        "hugging_face_convnext": ("convnext", renamed(convnext, HUGGING_FACE_CONVNEXT)),
    }
    return theirs | {
        "torchvision_resnet": ("resnet", resnet),
        "hugging_face_resnet alone": ("resnet", without("resnet.", theirs["hugging_face_resnet"][1])),
        "torchvision_convnext": ("convnext", convnext),
        "original_convnext": ("convnext", renamed(convnext, ORIGINAL_CONVNEXT)),
        "timm_convnext": ("convnext", renamed(convnext, TIMM_CONVNEXT)),
        "hugging_face_convnext alone": ("convnext", without("convnext.", theirs["hugging_face_convnext"][1])),
    }


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
    loaded = values_of(module)
    assert set(loaded) == set(reference[kind]) == set(report.loaded)
    for path, value in loaded.items():
        np.testing.assert_array_equal(value, reference[kind][path], err_msg=path)
    assert all(n.startswith(("fc.", "classifier.", "head.")) or n.endswith("_tracked") for n in report.unused)


def test_values_come_from_the_right_tensors(reference):
    tensors, values = published("resnet"), reference["resnet"]
    np.testing.assert_array_equal(values["stages/1/0/norm2/var"], tensors["layer2.0.bn2.running_var"])
    np.testing.assert_array_equal(
        values["stages/1/0/shortcut/norm/mean"], tensors["layer2.0.downsample.1.running_mean"]
    )
    np.testing.assert_array_equal(
        values["stages/3/0/conv2/kernel"][2, 0, 5, 7], tensors["layer4.0.conv2.weight"][7, 5, 2, 0]
    )
    tensors, values = published("convnext"), reference["convnext"]
    np.testing.assert_array_equal(
        values["stages/1/blocks/1/layer_scale/gamma"], tensors["features.3.1.layer_scale"][:, 0, 0]
    )
    np.testing.assert_array_equal(values["stages/1/downsample/norm/bias"], tensors["features.2.0.bias"])
    np.testing.assert_array_equal(
        values["stages/2/blocks/0/depthwise/kernel"][6, 1, 0, 9], tensors["features.5.0.block.0.weight"][9, 0, 6, 1]
    )


@pytest.mark.parametrize("kind", ["resnet", "convnext"])
def test_our_own_layout(reference, tmp_path, kind):
    module = empty(kind)
    assert load_weights(module, write(tmp_path / "w.safetensors", reference[kind])).layout == "own_cnn"
    for path, value in values_of(module).items():
        np.testing.assert_array_equal(value, reference[kind][path], err_msg=path)


def test_every_value_of_efficientnet_is_filled_from_its_tensor(tmp_path):
    tensors = below(np.load(PARITY / "efficientnet.npz"), "weights/")
    module = empty("efficientnet")
    report = load_weights(module, write(tmp_path / "w.safetensors", tensors))
    values = values_of(module)
    assert (report.layout, set(report.loaded), report.missing) == ("efficientnet_pytorch", set(values), ())
    assert {name for name in report.unused if not name.endswith(".num_batches_tracked")} == {"_fc.weight", "_fc.bias"}
    assert len(values) + len(report.unused) == len(tensors)
    for path, name in {
        "stem/norm/mean": "_bn0.running_mean",
        "top/norm/var": "_bn1.running_var",
        "blocks/0/depthwise/norm/bias": "_blocks.0._bn1.bias",
        "blocks/3/expand/norm/scale": "_blocks.3._bn0.weight",
        "blocks/8/project/norm/mean": "_blocks.8._bn2.running_mean",
    }.items():
        np.testing.assert_array_equal(values[path], tensors[name], err_msg=path)
    depthwise = values["blocks/4/depthwise/conv/kernel"]
    assert depthwise.shape == (5, 5, 1, 48)
    assert depthwise[3, 1, 0, 7] == tensors["_blocks.4._depthwise_conv.weight"][7, 0, 3, 1]
    assert values["top/conv/kernel"][0, 0, 2, 5] == tensors["_conv_head.weight"][5, 2, 0, 0]


def test_other_networks_of_the_layout_are_refused(refusal, tmp_path):
    tensors = below(np.load(PARITY / "efficientnet.npz"), "weights/")
    with_excitation = tensors | {"_blocks.0._se_reduce.weight": np.ones((4, 8, 1, 1), np.float32)}
    path = write(tmp_path / "w.safetensors", with_excitation)
    assert refusal(load_weights, empty("efficientnet"), path).endswith("tensor _blocks.0._se_reduce.weight is unknown")


def test_each_layout_is_recognized(reference):
    files = {layout: tensors for layout, (_, tensors) in LAYOUTS.items()} | {"own_cnn": reference["resnet"]}
    names = {layout: layout.removesuffix(" alone") for layout in files}
    assert {*names.values(), "efficientnet_pytorch"} == {layout.name for layout in CNN_LAYOUTS}
    for layout, tensors in files.items():
        assert recognize(tensors).name == names[layout]
