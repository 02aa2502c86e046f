"""Checkpoints of Q2L, ML-Decoder, ML-GCN and ADD-GCN fill every parameter and statistic, and every tensor is used."""

import json
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
from mlmoe_jax.pretrained.official import load_official
from mlmoe_jax.pretrained.rules.base import INVERSES
from mlmoe_jax.pretrained.rules.cnn_names import torchvision_resnet_rules
from mlmoe_jax.pretrained.rules.head_names import (
    HEAD_LAYOUTS,
    ML_DECODER_HEAD,
    Q2L_LAYOUT,
    label_bias,
    label_kernel,
    pointwise,
    sequential_resnet_rules,
)

QUERY, GRAPH = np.load(PARITY / "query.npz"), np.load(PARITY / "graph_heads.npz")
KEYS = json.loads((PARITY / "query_keys.json").read_text())
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


def small_resnet() -> dict[str, np.ndarray]:
    """Return random tensors in torchvision's layout for the first two stages of a ResNet with one block each."""
    random = np.random.RandomState(0)
    tensors = {"conv1.weight": (4, 3, 7, 7), **norm("bn1", 4)}
    for stage, into, inner in ((1, 4, 4), (2, 16, 8)):
        block, out = f"layer{stage}.0", 4 * inner
        sizes = {1: (inner, into, 1, 1), 2: (inner, inner, 3, 3), 3: (out, inner, 1, 1)}
        for i, shape in sizes.items():
            tensors |= {f"{block}.conv{i}.weight": shape, **norm(f"{block}.bn{i}", shape[0])}
        tensors |= {f"{block}.downsample.0.weight": (out, into, 1, 1), **norm(f"{block}.downsample.1", out)}
    return {name: random.randn(*shape).astype(np.float32) for name, shape in tensors.items()}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{leaf}": (width,) for leaf in ("weight", "bias", "running_mean", "running_var")}


def prefixed(prefix, tensors):
    return {prefix + name: tensor for name, tensor in tensors.items()}


def checkpoint(layout, *, places=True):
    """Return a whole checkpoint of a layout and the module that it fills; places: name modules by their index."""
    if layout in ("ml_gcn", "add_gcn"):
        words, graph = (Constant(np.zeros(shape, np.float32)) for shape in ((K, 12), (K, K)))
        heads = {
            "ml_gcn": lambda: MLGCNHead(SMALL.width, words, graph, hidden=HIDDEN, rngs=nnx.Rngs(0)),
            "add_gcn": lambda: ADDGCNHead(SMALL.width, K, hidden=HIDDEN, rngs=nnx.Rngs(0)),
        }
        tensors = {
            name: tensor.astype(np.float32 if tensor.dtype.kind == "f" else tensor.dtype)
            for name, tensor in below(GRAPH, f"{layout}/weights/").items()
        }
        for name, tensor in small_resnet().items():
            module, rest = name.split(".", 1)
            tensors[f"features.{PLACES[module] if places else module}.{rest}"] = tensor
        return tensors, empty(heads[layout], SMALL)
    if layout == "q2l":
        kept = {name: tensor for name, tensor in resnet().items() if "num_batches" not in name}
        tensors = query_tensors("q2l_projection") | prefixed("backbone.0.body.", kept)
        tensors["backbone.1.pe"] = np.ones((1, D, 3, 5), np.float32)
        return tensors, empty(lambda: q2l_head(SHAPE.width, K, width=D, hidden=HIDDEN, rngs=nnx.Rngs(0)), SHAPE)
    tensors = prefixed("fc.", query_tensors("ml_decoder_grouped")) | resnet()
    return tensors, empty(
        lambda: ml_decoder_head(SHAPE.width, 7, groups=3, width=D, hidden=HIDDEN, rngs=nnx.Rngs(0)), SHAPE
    )


def empty(make_head, shape) -> nnx.Module:
    return nnx.eval_shape(lambda: Whole(make_head(), ResNet(shape, rngs=nnx.Rngs(0))))


