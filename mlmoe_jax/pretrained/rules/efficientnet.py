"""The layout of EfficientNet and EfficientNet-Lite in PyTorch (`efficientnet_pytorch`, `efficientnet_lite_pytorch`)."""

from mlmoe_jax.pretrained.rules.base import Rule, Source
from mlmoe_jax.pretrained.rules.cnn import COUNTERS, batch_norm, conv_kernel

_BLOCK, _OUR_BLOCK = r"_blocks\.(\d+)\.", r"blocks/\1/"
# (convolution, its batch normalization, ours)
_LAYERS = (
    ("_conv_stem", "_bn0", "stem"),
    (f"{_BLOCK}_expand_conv", f"{_BLOCK}_bn0", f"{_OUR_BLOCK}expand"),
    (f"{_BLOCK}_depthwise_conv", f"{_BLOCK}_bn1", f"{_OUR_BLOCK}depthwise"),
    (f"{_BLOCK}_project_conv", f"{_BLOCK}_bn2", f"{_OUR_BLOCK}project"),
    ("_conv_head", "_bn1", "top"),
)

EFFICIENTNET = Source(
    "efficientnet_pytorch",
    "_conv_stem.weight",
    tuple(
        rule
        for conv, norm, ours in _LAYERS
        for rule in (
            Rule(rf"{conv}\.weight", f"{ours}/conv/kernel", conv_kernel),
            *batch_norm(norm, f"{ours}/norm"),
        )
    ),
    ignored=(COUNTERS, r"_fc\..*"),
)

SOURCES = (EFFICIENTNET,)
