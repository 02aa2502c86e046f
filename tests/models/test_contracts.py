"""The declarations of every head and every backbone against their behavior."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.name_vectors import drawn_vectors
from helpers.programs import calls
from helpers.prompts import WITHOUT_PROMPTS
from helpers.twins import error
from jax.sharding import AbstractMesh

from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models import partition
from mlmoe_jax.models.adapters.prompts import NoPrompts
from mlmoe_jax.models.backbones.convnext import ConvNeXtShape
from mlmoe_jax.models.backbones.efficientnet import EfficientNetLiteShape
from mlmoe_jax.models.backbones.resnet import ResNetShape
from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.contracts import Head
from mlmoe_jax.models.heads.catalog import HEADS, head_class
from mlmoe_jax.models.macs import count_macs
from mlmoe_jax.models.outputs import Features, Prediction
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.models.partition import LABEL, LABEL_GROUP, PROMPT, WORD_VECTOR, label_axes
from mlmoe_jax.runs.assemble import label_axes_for
from mlmoe_jax.runtime.sharding import make_mesh

D, N, B, LABELS = 12, 4, 2, 17
# name: the kind of head and settings
CASES = {
    "linear": ("linear", {"pool": "both"}),
    "cosine": ("cosine", {}),
    "experts": ("group_experts", {}),
    "gates of groups": ("group_experts", {"gates_of": "group"}),
    "group_linear": ("group_linear", {}),
    "q2l": ("query", {}),
    "ml_decoder": ("query", {"decoder.style": "ml_decoder"}),
    "q2l with self-attention": ("query", {"decoder.style": "q2l_self_attention"}),
    "queries by name": ("query", {"decoder.style": "ml_decoder", "names": "labels.safetensors"}),
    "grouped decoding": ("query", {"decoder.queries": 2, "decoder.style": "ml_decoder"}),
    "dr_moe": ("routed_experts", {}),
    "one gate and classifier": ("routed_experts", {"routing.gate_share": "shared", "routing.classifier": "shared"}),
    "static": ("routed_experts", {"routing.gate": "static"}),
    "mlmoe": ("routed_experts", {"prompts": "group"}),
    "ml_gcn": ("ml_gcn", {}),
    "add_gcn": ("add_gcn", {}),
    "csra": ("csra", {"csra.heads": 2}),
    "pat": ("pat", {}),
    "cnn_rnn": ("cnn_rnn", {}),
}


@functools.cache
def config_of(name: str):
    (kind, settings), config = CASES[name], default_config()
    head, prompts = config.model.head, config.model.prompts
    head.kind, prompts.num_groups, prompts.per_group = kind, 2, 3
    head.decoder.update({"width": 8, "heads": 2, "hidden": 6, "encoder_layers": 1, "decoder_layers": 1})
    head.routing.update({"expert_hidden": 9, "gate_hidden": 10})
    head.graph.update({"hidden": 6, "vector_width": 11})
    head.sequence.update({"embedding": 9, "hidden": 6})
    prompts.kind = settings.get("prompts", "group" if HEADS[kind].needs_group_prompts else "none")
    for key, value in settings.items():
        if key != "prompts":
            node, _, leaf = key.rpartition(".")
            (head[node] if node else head)[leaf] = value
    return config


# By default, each kind of head once, and MLMoE.
DEFAULT = (*{kind: name for name, (kind, _) in reversed(CASES.items())}.values(), "mlmoe")
# Those with dropout.
DEEP = [name for name, (kind, _) in CASES.items() if kind in ("query", "routed_experts", "cnn_rnn")]


def make_head(name: str, dtype=None) -> Head:
    config = config_of(name)
    space = synthetic_label_space(LABELS, config.model.prompts.num_groups)
    if config.model.head.names:
        space = replace(space, name_vectors=drawn_vectors(space.names, 11))
    return head_class(config).from_config(config, D, space, dtype=dtype, rngs=nnx.Rngs(0))


@functools.cache
def abstract_head(name: str) -> Head:
    """Return a head without values, which no test changes."""
    return nnx.eval_shape(lambda: make_head(name))


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    _, params, stats = ModelDef.split(abstract_head(name))
    return {f"head/{path}": x.shape for path, x in {**params, **stats}.items()}


def axis_names(name: str) -> dict[str, tuple]:
    definition, _, _ = ModelDef.split(abstract_head(name))
    return {f"head/{path}": names for path, names in definition.axes().items()}


def test_every_kind_of_head_is_tried():
    assert set(HEADS) == {kind for kind, _ in CASES.values()}


@pytest.mark.variants(name=DEFAULT)
@pytest.mark.parametrize("name", CASES)
def test_a_parameter_names_every_axis_that_grows_with_the_labels(name):
    """The axes named after labels are exactly those with the number of labels, which no other size is."""
    kind, K, grown = CASES[name][0], LABELS, {}
    named, size = axis_names(name), K + 2 if kind == "cnn_rnn" else K
    for path, shape in shapes_of(name).items():
        assert len(named.get(path, shape)) == len(shape), path
        axes = tuple(axis for axis in range(len(shape)) if shape[axis] == size)
        assert label_axes(named.get(path, ())) == axes, path
        if axes:
            grown[path] = axes[0]
    by_label = kind not in ("ml_gcn", "add_gcn", "cnn_rnn") and name != "grouped decoding"
    head = abstract_head(name)
    assert head.by_label == by_label
    definition = ModelDef.split(Classifier(Still(), WITHOUT_PROMPTS, head, final_norm=True, precision="default"))[0]
    mesh = AbstractMesh((1, 1, 2), ("data", "fsdp", "expert"))
    sharded = label_axes_for(definition, K, mesh)
    assert (dict(sharded.axis), sharded.num_labels) == (grown, K) if by_label else sharded is None
    assert label_axes_for(definition, K, AbstractMesh((2, 1, 1), ("data", "fsdp", "expert"))) is None


def test_parameters_name_the_axes_that_depend_on_groups_and_word_vectors():
    named = {name: axis_names(name) for name in ("experts", "gates of groups", "ml_gcn", "grouped decoding")}
    assert named["experts"]["head/bank/up/kernel"] == (PROMPT, None, None)
    assert named["experts"]["head/co/gate/bias"] == (PROMPT, LABEL)
    assert named["gates of groups"]["head/dc/gate/kernel"] == (PROMPT, PROMPT, None)
    assert named["ml_gcn"] == {f"head/gc{i}/kernel": (WORD_VECTOR, None) for i in (1, 2)}
    assert named["grouped decoding"] == {
        "head/decoder/queries": (LABEL_GROUP, None),
        "head/classifier/kernel": (LABEL_GROUP, None, None),
        "head/classifier/bias": (LABEL,),
    }


def features_of(head: Head, images: int, make=lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)) -> Features:
    """Return the features that a head reads, by default without values."""

    def part(name, *shape):
        return make((images, *shape)) if name in head.read else None

    quarters = part("quarters", 4, D)
    attention = {"prompts": make((images, 12, N))} if "prompts" in head.read else {}
    return Features(part("cls", D), part("prompts", 12, D), part("patches", N, D), (2, 2), attention, quarters=quarters)


@functools.cache
def trace(name: str, train: bool = False):
    """Return the program of a head for one image, or in training for B, and its prediction without values."""
    head, images = abstract_head(name), B if train else 1
    definition, state = nnx.split(head)

    def call(state, features):
        merged = nnx.merge(definition, state)
        if not train:
            return merged(features)
        merged.train()
        return merged(features, labels=jnp.ones((images, LABELS)), rngs=nnx.Rngs(0))

    program, prediction = jax.make_jaxpr(call, return_shape=True)(state, features_of(head, images))
    return program.jaxpr, prediction


@pytest.mark.variants(name=DEFAULT)
@pytest.mark.parametrize("name", CASES)
def test_a_head_gives_the_terms_gates_and_attention_that_it_names(name):
    kind, config, head = CASES[name][0], config_of(name), abstract_head(name)
    _, prediction = trace(name)
    assert prediction.logits.shape == (1, LABELS)
    assert {"logits", *prediction.terms} == set(HEADS[kind].terms(config)) | {"logits"}
    assert {gate: weights.shape[-1] for gate, weights in prediction.gates.items()} == {
        gate: len(names) for gate, names in HEADS[kind].gate_entries(config).items()
    }
    definition, state = nnx.split(head)
    maps = jax.eval_shape(lambda state, x: nnx.merge(definition, state).attention(x), state, features_of(head, B))
    assert all(weights.shape == (B, LABELS, N) for weights in maps.values())
    attentive = ("query", "routed_experts", "add_gcn", "csra", "group_experts", "group_linear")
    assert set(maps) == ({"labels"} if kind in attentive else set())


@pytest.mark.variants(name=DEFAULT)
@pytest.mark.parametrize("name", CASES)
def test_a_head_computes_what_it_publishes_and_drops_entries_in_training_only(name):
    kind, head = CASES[name][0], abstract_head(name)
    program, _ = trace(name)
    layers, extra = head.published_macs(N, count_macs(program))
    assert layers > 0
    assert extra >= 0
    queries = 2 if name == "grouped decoding" else LABELS
    norms = {path: p for path, p in ModelDef.split(head)[1].items() if re.match("decoder/.*norm.*/scale", path)}
    assert head.norm_macs(N) == sum(4 * p.size * (N if "encoder" in path else queries) for path, p in norms.items())
    not_computed = (LABELS - 1) * LABELS * 6 if kind == "add_gcn" else 0
    if not kind.startswith("group"):  # which compute the votes of all groups, and select those of a label's
        assert count_macs(program) == layers + extra - head.norm_macs(N) - not_computed
    assert not calls(program, "random_bits")
    assert bool(calls(trace(name, train=True)[0], "random_bits")) == (name in DEEP)


@pytest.mark.variants(name=("ml_decoder", "dr_moe", "add_gcn"))
@pytest.mark.parametrize("name", [*DEEP, "add_gcn"])
def test_half_precision_is_only_internal(name):
    draw = np.random.default_rng(0)
    heads = [drawn(lambda dtype=dtype: make_head(name, dtype=dtype), 0.3) for dtype in (None, jnp.bfloat16)]
    given = features_of(heads[0], B, lambda shape: draw.normal(size=shape).astype(np.float32))
    labels = draw.integers(0, 2, (B, LABELS)).astype(np.float32)
    exact, half = jax.jit(lambda given: [head(given, labels=labels) for head in heads])(given)
    for ours, theirs in zip(jax.tree.leaves(half), jax.tree.leaves(exact), strict=True):
        assert ours.dtype == jnp.float32
        assert error(ours, theirs) < 0.05
    assert error(half.logits, exact.logits) > 1e-4


def test_entries_of_gates_have_names():
    config = load_config("drmoe_resnet101:dataset=digits", [])
    config.model.head.routing.shared_experts, config.model.head.routing.task_experts = 2, 1
    assert head_class(config).gate_entries(config) == {"experts": ["shared 1", "shared 2", "task 1"]}
    one_side = load_config("mlvpt_digits", [("model.prompts.sides", "dc")])
    assert head_class(one_side).gate_entries(one_side) == {"dc": ["expert 1", "expert 2", "expert 3"]}
    without = load_config("vpt", [])
    assert head_class(without).gate_entries(without) == {}


# ------------------------------------------------------------------------------------------------------------ the seam
class Careless(Head):
    """A head that declares itself sharded by label but does not gather its inputs."""

    read, by_label = ("cls",), True

    def __init__(self, gathers: bool):
        self.gathers = gathers

    @classmethod
    def from_config(cls, config, width, space, *, dtype, rngs):
        return cls(gathers=False)

    def __call__(self, features, *, labels=None, rngs=None):
        return Prediction(partition.shard_images(features.cls) if self.gathers else features.cls)

    def published_macs(self, tokens, counted):
        return 0, 0


class Still(nnx.Module):
    """A stand-in for a backbone."""

    def __call__(self, image, prompts=None, **options):
        return Features(image.mean((1, 2)), None, None, (1, 1))


def test_a_head_that_is_sharded_by_label_must_gather_its_inputs(monkeypatch):
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1})
    monkeypatch.setattr(partition, "label_mesh", lambda: mesh)  # as if labels were sharded over it
    image = jnp.ones((2, 4, 4, 3))

    def classify(gathers, by_label=True):
        model = Classifier(Still(), WITHOUT_PROMPTS, Careless(gathers), final_norm=True, precision="default")
        model.head.by_label = by_label
        with partition.use_mesh(mesh):
            return model(image).logits.shape

    with pytest.raises(RuntimeError, match=r"Careless is sharded by label but has not called partition\.shard_images"):
        classify(gathers=False)
    assert classify(gathers=True) == (2, 3)
    assert classify(gathers=False, by_label=False) == (2, 3), "a head whose labels interact is replicated"


# --------------------------------------------------------------------------------------------------------- backbones
SHAPES = {
    "vit": ViTShape(width=16, depth=2, heads=2, patch=14, native=28),
    "resnet": ResNetShape((1, 1), stem=4),
    "convnext": ConvNeXtShape((1, 1), (8, 12)),
    "efficientnet": EfficientNetLiteShape((1, 1, 1, 1, 1, 1, 1), (16, 8, 8, 8, 16, 8, 16), stem=8, width=320),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_properties_of_its_family(name):
    shape, side = SHAPES[name], 70
    assert shape.fits(side) == (name != "convnext")
    backbone = nnx.eval_shape(lambda: shape.build(batch_norm="running", rngs=nnx.Rngs(0)))
    assert backbone.shape == shape
    definition, state = nnx.split(backbone)
    image = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    features = jax.eval_shape(lambda state, x: nnx.merge(definition, state)(x, read=("patches",)), state, image)
    layers, extra, tokens = shape.published_macs(side, NoPrompts)
    assert features.patches.shape == (1, tokens, shape.width)
    assert features.cls is None
    assert (layers > 1e5, extra > 0) == (True, name == "vit")
    assert bool(shape.frozen_rules("frozen")) == (name in ("resnet", "efficientnet"))
    assert shape.frozen_rules("trainable") == ()