# What parameters hold, by layout: path -> a function of the tensors of the file. Two modules of the backbone, too.
EXPECTED = {
    "q2l": {
        "backbone/stages/1/0/norm2/var": lambda t: t["backbone.0.body.layer2.0.bn2.running_var"],
        "backbone/stem/norm/scale": lambda t: t["backbone.0.body.bn1.weight"],
        "head/classifier/kernel": lambda t: t["fc.W"][0, :, :, None],
        "head/classifier/bias": lambda t: t["fc.b"][0],
        "head/decoder/project/kernel": lambda t: t["input_proj.weight"][:, :, 0, 0].T,
        "head/decoder/layers/1/cross_attn/qkv/kernel": lambda t: (
            t["transformer.decoder.layers.1.multihead_attn.in_proj_weight"].T
        ),
        "head/decoder/encoder/0/norm2/bias": lambda t: t["transformer.encoder.layers.0.norm2.bias"],
    },
    "ml_decoder_resnet": {
        "backbone/stages/1/0/norm2/var": lambda t: t["layer2.0.bn2.running_var"],
        "head/classifier/kernel": lambda t: t["fc.decoder.duplicate_pooling"],
        "head/decoder/layers/0/norm1/scale": lambda t: t["fc.decoder.layers.0.norm1.weight"],
    },
    "ml_gcn": {f"head/gc{i}/kernel": lambda t, i=i: t[f"gc{i}.weight"] for i in (1, 2)},
    "add_gcn": {
        "backbone/stem/conv/kernel": lambda t: t["features.0.weight"].transpose(2, 3, 1, 0),
        "backbone/stem/norm/mean": lambda t: t["features.1.running_mean"],
        "backbone/stages/1/0/norm2/scale": lambda t: t["features.5.0.bn2.weight"],
        "backbone/stages/0/0/shortcut/norm/var": lambda t: t["features.4.0.downsample.1.running_var"],
        "head/map_classifier/kernel": lambda t: t["fc.weight"][:, :, 0, 0].T,
        "head/transform/bias": lambda t: t["conv_transform.bias"],
        "head/graph/static_graph/kernel": lambda t: t["gcn.static_adj.0.weight"][:, :, 0].T,
        "head/graph/context_norm/var": lambda t: t["gcn.bn_global.running_var"],
        "head/graph/context_norm/scale": lambda t: t["gcn.bn_global.weight"],
        "head/graph/relation/kernel": lambda t: t["gcn.conv_create_co_mat.weight"][:, :, 0].T,
        "head/graph/dynamic/bias": lambda t: t["gcn.dynamic_weight.bias"],
        "head/classifier/kernel": lambda t: t["last_linear.weight"][:, :, 0],
    },
}
UNUSED = ("num_batches_tracked", "backbone.1.pe", "A", "mask_mat")


@pytest.mark.variants("wrapper", "layout")
@pytest.mark.parametrize("wrapper", ["", "module.", "state_dict.module."])
@pytest.mark.parametrize("layout", EXPECTED)
def test_every_tensor_of_a_whole_checkpoint_is_used(layout, wrapper, tmp_path):
    tensors, model = checkpoint(layout)
    report = load_weights(model, write(tmp_path / "w.safetensors", prefixed(wrapper, tensors)))
    values = values_of(model)
    assert (report.layout, report.missing, set(report.loaded)) == (layout, (), set(values))
    assert all(name.removeprefix(wrapper).endswith(UNUSED) for name in report.unused)
    for path, expected in EXPECTED[layout].items():
        np.testing.assert_array_equal(values[path], expected(tensors), err_msg=path)


