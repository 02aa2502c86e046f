"""Checkpoints of Q2L, ML-Decoder, ML-GCN and ADD-GCN fill every parameter and statistic, and every tensor is used."""

import functools
import re

import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY
from helpers.query_heads import ml_decoder_head, q2l_head
from helpers.tensor_files import values_of, write
from helpers.twins import below

from mlmoe_jax.models.backbones.resnet import ResNet, ResNetShape
from mlmoe_jax.models.heads.gcn import ADDGCNHead, MLGCNHead
from mlmoe_jax.models.layers.initializers import Constant
from mlmoe_jax.pretrained.load import LAYOUTS, load_weights
from mlmoe_jax.pretrained.official import load_official, official_tensors
from mlmoe_jax.pretrained.rules.cnn_names import torchvision_resnet_rules
from mlmoe_jax.pretrained.rules.head_names import (
    HEAD_LAYOUTS,
    sequential_resnet_rules,
)

QUERY, GRAPH = np.load(PARITY / "query.npz"), np.load(PARITY / "graph_heads.npz")
K, D, HIDDEN, SHAPE = 6, 16, 24, ResNetShape((1, 2, 1, 1), stem=4)
SMALL = ResNetShape((1, 1), stem=4)  # with the 32 channels of the twins of graphs
PLACES = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5}


class Whole(nnx.Module):
    """A head and optionally a backbone, under the paths of the rules."""

    def __init__(self, head, backbone=None):
        self.head, self.backbone = head, backbone


def resnet():
    return below(np.load(PARITY / "cnn_resnet.npz"), "weights/")


def query_tensors(case):
    """Return the reference tensors, with a projection from our tiny ResNet's channels, under the authors' names."""
    tensors = {name: tensor.astype(np.float32) for name, tensor in below(QUERY, f"{case}/weights/").items()}
    name = "decoder.embed_standart.weight" if "ml_decoder" in case else "input_proj.weight"
    shape = (D, SHAPE.width, *tensors[name].shape[2:])
    return tensors | {name: np.random.RandomState(0).randn(*shape).astype(np.float32)}


def prefixed(prefix, tensors):
    return {prefix + name: tensor for name, tensor in tensors.items()}


def checkpoint(layout) -> dict[str, np.ndarray]:
    """Return the tensors of a whole checkpoint of a layout."""
    if layout == "q2l":
        kept = {name: tensor for name, tensor in resnet().items() if "num_batches" not in name}
        positions = {"backbone.1.pe": np.ones((1, D, 3, 5), np.float32)}
        return query_tensors("q2l_projection") | prefixed("backbone.0.body.", kept) | positions
    if layout == "ml_decoder_resnet":
        return prefixed("fc.", query_tensors("ml_decoder_grouped")) | resnet()
    tensors = {
        name: tensor.astype(np.float32 if tensor.dtype.kind == "f" else tensor.dtype)
        for name, tensor in below(GRAPH, f"{layout}/weights/").items()
    }
    for name, tensor in resnet().items():  # its stem and the first block of two stages
        module, rest = name.split(".", 1)
        if re.match(r"conv1|bn1|layer[12]\.0", name):
            tensors[f"features.{PLACES[module]}.{rest}"] = tensor
    return tensors


def model_of(layout, **decoder) -> nnx.Module:
    """Return the model of a layout, without values."""
    words, graph = (Constant(np.zeros(shape, np.float32)) for shape in ((K, 12), (K, K)))
    make, shape = {
        "q2l": (functools.partial(q2l_head, SHAPE.width, K, width=D), SHAPE),
        "ml_decoder_resnet": (functools.partial(ml_decoder_head, SHAPE.width, 7, groups=3, width=D), SHAPE),
        "ml_gcn": (functools.partial(MLGCNHead, SMALL.width, words, graph), SMALL),
        "add_gcn": (functools.partial(ADDGCNHead, SMALL.width, K), SMALL),
    }[layout]

    def whole() -> Whole:
        head = make(hidden=HIDDEN, rngs=nnx.Rngs(0), **decoder)
        return Whole(head, ResNet(shape, rngs=nnx.Rngs(0)))

    return nnx.eval_shape(whole)


