from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY

from mlmoe_jax.data.labels.graph import label_graph
from mlmoe_jax.models.heads.gcn import ADDGCNHead, MLGCNHead
from mlmoe_jax.models.layers.initializers import Constant
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.rules.head_names import own_classifier, pointwise_matrix

TWIN = np.load(PARITY / "graph_heads.npz")
LABELS, WIDTH, HIDDEN = 6, 32, 24
RESNET_101 = 42_500_160  # parameters of the body
# Our paths below the head, and the tensors of ADD-GCN in the authors' code.
ADD_GCN = {
    "map_classifier/kernel": "fc.weight",
    "transform/kernel": "conv_transform.weight",
    "transform/bias": "conv_transform.bias",
    "graph/static_graph/kernel": "gcn.static_adj.0.weight",
    "graph/static/kernel": "gcn.static_weight.0.weight",
    "graph/static/bias": "gcn.static_weight.0.bias",
    "graph/context/kernel": "gcn.conv_global.weight",
    "graph/context/bias": "gcn.conv_global.bias",
    "graph/context_norm/scale": "gcn.bn_global.weight",
    "graph/context_norm/bias": "gcn.bn_global.bias",
    "graph/relation/kernel": "gcn.conv_create_co_mat.weight",
    "graph/relation/bias": "gcn.conv_create_co_mat.bias",
    "graph/dynamic/kernel": "gcn.dynamic_weight.weight",
    "graph/dynamic/bias": "gcn.dynamic_weight.bias",
    "classifier/kernel": "last_linear.weight",
    "classifier/bias": "last_linear.bias",
}
STATISTICS = {
    "graph/context_norm/mean": "gcn.bn_global.running_mean",
    "graph/context_norm/var": "gcn.bn_global.running_var",
}


def ours(path: str, tensor: np.ndarray) -> np.ndarray:
    tensor = tensor.astype(np.float32)
    if tensor.ndim < 3:
        return tensor
    return own_classifier(tensor) if path.startswith("classifier") else pointwise_matrix(tensor)


def features_of(name: str) -> Features:
    maps = TWIN[f"{name}/map"].astype(np.float32)
    return Features(None, None, maps.reshape(*maps.shape[:2], -1).swapaxes(1, 2), maps.shape[2:])


def close(found, expected, about=""):
    assert np.abs(np.asarray(found) - expected).max() <= 2e-5 * np.abs(expected).max(), about


def ml_gcn(words=None, adjacency=None, **options):
    words = TWIN["ml_gcn/words"] if words is None else words
    if adjacency is None:
        adjacency = label_graph(TWIN["ml_gcn/counts"], TWIN["ml_gcn/positives"])
    return MLGCNHead(WIDTH, Constant(words), Constant(adjacency), hidden=HIDDEN, rngs=nnx.Rngs(0), **options)


def add_gcn(**options):
    return ADDGCNHead(WIDTH, LABELS, hidden=HIDDEN, rngs=nnx.Rngs(0), **options)


def ml_gcn_values():
    return {f"gc{i}/kernel": TWIN[f"ml_gcn/weights/gc{i}.weight"].astype(np.float32) for i in (1, 2)}


def add_gcn_values():
    names = ADD_GCN | STATISTICS
    return {path: ours(path, TWIN[f"add_gcn/weights/{name}"]) for path, name in names.items()}


@partial(jax.jit, static_argnums=0)
def logits_of(definition, values, features):
    return definition.merge(values)(features).logits


def run(definition, values, features, *, train=False):
    """Return the prediction, the statistics after it, and the gradients of Σ logits·target, all from one program."""

    @jax.jit
    def compute(values, features, target):
        def loss(values):
            model = definition.merge(values)
            if train:
                model.train()
            prediction = model(features, labels=None, rngs=nnx.Rngs(0) if train else None)
            return jnp.sum(prediction.logits * target), (prediction, definition.read_stats(model))

        (_, rest), gradient = jax.value_and_grad(loss, has_aux=True)(values)
        return *rest, gradient

    name = "add_gcn" if "transform/kernel" in values else "ml_gcn"
    return compute(values, features, TWIN[f"{name}/target"])