@pytest.mark.slow
def test_self_attention_between_labels_is_not_dropped_from_a_checkpoint_of_q2l(tmp_path, refusal):
    tensors, model = checkpoint("q2l")
    random = np.random.RandomState(1)
    shapes = {"in_proj_weight": (3 * D, D), "in_proj_bias": (3 * D,), "out_proj.weight": (D, D), "out_proj.bias": (D,)}
    for layer in (f"transformer.decoder.layers.{number}" for number in range(2)):
        kept = {f"{layer}.self_attn.{name}": shape for name, shape in shapes.items()}
        kept |= {f"{layer}.norm1.{name}": (D,) for name in ("weight", "bias")}
        tensors |= {name: random.randn(*shape).astype(np.float32) for name, shape in kept.items()}
    path = write(tmp_path / "w.safetensors", tensors)
    style = "q2l_self_attention"
    assert refusal(load_official, model, path) == (
        f"{path} (q2l layout) has self-attention between labels; set config.model.head.decoder.style={style}"
    )
    options = {"style": style, "width": D, "hidden": HIDDEN}
    whole = empty(lambda: q2l_head(SHAPE.width, K, rngs=nnx.Rngs(0), **options), SHAPE)
    report = load_official(whole, path)
    assert report.missing == ()
    assert not any("self_attn" in name for name in report.unused)
    np.testing.assert_array_equal(
        values_of(whole)["head/decoder/layers/1/self_attn/qkv/kernel"],
        tensors["transformer.decoder.layers.1.self_attn.in_proj_weight"].T,
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ml_gcn", "add_gcn"])
def test_modules_may_have_the_names_of_torchvision(layout, tmp_path):
    (tensors, model), (named, again) = (checkpoint(layout, places=places) for places in (True, False))
    load_weights(model, write(tmp_path / "places.safetensors", tensors))
    load_weights(again, write(tmp_path / "names.safetensors", named))
    for path, value in values_of(model).items():
        np.testing.assert_array_equal(values_of(again)[path], value, err_msg=path)


def mapped(layout, keys):
    """Return {our path: shape} for the [name, shape] pairs of a layout, and the names that match no rule."""
    shapes, left = {}, []
    for name, shape in keys:
        rules = [rule for rule in layout.rules if re.fullmatch(rule.pattern, name)]
        assert len(rules) <= 1, name
        if rules:
            path = re.fullmatch(rules[0].pattern, name).expand(rules[0].target)
            assert path not in shapes
            assert rules[0].tensor_name(path) == name, "a rule is read both ways"
            shapes[path] = rules[0].transform(np.broadcast_to(np.float32(0), shape)).shape
        else:
            left.append(name)
    return shapes, left


@pytest.mark.parametrize("listed", KEYS)
def test_every_published_key_is_consumed(listed):
    settings, layout = KEYS[listed]["config"], ML_DECODER_HEAD if "ML-Decoder" in listed else Q2L_LAYOUT
    make = ml_decoder_head if layout is ML_DECODER_HEAD else q2l_head
    channels, options = settings["featmap"][1], {"width": settings["d"], "hidden": settings["ffn"]}
    head = nnx.eval_shape(lambda: Whole(make(channels, settings["K"], **options, rngs=nnx.Rngs(0))))
    ours = {"/".join(map(str, path)): tuple(v.shape) for path, v in nnx.to_flat_state(nnx.state(head))}
    shapes, left = mapped(layout, KEYS[listed]["keys"])
    assert shapes == ours
    assert all(any(re.fullmatch(pattern, name) for pattern in layout.ignored) for name in left)


def test_one_marker_recognizes_each_layout():
    files = {layout: checkpoint(layout)[0] for layout in EXPECTED} | {"ml_decoder": query_tensors("ml_decoder")}
    assert set(files) == {layout.name for layout in HEAD_LAYOUTS}
    for name, tensors in files.items():
        assert [layout.name for layout in HEAD_LAYOUTS if layout.marker in tensors] == [name]
    for layout in LAYOUTS:
        if layout not in HEAD_LAYOUTS:
            # ML-Decoder's ResNet has torchvision's layout, which is tried after ML-Decoder's
            assert layout.marker not in files["q2l"] | files["ml_decoder"]


def test_transforms_and_their_inverses():
    random = np.random.RandomState(0)
    for transform, shape, place, same in (
        (pointwise, (2, 3, 1, 1), (1, 0), (0, 1, 0, 0)),
        (label_kernel, (1, 3, 2), (2, 1, 0), (0, 2, 1)),
        (label_bias, (1, 3), (2,), (0, 2)),
    ):
        tensor = random.randn(*shape)
        assert transform(tensor)[place] == tensor[same]
        np.testing.assert_array_equal(INVERSES[transform](transform(tensor)), tensor)
        with pytest.raises(ValueError, match=r"axis|axes|size"):
            transform(np.ones((2, 3, 3, 3)[: len(shape)]))


def test_a_sequential_resnet_has_a_rule_for_each_of_torchvisions():
    rules, theirs = sequential_resnet_rules(), torchvision_resnet_rules()
    assert [rule.target for rule in rules] == [rule.target for rule in theirs]
    names = ["0.weight", "conv1.weight", "1.running_var", "4.0.conv1.weight", "7.2.bn3.bias", "layer4.2.bn3.bias"]
    for name in names:
        assert sum(re.fullmatch(rule.pattern, name) is not None for rule in rules) == 1, name
    for name in ("2.weight", "3.0.conv1.weight", "8.0.conv1.weight"):
        assert not any(re.fullmatch(rule.pattern, name) for rule in rules), name
