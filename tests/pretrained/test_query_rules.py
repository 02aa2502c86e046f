"""Checkpoints of Q2L and ML-Decoder fill every parameter and statistic, and every tensor is used."""

import json
import re

import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY
from helpers.query_heads import ml_decoder_head, q2l_head
from helpers.twins import below
from safetensors.numpy import save_file

from mlmoe_jax.models.backbones.resnet import ResNet, ResNetShape
from mlmoe_jax.pretrained.load import SOURCES as OTHERS
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.pretrained.rules.base import INVERSES
from mlmoe_jax.pretrained.rules.query import (
    ML_DECODER,
    ML_DECODER_RESNET,
    Q2L,
    SOURCES,
    label_bias,
    label_kernel,
    pointwise,
    refuse_unknown_backbone,
)

TWINS, RESNET = np.load(PARITY / "query.npz"), np.load(PARITY / "cnn_resnet.npz")
KEYS = json.loads((PARITY / "query_keys.json").read_text())
K, D, HIDDEN, SHAPE = 6, 16, 24, ResNetShape((1, 2, 1, 1), stem=4)


class Whole(nnx.Module):
    """A head and optionally a backbone, under the paths of the rules."""

    def __init__(self, head, backbone=None):
        self.head, self.backbone = head, backbone


def tensors_of(case):
    """Return the reference tensors, with a projection from our tiny ResNet's channels, under the authors' names."""
    prefix = f"{case}/weights/"
    tensors = {n.removeprefix(prefix): TWINS[n].astype(np.float32) for n in TWINS.files if n.startswith(prefix)}
    name = "decoder.embed_standart.weight" if "ml_decoder" in case else "input_proj.weight"
    shape = (D, SHAPE.width, *tensors[name].shape[2:])
    return tensors | {name: np.random.RandomState(0).randn(*shape).astype(np.float32)}


def resnet():
    return below(RESNET, "weights/")


def prefixed(prefix, tensors):
    return {prefix + name: tensor for name, tensor in tensors.items()}


def checkpoint(layout):
    """Return a whole checkpoint of a layout and the module that it fills."""
    if layout == "q2l":
        kept = {name: tensor for name, tensor in resnet().items() if "num_batches" not in name}
        tensors = tensors_of("q2l_projection") | prefixed("backbone.0.body.", kept)
        tensors["backbone.1.pe"] = np.ones((1, D, 3, 5), np.float32)
        head = nnx.eval_shape(lambda: q2l_head(SHAPE.width, K, width=D, hidden=HIDDEN, rngs=nnx.Rngs(0)))
    else:
        tensors = prefixed("fc.", tensors_of("ml_decoder_grouped")) | resnet()
        head = nnx.eval_shape(
            lambda: ml_decoder_head(SHAPE.width, 7, groups=3, width=D, hidden=HIDDEN, rngs=nnx.Rngs(0))
        )
    return tensors, Whole(head, nnx.eval_shape(lambda: ResNet(SHAPE, rngs=nnx.Rngs(0))))


def write(path, tensors):
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
    return path