def test_ml_gcn_is_the_torch_twin():
    definition, params, stats = ModelDef.split(nnx.eval_shape(ml_gcn))
    assert set(params) == {"gc1/kernel", "gc2/kernel"}
    assert not stats
    prediction, _, gradient = run(definition, ml_gcn_values(), features_of("ml_gcn"))
    close(prediction.logits, TWIN["ml_gcn/logits"])
    assert not prediction.terms
    for i in (1, 2):
        close(gradient[f"gc{i}/kernel"], TWIN[f"ml_gcn/gradient/gc{i}.weight"])


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_add_gcn_is_the_torch_twin(mode):
    definition, params, stats = ModelDef.split(nnx.eval_shape(add_gcn))
    assert set(params) == set(ADD_GCN)
    assert set(stats) == set(STATISTICS)
    prediction, stats, gradient = run(definition, add_gcn_values(), features_of("add_gcn"), train=mode == "train")
    for term in ("map", "graph"):
        close(prediction.terms[term], TWIN[f"add_gcn/{mode}/{term}"], term)
    close(prediction.logits, (TWIN[f"add_gcn/{mode}/map"] + TWIN[f"add_gcn/{mode}/graph"]) / 2)
    for path, name in ADD_GCN.items():
        if (mode, name) == ("train", "gcn.conv_global.bias"):  # the mean of the batch cancels it
            assert np.abs(gradient[path]).max() < 1e-4
        else:
            close(gradient[path], ours(path, TWIN[f"add_gcn/{mode}/gradient/{name}"]), path)
    for path, name in STATISTICS.items():
        after = TWIN[f"add_gcn/after/{name.rpartition('.')[2]}"]
        close(stats[path], after if mode == "train" else add_gcn_values()[path], path)


def test_the_dynamic_graph_is_that_of_the_torch_twin():
    definition, *_ = ModelDef.split(nnx.eval_shape(add_gcn))

    def dynamic(values, patches):
        head = definition.merge(values)
        label_features = head.label_features(patches, head.map_classifier(patches).astype(jnp.float32))
        return head.graph.adjacency(head.graph.spread_static(label_features))

    graph = jax.jit(dynamic)(add_gcn_values(), features_of("add_gcn").patches)
    # our rows are the authors' columns: the weights of all labels for one label
    close(graph, TWIN["add_gcn/eval/dynamic"].swapaxes(1, 2))


@pytest.mark.parametrize(
    ("name", "parameters", "part", "macs"),
    [("ml_gcn", 44_904_512, 0, 80 * 2048), ("add_gcn", 48_165_344, 1, (20 * 80 + 80**2) * 1024)],
)
def test_published_counts(name, parameters, part, macs):
    """With ResNet-101 and COCO's 80 labels; ADD-GCN's 48,171,744 count the fixed identity of 6,400 numbers."""
    words, graph = Constant(np.zeros((80, 300), np.float32)), Constant(np.eye(80, dtype=np.float32))
    heads = {
        "ml_gcn": lambda: MLGCNHead(2048, words, graph, rngs=nnx.Rngs(0)),
        "add_gcn": lambda: ADDGCNHead(2048, 80, rngs=nnx.Rngs(0)),
    }
    head = nnx.eval_shape(heads[name])
    assert sum(v.size for v in ModelDef.split(head)[1].values()) + RESNET_101 == parameters
    assert head.published_macs(20)[part] == macs


def test_initial_values_are_those_of_the_authors_code():
    bounds = {"gc1/kernel": HIDDEN, "gc2/kernel": WIDTH, "graph/relation/kernel": 2 * HIDDEN, "transform/bias": WIDTH}

    @jax.jit  # values that are not returned are not computed
    def drawn():
        values = ModelDef.split(ml_gcn())[1] | ModelDef.split(add_gcn())[1]
        return {path: values[path] for path in bounds}

    for path, values in drawn().items():
        bound = bounds[path] ** -0.5
        assert 0.85 * bound < np.abs(values).max() <= bound, path


@pytest.mark.parametrize("name", ["ml_gcn", "add_gcn"])
def test_half_precision_is_near(name):
    build, values = (ml_gcn, ml_gcn_values()) if name == "ml_gcn" else (add_gcn, add_gcn_values())
    definition, *_ = ModelDef.split(nnx.eval_shape(lambda: build(dtype=jnp.bfloat16)))
    features = features_of(name)
    coarse = Features(None, None, jnp.asarray(features.patches, jnp.bfloat16), features.grid)
    found = logits_of(definition, values, coarse)
    twin = "ml_gcn/logits" if name == "ml_gcn" else "add_gcn/eval/map"
    exact = TWIN[twin] if name == "ml_gcn" else (TWIN[twin] + TWIN["add_gcn/eval/graph"]) / 2
    assert found.dtype == jnp.float32
    assert 1e-4 < np.abs(found - exact).max() / np.abs(exact).max() < 0.03
