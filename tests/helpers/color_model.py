"""A model whose logits are known: those of an image of one color follow from the color."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from mlmoe_jax.config import default_config
from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.data.prepare import Preprocess
from mlmoe_jax.models.outputs import Prediction
from mlmoe_jax.runs.restore import Run
from mlmoe_jax.runtime.sharding import make_mesh

NAMES = ("red", "green", "blue", "dark")
POSITIVES = (8, 3, 0, 80)  # in training


class ColorModel:
    """Replaces a ModelDef: `red`, `green` and `blue` have the logit (mean of the channel − 100) / 10, `dark` 0.

    The gate `g` gives label k the weights k/4 and the mean of red over 255; `static` is that of the first image. The
    attention of each label over 2 × 2 patches is the mean of red in the patch, if it is asked for. The features are the
    means of the channels.
    """

    bfloat16 = False

    def __init__(self, gates: bool = True):
        self.gates = gates

    def merge(self, values):
        def model(image, return_attention=False):
            mean = image.mean(axis=(1, 2))
            logits = jnp.concatenate([(mean * 255 - 100) / 10, 0 * mean[:, :1]], axis=1) + values["bias"]
            share = jnp.arange(4) / 4 + 0 * mean[:, :1]
            weights = jnp.stack([share, mean[:, :1] + 0 * share], axis=-1)
            gates = {"g": weights, "static": weights[:1]} if self.gates else {}
            if not return_attention:
                return Prediction(logits, gates=gates)
            patches = image[..., 0].reshape(-1, 2, 2, 2, 2).mean(axis=(2, 4)).reshape(-1, 1, 4)
            attention = {"labels": jnp.tile(patches, (1, 4, 1))}
            return Prediction(logits, gates=gates, attention=attention, grid=(2, 2), features=mean)

        return model

    def read_stats(self, model):
        return {}


def make_run(gates: bool = True, bias: float = 0.0, tree: LabelTree = INDEPENDENT) -> Run:
    config = default_config()
    config.data.image_size = 4
    return Run(
        config=config,
        label_space=SimpleNamespace(names=NAMES, positives=np.array(POSITIVES), tree=tree),
        preprocess=Preprocess(4, (0.0,) * 3, (1.0,) * 3),
        definition=ColorModel(gates),
        values={"bias": jnp.full(1, bias)},
        frozen={},
        mesh=make_mesh(config.mesh),
        notes={"step": 7},
    )


HALVES = dict.fromkeys(NAMES, 0.5)


def color(red: int, green: int = 0, blue: int = 0) -> np.ndarray:
    return np.full((4, 4, 3), (red, green, blue), np.uint8)


def expected(red: int, green: int = 0, blue: int = 0) -> list[float]:
    return [1 / (1 + np.exp(-logit)) for logit in (*((c - 100) / 10 for c in (red, green, blue)), 0.0)]
