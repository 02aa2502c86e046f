"""Checkpoints of Q2L, ML-Decoder, ML-GCN and ADD-GCN as `config.init_from`."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from mlmoe_jax.config import load_config
from mlmoe_jax.data.labels.space import LabelSpace, synthetic_label_space
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.resnet import ResNetShape
from mlmoe_jax.models.build import build_model
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.official import _name_tensors
from mlmoe_jax.pretrained.rules.head_names import ML_DECODER_HEAD, Q2L_LAYOUT
from mlmoe_jax.training import initialization
from mlmoe_jax.training.initialization import find_origin

SPACE = synthetic_label_space(4, 2)


def values_of(parts):
    return {path: np.asarray(v) for path, v in {**parts.trainable, **parts.frozen, **parts.stats}.items()}


@pytest.fixture
def tiny_resnet(monkeypatch):
    entry = catalog.CATALOG["resnet101"]
    monkeypatch.setitem(catalog.CATALOG, "resnet101", dataclasses.replace(entry, shape=ResNetShape((1, 1), stem=4)))


def config_of(reference, **overrides):
    config = load_config(reference, [])
    config.model.backbone.weights = "none"
    config.model.head.decoder.update({"width": 0, "heads": 2, "hidden": 16} | overrides)
    return config


@pytest.mark.usefixtures("tiny_vit")
def test_a_head_of_ml_decoder_fits_any_backbone(tmp_path, drawn_parts, capsys):
    config = config_of("ml_decoder_resnet101:dataset=digits")
    values = values_of(drawn_parts(config, SPACE))
    head = {path: value for path, value in values.items() if path.startswith("head/")}
    tensors = _name_tensors(ML_DECODER_HEAD, head)
    assert "decoder.duplicate_pooling" in tensors
    np.savez(tmp_path / "head.npz", **tensors)
    config.init_from = str(tmp_path / "head.npz")
    parts = find_origin(config).parts(SPACE)
    taken = values_of(parts)
    for path, value in head.items():
        np.testing.assert_array_equal(taken[path], value, err_msg=path)
    assert any((taken[path] != values[path]).any() for path in values if path.startswith("backbone/"))
    assert "only a head; the backbone is the pretrained vit_digits" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny_resnet")
def test_a_complete_q2l_fills_backbone_and_head(tmp_path, drawn_parts):
    config = config_of("q2l_resnet101")
    values = values_of(drawn_parts(config, SPACE))
    tensors = _name_tensors(Q2L_LAYOUT, values)
    assert {"backbone.0.body.conv1.weight", "transformer.decoder.layers.1.norm3.bias", "fc.W"} <= set(tensors)
    tensors["backbone.1.pe"] = np.zeros((1, 16, 2, 2), np.float32)
    np.savez(tmp_path / "q2l.npz", **{f"module.{name}": tensor for name, tensor in tensors.items()})
    config.init_from = str(tmp_path / "q2l.npz")
    for path, value in values_of(find_origin(config).parts(SPACE)).items():
        np.testing.assert_array_equal(value, values[path], err_msg=path)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_resnet")
def test_alphabetical_labels_of_add_gcn_are_matched_by_name():
    """The reordered head gives the scores of the original head, which is in alphabetical order."""
    names = ("person", "car", "bird", "dog")  # ours; sorted: bird, car, dog, person
    config = config_of("addgcn_resnet101")
    config.model.head.graph.hidden = 8
    counts = np.zeros((4, 4), np.int64)
    space = LabelSpace(names, counts, np.ones(4, np.int64), 4, np.zeros(4, np.int32), np.zeros(4, np.int32))
    model = nnx.eval_shape(lambda: build_model(config, space, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0)
    nnx.update(model, jax.tree.map(lambda x: jax.numpy.asarray(draw.normal(size=x.shape), x.dtype), nnx.state(model)))
    definition, params, stats = ModelDef.split(model)
    stats = {path: np.abs(value) + 0.5 for path, value in stats.items()}
    image = draw.normal(size=(2, 32, 32, 3)).astype(np.float32)
    theirs = jax.jit(lambda params: definition.merge(params, stats)(image).logits)
    before = theirs(params)
    model = definition.merge(params, stats)
    initialization._reorder(model, names)
    _, moved, _ = ModelDef.split(model)
    places = [sorted(names).index(name) for name in names]
    np.testing.assert_allclose(theirs(moved), before[:, np.array(places)], rtol=2e-4, atol=2e-4)
