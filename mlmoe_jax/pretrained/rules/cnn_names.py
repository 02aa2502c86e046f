"""CNN layouts: ResNet (torchvision, timm, Hugging Face), ConvNeXt (also the authors' code), and EfficientNet."""

from functools import partial

from mlmoe_jax.pretrained.rules.base import Layout, Rule, Rules, invertible, linear_rules, norm_rules

COUNTERS = r".*\.num_batches_tracked"  # of BatchNorm, unused here


# [out, in/groups, rows, columns] as PyTorch stores a convolution -> [rows, columns, in/groups, out].
conv_kernel = invertible(lambda tensor: tensor.transpose(2, 3, 1, 0), lambda value: value.transpose(3, 2, 0, 1))
_conv = partial(linear_rules, kernel=conv_kernel)


def batch_norm_rules(pattern: str, target: str) -> Rules:
    """Return the rules of a batch normalization layer: its scale, bias and running statistics."""
    return (
        *norm_rules(pattern, target),
        Rule(rf"{pattern}\.running_mean", f"{target}/mean"),
        Rule(rf"{pattern}\.running_var", f"{target}/var"),
    )


def torchvision_resnet_rules() -> Rules:
    """Return the rules of the ResNets of torchvision and timm, which number stages from 1."""
    rules = [*_conv("conv1", "stem/conv", bias=False), *batch_norm_rules("bn1", "stem/norm")]
    for stage in range(4):
        pattern, target = rf"layer{stage + 1}\.(\d+)", rf"stages/{stage}/\1"
        rules += _conv(rf"{pattern}\.conv([123])", rf"{target}/conv\2", bias=False)
        rules += batch_norm_rules(rf"{pattern}\.bn([123])", rf"{target}/norm\2")
        rules += _conv(rf"{pattern}\.downsample\.0", rf"{target}/shortcut/conv", bias=False)
        rules += batch_norm_rules(rf"{pattern}\.downsample\.1", rf"{target}/shortcut/norm")
    return tuple(rules)


def _hugging_face_resnet() -> Rules:
    pattern, target = r"encoder\.stages\.(\d+)\.layers\.(\d+)", r"stages/\1/\2"
    targets = {
        r"embedder\.embedder": ("stem/conv", "stem/norm"),
        rf"{pattern}\.shortcut": (f"{target}/shortcut/conv", f"{target}/shortcut/norm"),
        **{rf"{pattern}\.layer\.{i}": (f"{target}/conv{i + 1}", f"{target}/norm{i + 1}") for i in range(3)},
    }
    return tuple(
        rule
        for pattern, (conv, norm) in targets.items()
        for rule in (
            *_conv(rf"{pattern}\.convolution", conv, bias=False),
            *batch_norm_rules(rf"{pattern}\.normalization", norm),
        )
    )


def _convnext_block(pattern: str, target: str, names: tuple[str, str, str, str]) -> Rules:
    """Return the rules of a ConvNeXt block without its layer scale. `_convnext` describes `names` as `layers`."""
    depthwise, norm, first, second = (rf"{pattern}\.{name}" for name in names)
    return (
        *_conv(depthwise, f"{target}/depthwise"),
        *norm_rules(norm, f"{target}/norm"),
        *linear_rules(first, f"{target}/mlp/fc1"),
        *linear_rules(second, f"{target}/mlp/fc2"),
    )


def torchvision_convnext_rules() -> Rules:
    """Return the rules of torchvision's ConvNeXt, where downsampling layers and stages alternate in one list."""
    rules = [*_conv(r"features\.0\.0", "stem/conv"), *norm_rules(r"features\.0\.1", "stem/norm")]
    for stage in range(4):
        pattern, target = rf"features\.{2 * stage + 1}\.(\d+)", rf"stages/{stage}/blocks/\1"
        rules += _convnext_block(rf"{pattern}\.block", target, ("0", "2", "3", "5"))
        scale = f"{target}/layer_scale/gamma"
        rules.append(Rule(rf"{pattern}\.layer_scale", scale, lambda tensor: tensor.squeeze((1, 2))))  # [D,1,1]
        if stage:
            pattern, target = rf"features\.{2 * stage}", f"stages/{stage}/downsample"
            rules += [*norm_rules(rf"{pattern}\.0", f"{target}/norm"), *_conv(rf"{pattern}\.1", f"{target}/conv")]
    return (*rules, *norm_rules(r"classifier\.0", "norm"))