LAYOUT_NAMES = ("q2l", "ml_decoder_resnet", "ml_gcn", "add_gcn")
UNUSED = ("num_batches_tracked", "backbone.1.pe", "A", "mask_mat")


@pytest.mark.variants(wrapper=("",), layout=("q2l", "ml_decoder_resnet"))
@pytest.mark.parametrize("wrapper", ["", "module.", "state_dict.module."])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_every_tensor_of_a_whole_checkpoint_is_used(layout, wrapper, tmp_path):
    tensors, model = checkpoint(layout), model_of(layout)
    report = load_weights(model, write(tmp_path / "w.safetensors", prefixed(wrapper, tensors)))
    values = values_of(model)
    assert (report.layout, report.missing, set(report.loaded)) == (layout, (), set(values))
    assert all(name.removeprefix(wrapper).endswith(UNUSED) for name in report.unused)
    if layout != "add_gcn":  # which is only read, and compared in models/test_graph_heads.py
        assert_exported(model, tensors)


def assert_exported(model, tensors):
    """Assert that a model is written as the tensors that it has read."""
    used = {name: tensor for name, tensor in tensors.items() if not name.endswith(UNUSED)}
    written = official_tensors(model)[1]
    assert written.keys() == used.keys()
    for name, tensor in used.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)


@pytest.mark.slow
def test_self_attention_between_labels_is_not_dropped_from_a_checkpoint_of_q2l(tmp_path, refusal):
    tensors = checkpoint("q2l")
    random = np.random.RandomState(1)
    shapes = {"in_proj_weight": (3 * D, D), "in_proj_bias": (3 * D,), "out_proj.weight": (D, D), "out_proj.bias": (D,)}
    for layer in (f"transformer.decoder.layers.{number}" for number in range(2)):
        kept = {f"{layer}.self_attn.{name}": shape for name, shape in shapes.items()}
        kept |= {f"{layer}.norm1.{name}": (D,) for name in ("weight", "bias")}
        tensors |= {name: random.randn(*shape).astype(np.float32) for name, shape in kept.items()}
    path = write(tmp_path / "w.safetensors", tensors)
    style = "q2l_self_attention"
    assert refusal(load_official, model_of("q2l"), path) == (
        f"{path} (q2l layout) has self-attention between labels; set config.model.head.decoder.style={style}"
    )
    whole = model_of("q2l", style=style)
    load_official(whole, path)
    assert_exported(whole, tensors)


def test_one_marker_recognizes_each_layout():
    files = {layout: checkpoint(layout) for layout in LAYOUT_NAMES} | {"ml_decoder": query_tensors("ml_decoder")}
    assert set(files) == {layout.name for layout in HEAD_LAYOUTS}
    for name, tensors in files.items():
        assert [layout.name for layout in HEAD_LAYOUTS if layout.marker in tensors] == [name]
    for layout in LAYOUTS:
        if layout not in HEAD_LAYOUTS:
            # ML-Decoder's ResNet has torchvision's layout, which is tried after ML-Decoder's
            assert layout.marker not in files["q2l"] | files["ml_decoder"]


def test_modules_of_a_resnet_have_the_names_of_torchvision_or_their_places():
    rules, theirs = sequential_resnet_rules(), torchvision_resnet_rules()
    assert [rule.target for rule in rules] == [rule.target for rule in theirs]
    for place, name in {"0": "conv1", "1": "bn1", "4.0.conv1": "layer1.0.conv1", "7.2.bn3": "layer4.2.bn3"}.items():
        (target,) = find(theirs, f"{name}.weight")
        assert find(rules, f"{place}.weight") == find(rules, f"{name}.weight") == [target]
    for name in ("2", "3.0.conv1", "8.0.conv1"):
        assert not find(rules, f"{name}.weight")


def find(rules, name: str) -> list[str]:
    """Return the targets of the rules that match a name."""
    return [rule.target for rule in rules if re.fullmatch(rule.pattern, name)]
