"""The authors' files of ML-GCN and ADD-GCN fill whole models, and every tensor of a file is used."""

import re
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY
from safetensors.numpy import save_file

from mlmoe_jax.models.backbones.resnet import ResNet, ResNetShape
from mlmoe_jax.models.heads.graph import ADDGCNHead, MLGCNHead
from mlmoe_jax.models.layers.constants import Constant
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.pretrained.rules.cnn import torchvision_resnet_rules
from mlmoe_jax.pretrained.rules.graph import (
    ADD_GCN,
    ML_GCN,
    SOURCES,
    sequential_resnet_rules,
)

TWINS = np.load(PARITY / "graph_heads.npz")
LABELS, WIDTH, HIDDEN = 6, 32, 24
PLACES = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}
# The tensors of the authors' files besides the ResNet.
KEYS = {
    "ml_gcn": {"A", "gc1.weight", "gc2.weight"},
    "add_gcn": {
        "fc.weight",
        "conv_transform.weight",
        "conv_transform.bias",
        "gcn.static_adj.0.weight",
        "gcn.static_weight.0.weight",
        "gcn.static_weight.0.bias",
        "gcn.conv_global.weight",
        "gcn.conv_global.bias",
        "gcn.bn_global.weight",
        "gcn.bn_global.bias",
        "gcn.bn_global.running_mean",
        "gcn.bn_global.running_var",
        "gcn.bn_global.num_batches_tracked",
        "gcn.conv_create_co_mat.weight",
        "gcn.conv_create_co_mat.bias",
        "gcn.dynamic_weight.weight",
        "gcn.dynamic_weight.bias",
        "mask_mat",
        "last_linear.weight",
        "last_linear.bias",
    },
}


class Model(nnx.Module):
    def __init__(self, name: str):
        rngs = nnx.Rngs(0)
        self.backbone = ResNet(ResNetShape((1, 1), stem=4), rngs=rngs)
        if name == "ml_gcn":
            words, graph = (Constant(np.zeros(shape, np.float32)) for shape in ((LABELS, 12), (LABELS, LABELS)))
            self.head = MLGCNHead(WIDTH, words, graph, hidden=HIDDEN, rngs=rngs)
        else:
            self.head = ADDGCNHead(WIDTH, LABELS, hidden=HIDDEN, rngs=rngs)


def empty(name: str) -> nnx.Module:
    return nnx.eval_shape(lambda: Model(name))


def values_of(module: nnx.Module) -> dict[str, np.ndarray]:
    return {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(module))}


def resnet_tensors() -> dict[str, np.ndarray]:
    """Return random tensors in torchvision's layout for the first two stages of a ResNet with one block each."""
    random = np.random.RandomState(0)
    tensors = {"conv1.weight": (4, 3, 7, 7), **norm("bn1", 4)}
    for stage, into, inner in ((1, 4, 4), (2, 16, 8)):
        block, out = f"layer{stage}.0", 4 * inner
        sizes = {1: (inner, into, 1, 1), 2: (inner, inner, 3, 3), 3: (out, inner, 1, 1)}
        for i, shape in sizes.items():
            tensors |= {f"{block}.conv{i}.weight": shape, **norm(f"{block}.bn{i}", shape[0])}
        tensors |= {f"{block}.downsample.0.weight": (out, into, 1, 1), **norm(f"{block}.downsample.1", out)}
    counter = ".num_batches_tracked"
    return {n: np.array(7) if n.endswith(counter) else random.randn(*shape) for n, shape in tensors.items()}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    vectors = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (width,))
    return {f"{name}.{leaf}": shape for leaf, shape in (vectors | {"num_batches_tracked": ()}).items()}


def head_tensors(name: str) -> dict[str, np.ndarray]:
    prefix = f"{name}/weights/"
    return {key.removeprefix(prefix): TWINS[key] for key in TWINS.files if key.startswith(prefix)}


