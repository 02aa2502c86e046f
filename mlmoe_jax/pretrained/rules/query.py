"""Layouts of query decoders: Q2L on a ResNet, and ML-Decoder's head, alone or on a ResNet."""

import re
from collections.abc import Iterable

from mlmoe_jax.errors import UserError
from mlmoe_jax.pretrained.rules.base import Rule, Source, invertible, linear, nested, norm, transpose
from mlmoe_jax.pretrained.rules.cnn import COUNTERS, torchvision_resnet_rules

# Tensor names that identify an unsupported architecture, among the backbones of published query decoders.
_ELSEWHERE = {
    "TResNet": r"(?:.*\.)?body\.conv1\.(?:0|conv)\.weight",
    "Swin Transformer": r".*\.relative_position_bias_table",
    "CvT": r"(?:.*\.)?stage\d\.blocks\.\d+\.attn\.conv_proj_[qkv]\..*",
}


# [out, in, 1, 1] as PyTorch stores a 1×1 convolution -> [in, out].
pointwise = invertible(lambda tensor: tensor.squeeze((2, 3)).T, lambda value, heads: value.T[:, :, None, None])
# [1,K,D] as Q2L stores one weight vector per label -> [K,D,1], K queries with one label each.
label_kernel = invertible(lambda tensor: tensor.squeeze(0)[..., None], lambda value, heads: value.squeeze(-1)[None])
# [1,K] -> [K].
label_bias = invertible(lambda tensor: tensor.squeeze(0), lambda value, heads: value[None])


def attention(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Return the rules of torch.nn.MultiheadAttention, where one matrix holds queries, keys and values, as in ours."""
    return (
        Rule(rf"{theirs}\.in_proj_weight", f"{ours}/qkv/kernel", transpose),
        Rule(rf"{theirs}\.in_proj_bias", f"{ours}/qkv/bias"),
        *linear(rf"{theirs}\.out_proj", f"{ours}/proj"),
    )


def encoder_rules(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Return the rules of the layers of a torch.nn.TransformerEncoder; theirs, ours: the prefixes of its names."""
    theirs, ours = rf"{theirs}\.layers\.(\d+)", rf"{ours}/\1"
    return (
        *attention(rf"{theirs}\.self_attn", f"{ours}/attn"),
        *linear(rf"{theirs}\.linear([12])", rf"{ours}/mlp/fc\2"),
        *norm(rf"{theirs}\.norm([12])", rf"{ours}/norm\2"),
    )


def decoder_rules(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Return the rules of the layers of a torch.nn.TransformerDecoder; theirs, ours: the prefixes of its names."""
    theirs, ours = rf"{theirs}\.layers\.(\d+)", rf"{ours}/\1"
    return (
        *attention(rf"{theirs}\.self_attn", f"{ours}/self_attn"),
        *attention(rf"{theirs}\.multihead_attn", f"{ours}/cross_attn"),
        *linear(rf"{theirs}\.linear([12])", rf"{ours}/mlp/fc\2"),
        *norm(rf"{theirs}\.norm([123])", rf"{ours}/norm\2"),
    )


_Q2L_HEAD = (
    Rule(r"input_proj\.weight", "head/decoder/project/kernel", pointwise),
    Rule(r"input_proj\.bias", "head/decoder/project/bias"),
    Rule(r"query_embed\.weight", "head/decoder/queries"),
    *encoder_rules(r"transformer\.encoder", "head/decoder/encoder"),
    *decoder_rules(r"transformer\.decoder", "head/decoder/layers"),
    *norm(r"transformer\.decoder\.norm", "head/decoder/norm"),
    Rule(r"fc\.W", "head/classifier/kernel", label_kernel),
    Rule(r"fc\.b", "head/classifier/bias", label_bias),
)
_ML_DECODER_HEAD = (
    *linear(r"decoder\.embed_standart", "head/decoder/project"),
    Rule(r"decoder\.query_embed\.weight", "head/decoder/queries"),
    *decoder_rules("decoder", "head/decoder/layers"),
    Rule(r"decoder\.duplicate_pooling", "head/classifier/kernel"),
    Rule(r"decoder\.duplicate_pooling_bias", "head/classifier/bias"),
)

Q2L = Source(
    "q2l",
    "fc.W",
    (*nested(torchvision_resnet_rules(), r"backbone\.0\.body\.", "backbone/"), *_Q2L_HEAD),
    # The table of sines for the map size that the authors trained on; ours is computed for the size of each map.
    ignored=(COUNTERS, r"backbone\.(?:1|pe)\.pe"),
)
ML_DECODER_RESNET = Source(
    "ml_decoder_resnet",
    "fc.decoder.duplicate_pooling",
    (*nested(torchvision_resnet_rules(), "", "backbone/"), *nested(_ML_DECODER_HEAD, r"fc\.", "")),
    ignored=(COUNTERS,),
)
ML_DECODER = Source("ml_decoder", "decoder.duplicate_pooling", _ML_DECODER_HEAD)
SOURCES = (Q2L, ML_DECODER_RESNET, ML_DECODER)


def refuse_unknown_backbone(names: Iterable[str]) -> None:
    """Raise UserError if the tensor names are those of an unsupported backbone: TResNet, Swin or CvT.

    Most published checkpoints of Q2L and ML-Decoder use these.
    """
    names = tuple(names)
    for architecture, pattern in _ELSEWHERE.items():
        if any(re.fullmatch(pattern, name) for name in names):
            raise UserError(
                f"these are weights of a {architecture}, a backbone that is not supported: choose a checkpoint that "
                "was trained on a ResNet, a ConvNeXt or a ViT"
            )
