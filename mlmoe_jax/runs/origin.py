"""The base of the origins from which a new model gets its values and, for some, its labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ml_collections import ConfigDict

from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.runs.assemble import Parts, assemble


@dataclass(frozen=True)
class Origin:
    """An origin of the values of a new model.

    This base class stands for the pretrained backbone of the config, or for random values if `model.backbone.weights`
    is "none". Subclasses stand for other origins. If `resumes` is True, a training is resumed: its label space and
    checkpoints are in the run folder.
    """

    config: ConfigDict
    resumes: ClassVar[bool] = False

    @property
    def label_space(self) -> LabelSpace | None:
        """The labels of an origin that determines them; None if they are the labels of the training split."""
        return None

    def parts(self, label_space: LabelSpace) -> Parts:
        """Return the model of the config with the values of this origin; UserError if they do not fit the model."""
        return assemble(self.config, label_space)
