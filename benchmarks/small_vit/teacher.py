"""What the teacher says of views of the photographs: a whole photograph, and crops of it, each at the teacher's size.

A teacher that sees a photograph enlarged to twice its native size says little: at a short side of 512 px, the entropy
of EfficientNet-Lite2's probabilities is 6.7 of ln 1,000 = 6.9 nats; at 260 px, 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from PIL import Image

import mlmoe_jax as mm
from benchmarks.small_vit.crops import WHOLE, Crop, cut, draw_crop
from mlmoe_jax.pretrained.load import read_tensors
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.storage import whole_file

TEACHER, SIDE = "efficientnet_lite2", 260
VIEWS, AREA = 12, (0.35, 1.0)  # of each photograph, and the area of all but the first
COMPONENTS = 256  # of the teacher's features


@dataclass(frozen=True)
class Targets:
    """What the teacher says of V views of each of P photographs.

    maps: f16[P,V,h,w,K], the principal components of the features. The variance of a component is the square root of
    its variance in the features, and 1 on average. mean f32[D], basis f32[K,D]: the features are about
    mean + map @ basis. spread: the standard deviation of the mean of a map. kernel f32[D,C], bias f32[C]: the
    teacher's classifier.
    """

    maps: np.ndarray
    mean: np.ndarray
    basis: np.ndarray
    spread: float
    kernel: np.ndarray
    bias: np.ndarray

    def write(self, path: Path) -> None:
        """Write all of it to a file."""
        with whole_file(epath.Path(path)) as partial, open(partial, "wb") as file:
            np.savez(file, **vars(self))

    @classmethod
    def read(cls, path: Path) -> Targets:
        """Read the file."""
        with np.load(path) as file:
            return cls(**{name: file[name] for name in file.files})


def view(photograph: int, number: int) -> Crop:
    """Return the view of this number, of 0 … VIEWS-1; the first is the whole photograph, and none is flipped."""
    if number == 0:
        return WHOLE
    drawn = draw_crop(np.random.default_rng((1, photograph, number)), AREA)
    return Crop(drawn.top, drawn.left, drawn.height, drawn.width)


def said_by_teacher(images: list[Image.Image], weights: str, path: Path) -> Targets:
    """Return the targets in a file; make it first if there is none."""
    if not path.exists():
        encode(images, weights).write(path)
    return Targets.read(path)


def encode(images: list[Image.Image], weights: str) -> Targets:
    """Run the teacher on all views; the components are those of the features of whole photographs."""
    backbone = mm.load_backbone(TEACHER, weights=weights)
    graph, state = nnx.split(backbone)

    @jax.jit
    def run(state: nnx.State, pixels: jax.Array, mean: jax.Array | None, reduce: jax.Array | None):
        found = nnx.merge(graph, state)(backbone.preprocess(pixels[None]), read=("patches",))
        features = found.patches.reshape(*found.grid, -1)
        return (features if reduce is None else (features - mean) @ reduce).astype(jnp.float16)

    progress = Progress("teacher", VIEWS * len(images), 1)

    def features(number: int, mean: np.ndarray | None = None, reduce: np.ndarray | None = None) -> np.ndarray:
        found = []
        for row, image in enumerate(images):
            found.append(np.asarray(run(state, cut(image, view(row, number), SIDE), mean, reduce)))
            progress.advance()
        return np.stack(found)

    whole = features(0)
    mean, basis, reduce = components(whole.reshape(-1, whole.shape[-1]))
    first = ((whole - mean) @ reduce).astype(np.float16)
    maps = np.stack([first] + [features(number, mean, reduce) for number in range(1, VIEWS)], axis=1)
    progress.close()
    spread = np.std(maps.mean(axis=(2, 3), dtype=np.float32))
    tensors = read_tensors(Path(weights))
    return Targets(maps, mean, basis, float(spread), tensors["_fc.weight"].T, tensors["_fc.bias"])


def components(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean f32[D], the basis f32[K,D], and f32[D,K], which maps centered features f16[n,D] to components."""
    mean, covariance = moments(rows)
    variances, vectors = np.linalg.eigh(covariance)
    kept, vectors = np.maximum(variances[-COMPONENTS:], 1e-6 * variances[-1]), vectors[:, -COMPONENTS:]
    status(f"{COMPONENTS} components have {kept.sum() / variances.sum():.1%} of the variance")
    # Between the features' own scale, where a few components are all of the error, and equal variances.
    scale = kept**0.25
    scale = scale * np.sqrt(np.mean(scale**2))
    return mean, (vectors * scale).T.astype(np.float32), (vectors / scale).astype(np.float32)


def moments(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean f32[D] and the covariance f64[D,D] of f[n,D], without a copy of all rows in another type."""
    mean = rows.mean(axis=0, dtype=np.float64)
    products = np.zeros((len(mean), len(mean)))
    for start in range(0, len(rows), 4096):
        centered = (rows[start : start + 4096] - mean).astype(np.float32)
        products += centered.T @ centered
    return mean.astype(np.float32), products / (len(rows) - 1)
