"""A model of label names, without training and without a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlmoe_jax.config as configuration
from mlmoe_jax.config.loading import Overrides, override_pairs
from mlmoe_jax.data.labels.name_vectors import NameVectors, is_vectors_file, read_name_vectors
from mlmoe_jax.data.labels.space import LabelSpace, label_space_of
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.inference.text_encoder import vectors_for
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.runs.assemble import label_axes_for, preprocess_for
from mlmoe_jax.runs.origin import Origin
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.sharding import shard_tree

NOTES = {"step": 0, "kind": "imported", "split": ""}  # of values that are not trained
_STAGES = ("image", "model", "score")  # of a prediction


@dataclass(frozen=True)
class NamesOrigin(Origin):
    """The origin of a model whose labels are the names in the file `model.head.names`.

    The vectors of the names initialize the head. `known` has the vectors. If it is None, `label_space` reads them
    or encodes the names, at its first use.
    """

    known: NameVectors | None = None

    @cached_property
    def label_space(self) -> LabelSpace:
        """The label space of the names. Raises the errors of `vectors_for`."""
        return label_space_of(vectors_for(self.config, self.known))

    def predictor(self, *, ranked: bool = True) -> Predictor:
        """Return the predictor. If `ranked`, it assigns labels by `inference.ranks`, otherwise by `eval.threshold`.

        Raises UserError if the names cannot be encoded, or the vectors do not belong to the backbone.
        """
        config = self.config
        mesh, space, preprocess = setup_jax(config, training=False), self.label_space, preprocess_for(config)
        parts = self.parts(space)
        axes = label_axes_for(parts.definition, len(space.names), mesh)
        run = Run(
            config=config,
            label_space=space,
            preprocess=preprocess,
            definition=parts.definition,
            values=shard_tree(parts.learned, mesh, axes),
            frozen=shard_tree(parts.frozen, mesh, axes),
            mesh=mesh,
            label_axes=axes,
            notes=NOTES,
        )
        limits = dict.fromkeys(space.names, float(config.eval.threshold))
        return Predictor(run, limits, version=f"{config.model.backbone.name} by names", ranked=ranked)


def names_origin(file: str, backbone: str = "", overrides: Overrides = ()) -> NamesOrigin:
    """Return the origin of a model of label names. The names are not encoded yet.

    Args:
      file: a file of vectors, or a list of names.
      backbone: the name of the backbone. It may be "" for a file of vectors, which contains the name.
      overrides: further config keys to set. A prediction must read them.

    Raises:
      UserError: `backbone` is "" for a list, the vectors belong to another backbone, or a key has no effect.
    """
    known = read_name_vectors(file) if is_vectors_file(file) else None
    made_for = known.backbone if known else backbone
    if not made_for:
        raise UserError(f"{file} is a list of names, so the backbone is not known; name it with --backbone")
    if backbone not in ("", made_for):
        raise UserError(f"{file} has vectors for {made_for}, not for --backbone={backbone}; encode the names again")
    pairs = override_pairs(overrides)
    for key in configuration.find_unread(pairs, _STAGES):
        raise UserError(f"--config.{key} has no effect on a prediction by names; leave it out")
    config = configuration.default_config()
    config.model.backbone.name, config.model.head.kind, config.model.head.names = made_for, "cosine", file
    config.data.name = "csv"
    config.data.update(catalog.entry(made_for).images)
    configuration.apply_overrides(config, pairs)
    configuration.validate(config)
    return NamesOrigin(config, known)