def _convnext(
    *, stem: tuple[str, str], down: str, block: str, layers: tuple[str, str, str, str], scale: str, norm: str
) -> Rules:
    """Return the rules of a ConvNeXt layout that numbers stages from 0.

    Args:
      stem: names of the two layers of the stem.
      down: regex of a downsampling layer, with the stage as its group.
      block: regex of a block, with the stage and the block as its groups.
      layers: names of the depthwise convolution, the LayerNorm and the two linear layers.
      scale: name of the layer scale.
      norm: name of the last norm.
    """
    return (
        *_conv(stem[0], "stem/conv"),
        *norm_rules(stem[1], "stem/norm"),
        *norm_rules(rf"{down}\.0", r"stages/\1/downsample/norm"),
        *_conv(rf"{down}\.1", r"stages/\1/downsample/conv"),
        *_convnext_block(block, r"stages/\1/blocks/\2", layers),
        Rule(rf"{block}\.{scale}", r"stages/\1/blocks/\2/layer_scale/gamma"),
        *norm_rules(norm, "norm"),
    )


_ORIGINAL_CONVNEXT = _convnext(
    stem=(r"downsample_layers\.0\.0", r"downsample_layers\.0\.1"),
    down=r"downsample_layers\.([1-3])",
    block=r"stages\.(\d+)\.(\d+)",
    layers=("dwconv", "norm", "pwconv1", "pwconv2"),
    scale="gamma",
    norm="norm",
)
_TIMM_CONVNEXT = _convnext(
    stem=(r"stem\.0", r"stem\.1"),
    down=r"stages\.(\d+)\.downsample",
    block=r"stages\.(\d+)\.blocks\.(\d+)",
    layers=("conv_dw", "norm", r"mlp\.fc1", r"mlp\.fc2"),
    scale="gamma",
    norm=r"head\.norm",
)
_HUGGING_FACE_CONVNEXT = _convnext(
    stem=(r"embeddings\.patch_embeddings", r"embeddings\.layernorm"),
    down=r"encoder\.stages\.(\d+)\.downsampling_layer",
    block=r"encoder\.stages\.(\d+)\.layers\.(\d+)",
    layers=("dwconv", "layernorm", "pwconv1", "pwconv2"),
    scale="layer_scale_parameter",
    norm="layernorm",
)

TORCHVISION_RESNET = Layout(
    "torchvision_resnet", "layer1.0.conv1.weight", torchvision_resnet_rules(), ignored=(COUNTERS, r"fc\..*")
)
HUGGING_FACE_RESNET = Layout(
    "hugging_face_resnet",
    "embedder.embedder.convolution.weight",
    _hugging_face_resnet(),
    ignored=(COUNTERS, r"classifier\..*"),
)
TORCHVISION_CONVNEXT = Layout(
    "torchvision_convnext", "features.1.0.layer_scale", torchvision_convnext_rules(), ignored=(r"classifier\.2\..*",)
)

# EfficientNet and EfficientNet-Lite in PyTorch (`efficientnet_pytorch`, `efficientnet_lite_pytorch`).
_MBCONV, _OUR_MBCONV = r"_blocks\.(\d+)\.", r"blocks/\1/"
# (convolution, its batch normalization, target path)
_EFFICIENTNET_LAYERS = (
    ("_conv_stem", "_bn0", "stem"),
    (f"{_MBCONV}_expand_conv", f"{_MBCONV}_bn0", f"{_OUR_MBCONV}expand"),
    (f"{_MBCONV}_depthwise_conv", f"{_MBCONV}_bn1", f"{_OUR_MBCONV}depthwise"),
    (f"{_MBCONV}_project_conv", f"{_MBCONV}_bn2", f"{_OUR_MBCONV}project"),
    ("_conv_head", "_bn1", "top"),
)

EFFICIENTNET = Layout(
    "efficientnet_pytorch",
    "_conv_stem.weight",
    tuple(
        rule
        for conv, norm, target in _EFFICIENTNET_LAYERS
        for rule in (*_conv(conv, f"{target}/conv", bias=False), *batch_norm_rules(norm, f"{target}/norm"))
    ),
    ignored=(COUNTERS, r"_fc\..*"),
)

CNN_LAYOUTS = (
    Layout("own_cnn", "stem/conv/kernel", (Rule(r"([^.]+)", r"\1"),)),
    TORCHVISION_RESNET,
    HUGGING_FACE_RESNET,
    TORCHVISION_CONVNEXT,
    Layout("original_convnext", "downsample_layers.0.0.weight", _ORIGINAL_CONVNEXT, ignored=(r"head\..*",)),
    Layout("timm_convnext", "stages.0.blocks.0.conv_dw.weight", _TIMM_CONVNEXT, ignored=(r"head\.fc\..*",)),
    Layout(
        "hugging_face_convnext",
        "embeddings.patch_embeddings.weight",
        _HUGGING_FACE_CONVNEXT,
        ignored=(r"classifier\..*",),
    ),
    EFFICIENTNET,
)
