"""Runs whose labels have vectors of their names, and the config that adds a further name."""

from dataclasses import replace

import numpy as np

from helpers.name_vectors import drawn_vectors
from helpers.runs import published_config, write_published
from mlmoe_jax.data.labels.graph import as_long_as_glove
from mlmoe_jax.data.labels.space import label_space_of
from mlmoe_jax.runs.assemble import assemble
from mlmoe_jax.runs.folder import RunFolder

NAMES, FURTHER = ("boat", "sea"), ("boat", "dune", "sea")
Q2L = {"model__head__kind": "query", "model__head__decoder__style": "q2l"}
SHARED_EXPERTS = {
    "model__head__kind": "routed_experts",
    "model__head__decoder__style": "independent",
    "model__head__routing__classifier": "shared",
    "model__head__routing__gate_share": "shared",
    "model__head__routing__task_experts": 0,
}
HEADS = {
    "Q2L": Q2L,
    "ML-Decoder": Q2L | {"model__head__decoder__style": "ml_decoder"},
    "shared experts": SHARED_EXPERTS,
    "ML-GCN": {"model__head__kind": "ml_gcn"},
    "cosine": {"model__head__kind": "cosine"},
}
SMALL = {
    "model__head__decoder__width": 8,
    "model__head__decoder__heads": 2,
    "model__head__decoder__hidden": 6,
    "model__head__decoder__encoder_layers": 0,
    "model__head__decoder__decoder_layers": 1,
    "model__head__routing__expert_hidden": 4,
    "model__head__routing__gate_hidden": 4,
    "model__head__graph__hidden": 6,
}


def vectors_of(names):
    """Vectors of names, each of which depends on the name alone."""
    drawn = [drawn_vectors((name,), 8, seed=sum(map(ord, name))).vectors for name in names]
    return replace(drawn_vectors(names, 8), vectors=np.concatenate(drawn))


def write_run(at, assembled=assemble, **changes):
    """Write a run with the labels NAMES, its values by `assembled`; return the config that adds FURTHER to it."""
    vectors = vectors_of(NAMES)
    vectors.write(at / "names.safetensors")
    vectors_of(FURTHER).write(at / "further.safetensors")
    config = published_config(**SMALL, **changes, model__head__names=str(at / "names.safetensors"))
    space = replace(label_space_of(vectors), positives=np.array([3, 4]), images=10)
    if config.model.head.kind == "ml_gcn":
        space = replace(space, vectors=as_long_as_glove(vectors.vectors))
    write_published(RunFolder(at / "run"), config, space, assembled(config, space))
    config.init_from, config.model.head.names = str(at / "run"), str(at / "further.safetensors")
    return config
