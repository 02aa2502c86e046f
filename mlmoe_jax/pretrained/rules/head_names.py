"""Layouts of models with a ResNet: Q2L, ML-Decoder (also its head alone), ML-GCN and ADD-GCN."""

from dataclasses import replace
from functools import partial

from mlmoe_jax.pretrained.rules.base import Layout, Rule, Rules, invertible, linear_rules, nest, norm_rules, transpose
from mlmoe_jax.pretrained.rules.cnn_names import COUNTERS, batch_norm_rules, torchvision_resnet_rules

# [out, in, 1, 1] as PyTorch stores a 1×1 convolution -> [in, out].
pointwise = invertible(lambda tensor: tensor.squeeze((2, 3)).T, lambda value: value.T[:, :, None, None])
# [1,K,D] as Q2L stores one weight vector per label -> [K,D,1], K queries with one label each.
label_kernel = invertible(lambda tensor: tensor.squeeze(0)[..., None], lambda value: value.squeeze(-1)[None])
# [1,K] -> [K].
label_bias = invertible(lambda tensor: tensor.squeeze(0), lambda value: value[None])


def attention_rules(pattern: str, target: str) -> Rules:
    """Return the rules of a torch.nn.MultiheadAttention, in which one matrix holds queries, keys and values."""
    return (
        Rule(rf"{pattern}\.in_proj_weight", f"{target}/qkv/kernel", transpose),
        Rule(rf"{pattern}\.in_proj_bias", f"{target}/qkv/bias"),
        *linear_rules(rf"{pattern}\.out_proj", f"{target}/proj"),
    )


def transformer_rules(pattern: str, target: str, **attentions: str) -> Rules:
    """Return the rules of the layers of a torch.nn.TransformerEncoder or TransformerDecoder.

    `pattern` is the regex of the module's name, and `target` its parameter path. `attentions` maps PyTorch's name of
    each attention layer to the name in this package.
    """
    pattern, target = rf"{pattern}\.layers\.(\d+)", rf"{target}/\1"
    return (
        *(
            rule
            for name, own in attentions.items()
            for rule in attention_rules(rf"{pattern}\.{name}", f"{target}/{own}")
        ),
        *linear_rules(rf"{pattern}\.linear([12])", rf"{target}/mlp/fc\2"),
        *norm_rules(rf"{pattern}\.norm([123])", rf"{target}/norm\2"),
    )


_OF_DECODER = {"self_attn": "self_attn", "multihead_attn": "cross_attn"}
_Q2L_RULES = (
    *linear_rules("input_proj", "head/decoder/project", kernel=pointwise),
    Rule(r"query_embed\.weight", "head/decoder/queries"),
    *transformer_rules(r"transformer\.encoder", "head/decoder/encoder", self_attn="attn"),
    *transformer_rules(r"transformer\.decoder", "head/decoder/layers", **_OF_DECODER),
    *norm_rules(r"transformer\.decoder\.norm", "head/decoder/norm"),
    Rule(r"fc\.W", "head/classifier/kernel", label_kernel),
    Rule(r"fc\.b", "head/classifier/bias", label_bias),
)
_ML_DECODER_RULES = (
    *linear_rules(r"decoder\.embed_standart", "head/decoder/project"),
    Rule(r"decoder\.query_embed\.weight", "head/decoder/queries"),
    *transformer_rules("decoder", "head/decoder/layers", **_OF_DECODER),
    Rule(r"decoder\.duplicate_pooling", "head/classifier/kernel"),
    Rule(r"decoder\.duplicate_pooling_bias", "head/classifier/bias"),
)

Q2L_LAYOUT = Layout(
    "q2l",
    "fc.W",
    (*nest(torchvision_resnet_rules(), r"backbone\.0\.body\.", "backbone/"), *_Q2L_RULES),
    # The table of sines for the authors' map size; this package computes the sines for each map size.
    ignored=(COUNTERS, r"backbone\.(?:1|pe)\.pe"),
)
ML_DECODER_HEAD = Layout("ml_decoder", "decoder.duplicate_pooling", _ML_DECODER_RULES)


# ------------------------------------------------------------------------------------------------- ML-GCN and ADD-GCN
# The indices of modules in Sequential(conv1, bn1, relu, maxpool, layer1, layer2, layer3, layer4).
_INDICES = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}


def sequential_resnet_rules() -> Rules:
    """Return the rules of a ResNet whose layers have torchvision's names, or their index in a torch.nn.Sequential."""
    rules = []
    for rule in torchvision_resnet_rules():
        name, rest = rule.pattern.split(r"\.", 1)
        rules.append(replace(rule, pattern=rf"(?:{_INDICES[name]}|{name})\.{rest}"))
    return tuple(rules)


# The kernel of a convolution of size 1, [out, in, 1] or [out, in, 1, 1] -> [in, out].
_pointwise = partial(linear_rules, kernel=lambda tensor: tensor.reshape(tensor.shape[:2]).T)
_BACKBONE = nest(sequential_resnet_rules(), r"features\.", "backbone/")

HEAD_LAYOUTS = (
    Q2L_LAYOUT,
    Layout(
        "ml_decoder_resnet",
        "fc.decoder.duplicate_pooling",
        (*nest(torchvision_resnet_rules(), "", "backbone/"), *nest(_ML_DECODER_RULES, r"fc\.", "")),
        ignored=(COUNTERS,),
    ),
    ML_DECODER_HEAD,
    # `A` is the adjacency matrix before normalization; the model computes it from the label counts.
    Layout(
        "ml_gcn", "gc1.weight", (*_BACKBONE, Rule(r"gc([12])\.weight", r"head/gc\1/kernel")), ignored=(COUNTERS, "A")
    ),
    Layout(
        "add_gcn",
        "conv_transform.weight",
        (
            *_BACKBONE,
            *_pointwise("fc", "head/map_classifier", bias=False),
            *_pointwise("conv_transform", "head/transform"),
            *_pointwise(r"gcn\.static_adj\.0", "head/graph/static_graph", bias=False),
            *_pointwise(r"gcn\.static_weight\.0", "head/graph/static"),
            *_pointwise(r"gcn\.conv_global", "head/graph/context"),
            *batch_norm_rules(r"gcn\.bn_global", "head/graph/context_norm"),
            *_pointwise(r"gcn\.conv_create_co_mat", "head/graph/relation"),
            *_pointwise(r"gcn\.dynamic_weight", "head/graph/dynamic"),
            # One classifier per label, [K, D, 1] -> [K, D].
            Rule(r"last_linear\.weight", "head/classifier/kernel", lambda tensor: tensor.squeeze(2)),
            Rule(r"last_linear\.bias", "head/classifier/bias"),
        ),
        ignored=(COUNTERS, "mask_mat"),
        sorted_labels=True,
    ),
)
