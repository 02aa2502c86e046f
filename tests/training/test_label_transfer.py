"""Transfer of parameters between models with different labels, groups and word vectors."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe_jax.config import load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.partition import LABEL, LABEL_GROUP, WORD_VECTOR
from mlmoe_jax.runs.assemble import abstract_parts
from mlmoe_jax.training.label_transfer import Counterparts, counterparts, transfer_parameters


def values_like(shapes: dict[str, tuple], seed: int) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed)
    return {path: jnp.asarray(draw.normal(size=shape), jnp.float32) for path, shape in shapes.items()}


def test_both_axes_of_a_label_graph_are_matched():
    shapes = {"head/graph/static_graph/kernel": (3, 3), "head/graph/relation/kernel": (2, 3)}
    ours, theirs = values_like(shapes, 1), values_like(shapes, 2)
    axes = {"head/graph/static_graph/kernel": (LABEL, LABEL), "head/graph/relation/kernel": (None, LABEL)}
    match = Counterparts(("b", "x", "a"), ("a", "b", "c"), axes, axes)
    taken, left = transfer_parameters(ours, theirs, match)
    graph, before, source = (np.asarray(v["head/graph/static_graph/kernel"]) for v in (taken, ours, theirs))
    for here, row in enumerate([1, None, 0]):
        for there, column in enumerate([1, None, 0]):
            known = row is not None and column is not None
            assert graph[here, there] == (source[row, column] if known else before[here, there])
    np.testing.assert_array_equal(taken["head/graph/relation/kernel"][:, 0], theirs["head/graph/relation/kernel"][:, 1])
    assert left == {}


def test_entries_after_the_labels_stay_after_them():
    axes = {"head/embedding": (LABEL, None)}
    match = Counterparts(("b", "x", "y"), ("a", "b"), axes, axes)
    ours, theirs = values_like({"head/embedding": (5, 3)}, 1), values_like({"head/embedding": (4, 3)}, 2)
    taken, _ = transfer_parameters(ours, theirs, match)
    embedding, source = np.asarray(taken["head/embedding"]), np.asarray(theirs["head/embedding"])
    np.testing.assert_array_equal(embedding[[0, 3, 4]], source[[1, 2, 3]])
    np.testing.assert_array_equal(embedding[1:3], ours["head/embedding"][1:3])


@pytest.mark.parametrize(
    ("shape", "their_shape", "names", "reason"),
    [
        ((1, 4), (1, 4), ((), ()), ""),  # all labels share one row
        ((1, 4, 3), (1, 4, 3), ((LABEL_GROUP, None, None),) * 2, "without a row per label"),
        ((3, 4), (3, 4), ((LABEL, None), (None, LABEL)), "without a row per label"),
        ((3, 4), (1, 4), ((LABEL, None), ()), "without a row per label"),
        ((3, 4), (2, 5), ((LABEL, None),) * 2, "another shape"),
        ((4, 4), (2, 4), ((LABEL, None),) * 2, "another shape"),  # another number of entries after the labels
        ((3, 4), (2, 4), ((LABEL, None),) * 2, ""),
    ],
)
def test_parameters_without_a_row_per_label_are_not_matched_by_label(shape, their_shape, names, reason):
    path = "head/classifier/kernel"
    ours, theirs = values_like({path: shape}, 1), values_like({path: their_shape}, 2)
    match = Counterparts(("a", "b", "c"), ("b", "c"), *({path: each} for each in names))
    taken, left = transfer_parameters(ours, theirs, match)
    assert left == ({reason: [path]} if reason else {})
    assert (path in taken) == (not reason)


@pytest.mark.parametrize(
    ("reference", "setting", "path"),
    [
        ("drmoe_resnet101:dataset=digits", "routing.gate_share=shared", "head/gates/net/logits/bias"),
        ("mlvpt_digits", "gates_of=group", "head/co/gate/kernel"),
    ],
)
def test_what_all_labels_share_is_not_matched_by_label(reference, setting, path):
    """Even if one of its sides happens to be the number of labels."""
    config = load_config(reference, [tuple(f"model.head.{setting}".split("="))])
    spaces = [replace(synthetic_label_space(3, 3), names=names) for names in (("a", "b", "c"), ("c", "b", "a"))]
    definition = abstract_parts(config, spaces[0]).definition
    match = counterparts(config, spaces[0], config, spaces[1], definition, definition)
    ours, theirs = values_like({path: (3, 3)}, 1), values_like({path: (3, 3)}, 2)
    taken, _ = transfer_parameters(ours, theirs, match)
    np.testing.assert_array_equal(taken[path], theirs[path])


def test_values_without_counterpart_are_listed_on_both_sides():
    paths = {"head/classifier/kernel": (4, 2), "prompts/deep": (1, 2, 4), "backbone/norm/scale": (4,), "here": (1,)}
    ours = values_like(paths, 1)
    theirs = values_like({**paths, "prompts/deep": (1, 3, 4), "there": (1,)}, 2)
    del theirs["here"]
    taken, left = transfer_parameters(ours, theirs, Counterparts(("a", "b"), ("b", "a"), same_head=False))
    assert left == {
        "labels cannot be matched between these heads": ["head/classifier/kernel"],
        "another shape": ["prompts/deep"],
        "missing in the source": ["here"],
        "missing in this model": ["there"],
    }
    assert set(taken) == {"backbone/norm/scale"}
    match = Counterparts(("a", "b"), ("a", "b"), same_head=False, same_groups=False)
    taken, left = transfer_parameters(ours, theirs, match)
    assert set(taken) == {"backbone/norm/scale", "head/classifier/kernel"}, "the same labels in the same order"
    assert left["other groups of prompts"] == ["prompts/deep"]


def test_values_keep_the_type_of_the_model():
    ours = {"backbone/kernel": jnp.zeros(2, jnp.bfloat16)}
    taken, _ = transfer_parameters(ours, {"backbone/kernel": jnp.ones(2)}, Counterparts(("a",), ("a",)))
    assert taken["backbone/kernel"].dtype == jnp.bfloat16


def test_layers_on_other_word_vectors_are_not_transferred():
    axes = {f"head/gc{i}/kernel": (WORD_VECTOR, None) for i in (1, 2)}
    match = Counterparts(("a", "b"), ("b", "c"), axes, axes, same_vectors=False)
    ours, theirs = ({f"head/gc{i}/kernel": jnp.full((2, 2), value) for i in (1, 2)} for value in (0.0, 1.0))
    taken, left = transfer_parameters(ours, theirs, match)
    assert not taken
    assert left == {"other word vectors": ["head/gc1/kernel", "head/gc2/kernel"]}
    assert len(transfer_parameters(ours, theirs, replace(match, same_vectors=True))[0]) == 2