def values_of(module):
    return {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(module))}


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("source", [Q2L, ML_DECODER_RESNET], ids=lambda source: source.name)
def test_every_tensor_of_a_whole_checkpoint_is_used(source, wrapper, tmp_path):
    tensors, model = checkpoint(source.name)
    report = load_weights(model, write(tmp_path / "w.safetensors", prefixed(wrapper, tensors)), source=source)
    assert report.source == source.name
    assert not report.missing
    assert all(name.endswith(("num_batches_tracked", "backbone.1.pe")) for name in report.unused)
    values, theirs = values_of(model), resnet()
    np.testing.assert_array_equal(values["backbone/stages/1/0/norm2/var"], theirs["layer2.0.bn2.running_var"])
    np.testing.assert_array_equal(values["backbone/stem/norm/scale"], theirs["bn1.weight"])
    if source is Q2L:
        np.testing.assert_array_equal(values["head/classifier/kernel"][2, :, 0], tensors["fc.W"][0, 2])
        np.testing.assert_array_equal(values["head/classifier/bias"], tensors["fc.b"][0])
        np.testing.assert_array_equal(
            values["head/decoder/project/kernel"][9], tensors["input_proj.weight"][:, 9, 0, 0]
        )
        name = "transformer.decoder.layers.1.multihead_attn.in_proj_weight"
        np.testing.assert_array_equal(values["head/decoder/layers/1/cross_attn/qkv/kernel"], tensors[name].T)
        name = "transformer.encoder.layers.0.norm2.bias"
        np.testing.assert_array_equal(values["head/decoder/encoder/0/norm2/bias"], tensors[name])
    else:
        name = "fc.decoder.duplicate_pooling"
        np.testing.assert_array_equal(values["head/classifier/kernel"], tensors[name])
        name = "fc.decoder.layers.0.norm1.weight"
        np.testing.assert_array_equal(values["head/decoder/layers/0/norm1/scale"], tensors[name])


def mapped(source, keys):
    """Return {our path: shape} for the [name, shape] pairs of a source, and the names that match no rule."""
    shapes, left = {}, []
    for name, shape in keys:
        rules = [rule for rule in source.rules if re.fullmatch(rule.pattern, name)]
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
    settings, source = KEYS[listed]["config"], ML_DECODER if "ML-Decoder" in listed else Q2L
    make = ml_decoder_head if source is ML_DECODER else q2l_head
    channels, options = settings["featmap"][1], {"width": settings["d"], "hidden": settings["ffn"]}
    head = nnx.eval_shape(lambda: Whole(make(channels, settings["K"], **options, rngs=nnx.Rngs(0))))
    ours = {"/".join(map(str, path)): tuple(v.shape) for path, v in nnx.to_flat_state(nnx.state(head))}
    shapes, left = mapped(source, KEYS[listed]["keys"])
    assert shapes == ours
    assert all(any(re.fullmatch(pattern, name) for pattern in source.ignored) for name in left)


def test_one_marker_recognizes_each_layout(tmp_path):
    files = {name: checkpoint(name)[0] for name in ("q2l", "ml_decoder_resnet")}
    files["ml_decoder"] = tensors_of("ml_decoder")
    assert set(files) == {source.name for source in SOURCES}
    for layout, tensors in files.items():
        assert [source.name for source in SOURCES if source.marker in tensors] == [layout]
    for source in OTHERS:
        if source not in SOURCES:
            # ML-Decoder's ResNet has torchvision's layout, which is tried after ML-Decoder's
            assert source.marker not in files["q2l"] | files["ml_decoder"]


def test_transforms_and_their_inverses():
    random = np.random.RandomState(0)
    for transform, shape, place, same in (
        (pointwise, (2, 3, 1, 1), (1, 0), (0, 1, 0, 0)),
        (label_kernel, (1, 3, 2), (2, 1, 0), (0, 2, 1)),
        (label_bias, (1, 3), (2,), (0, 2)),
    ):
        tensor = random.randn(*shape)
        assert transform(tensor)[place] == tensor[same]
        np.testing.assert_array_equal(INVERSES[transform](transform(tensor), 1), tensor)
        with pytest.raises(ValueError, match=r"axis|axes|size"):
            transform(np.ones((2, 3, 3, 3)[: len(shape)]))


@pytest.mark.parametrize(
    ("names", "architecture"),
    [
        (["module.backbone.0.body.body.conv1.0.weight", "query_embed.weight"], "TResNet"),
        (["body.conv1.0.weight", "head.decoder.duplicate_pooling"], "TResNet"),
        (["backbone.0.layers.0.blocks.0.attn.relative_position_bias_table"], "Swin Transformer"),
        (["module.backbone.0.stage2.blocks.19.attn.conv_proj_q.conv.weight"], "CvT"),
    ],
)
def test_other_backbones_are_refused_by_name(names, architecture, refusal):
    assert f"weights of a {architecture}" in refusal(refuse_unknown_backbone, names)