def published(name: str, *, places: bool = True, before: str = "") -> dict[str, np.ndarray]:
    tensors = head_tensors(name)
    for key, value in resnet_tensors().items():
        module, rest = key.split(".", 1)
        tensors[f"features.{PLACES[module] if places else module}.{rest}"] = value
    return {before + key: value for key, value in tensors.items()}


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    def stored(value):
        return np.ascontiguousarray(value, np.float32 if np.issubdtype(value.dtype, np.floating) else None)

    save_file({name: stored(value) for name, value in tensors.items()}, path)
    return path


@pytest.mark.parametrize("name", ["ml_gcn", "add_gcn"])
@pytest.mark.parametrize(("places", "before"), [(True, ""), (False, "module."), (True, "state_dict.module.")])
def test_every_tensor_fills_its_parameter(name, places, before, tmp_path):
    source = {"ml_gcn": ML_GCN, "add_gcn": ADD_GCN}[name]
    module = empty(name)
    path = write(tmp_path / "w.safetensors", published(name, places=places, before=before))
    report = load_weights(module, path, source=source)
    loaded = values_of(module)
    assert report.source == name
    assert set(report.loaded) == set(loaded)
    allowed = {"A", "mask_mat"}
    assert all(key.endswith("_tracked") or key.removeprefix(before) in allowed for key in report.unused)
    body, head = resnet_tensors(), head_tensors(name)
    expected = {
        "backbone/stem/conv/kernel": body["conv1.weight"].transpose(2, 3, 1, 0),
        "backbone/stem/norm/mean": body["bn1.running_mean"],
        "backbone/stages/1/0/norm2/scale": body["layer2.0.bn2.weight"],
        "backbone/stages/1/0/shortcut/conv/kernel": body["layer2.0.downsample.0.weight"].transpose(2, 3, 1, 0),
        "backbone/stages/0/0/shortcut/norm/var": body["layer1.0.downsample.1.running_var"],
    }
    if name == "ml_gcn":
        expected |= {f"head/gc{i}/kernel": head[f"gc{i}.weight"] for i in (1, 2)}
    else:
        expected |= {
            "head/map_classifier/kernel": head["fc.weight"][:, :, 0, 0].T,
            "head/transform/bias": head["conv_transform.bias"],
            "head/graph/static_graph/kernel": head["gcn.static_adj.0.weight"][:, :, 0].T,
            "head/graph/context_norm/var": head["gcn.bn_global.running_var"],
            "head/graph/context_norm/scale": head["gcn.bn_global.weight"],
            "head/graph/relation/kernel": head["gcn.conv_create_co_mat.weight"][:, :, 0].T,
            "head/graph/dynamic/bias": head["gcn.dynamic_weight.bias"],
            "head/classifier/kernel": head["last_linear.weight"][:, :, 0],
        }
    for target, value in expected.items():
        np.testing.assert_array_equal(loaded[target], np.asarray(value, np.float32), err_msg=target)


@pytest.mark.parametrize("name", ["ml_gcn", "add_gcn"])
def test_the_reference_models_have_the_tensors_of_the_authors_files(name):
    tensors = head_tensors(name)
    assert set(tensors) == KEYS[name]
    if name == "add_gcn":
        assert tensors["fc.weight"].shape == (LABELS, WIDTH, 1, 1)
        assert tensors["gcn.static_adj.0.weight"].shape == (LABELS, LABELS, 1)
        assert tensors["gcn.conv_create_co_mat.weight"].shape == (LABELS, 2 * HIDDEN, 1)


def test_one_marker_recognizes_each_file():
    for name in KEYS:
        assert [source.name for source in SOURCES if source.marker in published(name)] == [name]


def test_a_sequential_resnet_has_a_rule_for_each_of_torchvisions():
    rules, theirs = sequential_resnet_rules(), torchvision_resnet_rules()
    assert [rule.target for rule in rules] == [rule.target for rule in theirs]
    names = ["0.weight", "conv1.weight", "1.running_var", "4.0.conv1.weight", "7.2.bn3.bias", "layer4.2.bn3.bias"]
    for name in names:
        assert sum(re.fullmatch(rule.pattern, name) is not None for rule in rules) == 1, name
    for name in ("2.weight", "3.0.conv1.weight", "8.0.conv1.weight"):
        assert not any(re.fullmatch(rule.pattern, name) for rule in rules), name
