"""Layouts of whole ML-GCN and ADD-GCN models: a ResNet as a list of modules, and the heads."""

from dataclasses import replace

import numpy as np

from mlmoe_jax.pretrained.rules.base import Rule, Source, nested
from mlmoe_jax.pretrained.rules.cnn import COUNTERS, torchvision_resnet_rules

# The indices of torchvision's modules in Sequential(conv1, bn1, relu, maxpool, layer1, layer2, layer3, layer4).
_INDICES = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}


def pointwise(tensor: np.ndarray) -> np.ndarray:
    """[out, in, 1] or [out, in, 1, 1], a convolution of size 1 -> [in, out]."""
    return tensor.reshape(tensor.shape[:2]).T


def own_classifier(tensor: np.ndarray) -> np.ndarray:
    """[K, D, 1] -> [K, D]."""
    return tensor.squeeze(2)


def sequential_resnet_rules() -> tuple[Rule, ...]:
    """Return torchvision's rules for a ResNet with modules named by their index in a list, or as in torchvision."""
    rules = []
    for rule in torchvision_resnet_rules():
        name, rest = rule.pattern.split(r"\.", 1)
        rules.append(replace(rule, pattern=rf"(?:{_INDICES[name]}|{name})\.{rest}"))
    return tuple(rules)


def _pointwise(pattern: str, target: str, *, bias: bool = True) -> tuple[Rule, ...]:
    weight = Rule(rf"{pattern}\.weight", f"{target}/kernel", pointwise)
    return (weight, Rule(rf"{pattern}\.bias", f"{target}/bias")) if bias else (weight,)


_BACKBONE = nested(sequential_resnet_rules(), r"features\.", "backbone/")

# `A` is the adjacency matrix before normalisation; the model computes its own from the label counts.
ML_GCN = Source(
    "ml_gcn",
    "gc1.weight",
    (*_BACKBONE, Rule(r"gc([12])\.weight", r"head/gc\1/kernel")),
    ignored=(COUNTERS, "A"),
)
ADD_GCN = Source(
    "add_gcn",
    "conv_transform.weight",
    (
        *_BACKBONE,
        *_pointwise("fc", "head/map_classifier", bias=False),
        *_pointwise("conv_transform", "head/transform"),
        *_pointwise(r"gcn\.static_adj\.0", "head/graph/static_graph", bias=False),
        *_pointwise(r"gcn\.static_weight\.0", "head/graph/static"),
        *_pointwise(r"gcn\.conv_global", "head/graph/context"),
        Rule(r"gcn\.bn_global\.weight", "head/graph/context_norm/scale"),
        Rule(r"gcn\.bn_global\.bias", "head/graph/context_norm/bias"),
        Rule(r"gcn\.bn_global\.running_mean", "head/graph/context_norm/mean"),
        Rule(r"gcn\.bn_global\.running_var", "head/graph/context_norm/var"),
        *_pointwise(r"gcn\.conv_create_co_mat", "head/graph/relation"),
        *_pointwise(r"gcn\.dynamic_weight", "head/graph/dynamic"),
        Rule(r"last_linear\.weight", "head/classifier/kernel", own_classifier),
        Rule(r"last_linear\.bias", "head/classifier/bias"),
    ),
    ignored=(COUNTERS, "mask_mat"),
    sorted_labels=True,
)
SOURCES = (ML_GCN, ADD_GCN)
