from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY
from helpers.twins import below

from mlmoe_jax.data.labels.graph import label_graph
from mlmoe_jax.models.heads.gcn import ADDGCNHead, MLGCNHead
from mlmoe_jax.models.layers.initializers import Constant
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.load import apply_rules
from mlmoe_jax.pretrained.rules.head_names import HEAD_LAYOUTS

TWIN = np.load(PARITY / "graph_heads.npz")
LABELS, WIDTH, HIDDEN = 6, 32, 24
RESNET_101 = 42_500_160  # parameters of the body
HEADS = {layout.name: layout for layout in HEAD_LAYOUTS}


def stored(name: str, prefix: str = "weights/") -> dict[str, np.ndarray]:
    """Return the arrays of a twin below `prefix` under our paths below the head, by the rules of its layout."""
    tensors = {key: value.astype(np.float32) for key, value in below(TWIN, f"{name}/{prefix}").items()}
    return {path.removeprefix("head/"): x for path, x in apply_rules(Path(name), tensors, HEADS[name]).values.items()}


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
    prediction, _, gradient = run(definition, stored("ml_gcn"), features_of("ml_gcn"))
    close(prediction.logits, TWIN["ml_gcn/logits"])
    assert not prediction.terms
    for path, theirs in stored("ml_gcn", "gradient/").items():
        close(gradient[path], theirs, path)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_add_gcn_is_the_torch_twin(mode):
    definition, params, stats = ModelDef.split(nnx.eval_shape(add_gcn))
    assert stored("add_gcn").keys() == {*params, *stats}
    prediction, found, gradient = run(definition, stored("add_gcn"), features_of("add_gcn"), train=mode == "train")
    for term in ("map", "graph"):
        close(prediction.terms[term], TWIN[f"add_gcn/{mode}/{term}"], term)
    close(prediction.logits, (TWIN[f"add_gcn/{mode}/map"] + TWIN[f"add_gcn/{mode}/graph"]) / 2)
    theirs = stored("add_gcn", f"{mode}/gradient/")
    for path in params:
        if (mode, path) == ("train", "graph/context/bias"):  # the mean of the batch cancels it
            assert np.abs(gradient[path]).max() < 1e-4
        else:
            close(gradient[path], theirs[path], path)
    for path, before in stored("add_gcn").items():
        if path in stats:
            after = TWIN[f"add_gcn/after/running_{path.rpartition('/')[2]}"]
            close(found[path], after if mode == "train" else before, path)


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
    assert head.published_macs(20, 0)[part] == macs
