"""Models with random values, batches for them, and a model with its compiled steps on one mesh."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from helpers.drawn import drawn
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.models.build import Classifier, build_model
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.models.params import ModelDef, split_trainable
from mlmoe_jax.runs.assemble import Parts
from mlmoe_jax.runtime.sharding import make_mesh, shard_batch
from mlmoe_jax.training.build_steps import build_steps
from mlmoe_jax.training.objective import training_labels
from mlmoe_jax.training.step import TrainState


def drawn_model(config: ConfigDict, space: LabelSpace, *, seed: int = 0, scale: float = 0.3) -> Classifier:
    """Return the model of a config with normally distributed values, without compiling anything."""
    return drawn(lambda: build_model(config, space, rngs=nnx.Rngs(0)), scale, seed)


def drawn_batch(size: int, side: int, labels: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a batch of random square images and random labels, all of them known."""
    draw = np.random.default_rng(seed)
    return {
        "image": draw.integers(0, 256, (size, side, side, 3)).astype(np.uint8),
        "label": draw.integers(0, 2, (size, labels)).astype(np.float32),
        "label_mask": np.ones((size, labels), np.float32),
        "mask": np.ones(size, np.float32),
        "id": np.arange(size, dtype=np.int32),
    }


class Line(nnx.Module):
    """A linear layer on images of 4 × 4 pixels."""

    def __init__(self, labels: int):
        self.head = nnx.Linear(4 * 4 * 3, labels, rngs=nnx.Rngs(0))
        self.head.by_label = False

    def __call__(self, image, *, labels=None, rngs=None):
        return Prediction(self.head(image.reshape(len(image), -1)))


class Bench:
    """A model with the steps that a config builds for it on a mesh.

    Args:
      config: the config.
      model: the model, or its parts. Of a model, `config.trainable` says what is trained.
      labels: their number, or i8[N,K], the label codes of the training split.
      side: the side of the images.
      mesh: None = that of the config.
      preprocess: None = the same for all colors.
    """

    def __init__(
        self,
        config: ConfigDict,
        model: nnx.Module | Parts,
        labels: int | np.ndarray,
        *,
        side: int = 64,
        mesh: Mesh | None = None,
        preprocess: Preprocess | None = None,
    ):
        if isinstance(model, nnx.Module):
            definition, params, stats = ModelDef.split(model)
            model = Parts(definition, *split_trainable(params, config.trainable), stats, frozenset())
        self.parts, self.mesh = model, mesh or make_mesh(config.mesh)
        labels = np.zeros((1, labels), np.int8) if isinstance(labels, int) else labels
        preprocess = preprocess or Preprocess(side, (0.5,) * 3, (0.25,) * 3)
        labels = training_labels(config, labels)
        self.steps = build_steps(config, model, preprocess, self.mesh, labels, total_steps=100)

    def start(self, step: int = 0) -> TrainState:
        """Return the initial state, counted as that before `step`, in new arrays that a step may donate."""
        return self.steps.place(self.steps.initial_state(self.parts).replace(step=jnp.int32(step)))

    def shard(self, batch: dict[str, np.ndarray]) -> dict:
        """Return a batch placed on the mesh."""
        return shard_batch(batch, self.mesh)

    def run(self, batch: dict[str, np.ndarray], steps: int = 1, *, first: int = 0) -> tuple[TrainState, list[dict]]:
        """Return the state after some steps on one batch, and the metrics of each step."""
        state, log = self.start(first), []
        for _ in range(steps):
            state, metrics = self.steps.train_step(state, self.shard(batch))
            log.append(metrics)
        return state, log
