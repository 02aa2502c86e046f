"""Distill a ViT-Ti/16 at 160 px from EfficientNet-Lite2 on photographs, and compare linear probes on both.

    python -m benchmarks.small_vit --root=/data/VOCdevkit --samples=400000 --out=runs/small_vit

root: a data set in the layout of VOC 2012 with the splits `train` and `val`. Labels are used by the probes only.

The teacher encodes each whole photograph of `train` once, at two sizes. A sample is a random crop: each patch of the
ViT regresses the teacher's features at its place, interpolated between the cells of its map, in the first COMPONENTS
principal components; the class token regresses their mean over the crop, and predicts the teacher's probabilities of
the 1,000 classes of ImageNet for that mean. During the first part of the training, half of the patches are dropped.

The state is saved every few minutes, and the same command goes on where it was stopped. The results are
OUT/results.json and OUT/student.safetensors, the moving average of the ViT's parameters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from PIL import Image
from safetensors.numpy import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.preprocessing import StandardScaler

import mlmoe_jax as mm
from benchmarks.photographs import frequent
from mlmoe_jax.data.sources.voc import open_voc
from mlmoe_jax.data.split import POSITIVE
from mlmoe_jax.models.backbones.entry import IMAGENET_MEAN, IMAGENET_STD
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.pretrained.load import read_tensors
from mlmoe_jax.runtime.large_pages import use_large_pages
from mlmoe_jax.runtime.progress import Progress, status

TEACHER = "efficientnet_lite2"
SHAPE = ViTShape(width=192, depth=12, heads=3, patch=16, native=160)
GRID = SHAPE.native // SHAPE.patch
COMPONENTS = 256  # of the teacher's features
SHORT_SIDES, STRIDE = (320, 512), 32  # of the teacher's inputs, and of its maps, in pixels
BATCH, RATE, WEIGHT_DECAY, WARM_UP, AVERAGE = 128, 1e-3, 0.05, 0.05, 0.999
KEPT, DROPPING = 0.5, 0.75  # the share of the patches that is kept, in the first part of the training
AREA, RATIO = (0.15, 1.0), (3 / 4, 4 / 3)  # of a crop, relative to the photograph
JITTER = 0.4  # brightness, contrast and colour
CLASS_WEIGHT = 0.3  # of the cross-entropy, beside two mean squared errors of features with variance 1
LOG_EVERY, SAVE_SECONDS = 20, 300
STRENGTHS = tuple(10.0**k for k in range(-4, 3))  # of the probe's penalty, chosen on a fifth of `train`


# ------------------------------------------------------------------------------------------------------------- teacher
@dataclass(frozen=True)
class Targets:
    """What the teacher says of the photographs of a split.

    maps: of each photograph, at each size f16[h,w,K]; the variance of a component is
    the square root of its variance in the features, and 1 on average. mean, basis: the features are
    about mean + map @ basis. spread: the standard deviation of the mean of a map. kernel, bias: the classifier's.
    """

    maps: list[list[np.ndarray]]
    mean: np.ndarray
    basis: np.ndarray
    spread: float
    kernel: np.ndarray
    bias: np.ndarray

    def write(self, path: Path) -> None:
        """Write all of it to a file."""
        partial_path = path.with_suffix(".partial.npz")
        maps = {f"map/{row}/{size}": one for row, both in enumerate(self.maps) for size, one in enumerate(both)}
        others = {name: value for name, value in vars(self).items() if name != "maps"}
        np.savez(partial_path, **maps, **others)
        partial_path.replace(path)

    @classmethod
    def read(cls, path: Path, count: int) -> Targets:
        """Read the file for `count` photographs."""
        with np.load(path) as file:
            maps = [[file[f"map/{row}/{size}"] for size in range(len(SHORT_SIDES))] for row in range(count)]
            spread = float(file["spread"])
            return cls(maps, file["mean"], file["basis"], spread, file["kernel"], file["bias"])


def said_by_teacher(images: list[Image.Image], weights: str, path: Path) -> Targets:
    """Return the targets in a file; make it first if there is none."""
    if not path.exists():
        encode(images, weights).write(path)
    return Targets.read(path, len(images))


def encode(images: list[Image.Image], weights: str) -> Targets:
    """Run the teacher on whole photographs, and reduce its features to their principal components."""
    backbone = mm.load_backbone(TEACHER, weights=weights)
    graph, state = nnx.split(backbone)

    @jax.jit
    def run(state: nnx.State, pixels: jax.Array) -> jax.Array:
        found = nnx.merge(graph, state)(backbone.preprocess(pixels), read=("patches",))
        return found.patches.reshape(*found.grid, -1).astype(jnp.float16)

    maps, progress = [], Progress("teacher", len(images), 1)
    for image in progress.waiting(images):
        maps.append([np.asarray(run(state, fitted(image, side)[None])) for side in SHORT_SIDES])
        progress.advance()
    progress.close()
    mean, covariance = moments([one.reshape(-1, one.shape[-1]) for both in maps for one in both])
    variances, vectors = np.linalg.eigh(covariance)
    # Between the features' own scale, where a few components are all of the error, and equal variances.
    scale = np.maximum(variances[-COMPONENTS:], 1e-6 * variances[-1]) ** 0.25
    scale, vectors = scale * np.sqrt(np.mean(scale**2)), vectors[:, -COMPONENTS:]
    status(f"{COMPONENTS} components have {variances[-COMPONENTS:].sum() / variances.sum():.1%} of the variance")
    maps = [[((one - mean) @ (vectors / scale)).astype(np.float16) for one in both] for both in maps]
    spread = np.std([one.mean(axis=(0, 1), dtype=np.float32) for one, _ in maps])
    tensors = read_tensors(Path(weights))
    kernel, bias = tensors["_fc.weight"].T, tensors["_fc.bias"]
    return Targets(maps, mean, (vectors * scale).T.astype(np.float32), float(spread), kernel, bias)


def moments(tables: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean f32[D] and the covariance f64[D,D] of the rows of tables f16[n,D], a table at a time."""
    count = sum(map(len, tables))
    mean = sum(table.sum(axis=0, dtype=np.float64) for table in tables) / count
    products = np.zeros((len(mean), len(mean)))
    for table in tables:
        centred = (table - mean).astype(np.float32)
        products += centred.T @ centred
    return mean.astype(np.float32), products / (count - 1)


def fitted(image: Image.Image, short: int) -> np.ndarray:
    """Return a photograph as u8[h,w,3] with a short side; the long side is one of few, so that few programs compile."""
    longer = max(image.size) / min(image.size)
    ratio = min((1, 4 / 3, 3 / 2, 16 / 9), key=lambda ratio: abs(ratio - longer))
    long = round(short * ratio / STRIDE) * STRIDE
    size = (long, short) if image.width > image.height else (short, long)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))


# --------------------------------------------------------------------------------------------------------------- crops
@dataclass(frozen=True)
class Crop:
    """A part of a photograph, in fractions of its sides."""

    top: float
    left: float
    height: float
    width: float
    flipped: bool


def draw_crop(random: np.random.Generator) -> Crop:
    """Return a random crop."""
    area, ratio = random.uniform(*AREA), np.exp(random.uniform(*np.log(RATIO)))
    height, width = min(1.0, np.sqrt(area * ratio)), min(1.0, np.sqrt(area / ratio))
    top, left = random.uniform(0, 1 - height), random.uniform(0, 1 - width)
    return Crop(top, left, height, width, bool(random.random() < 0.5))


def cut(image: Image.Image, crop: Crop) -> np.ndarray:
    """Return the pixels of a crop, u8[S,S,3]."""
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    pixels = [fraction * side for fraction, side in zip(box, image.size * 2, strict=True)]
    found = np.asarray(image.resize((SHAPE.native, SHAPE.native), Image.Resampling.BILINEAR, box=pixels))
    return found[:, ::-1] if crop.flipped else found


def at_patches(maps: list[np.ndarray], crop: Crop) -> np.ndarray:
    """Return the teacher's map at the centres of the patches of a crop, f32[G,G,K], from the size that fits best."""
    chosen = min(maps, key=lambda one: abs(np.log(one.shape[0] * crop.height * one.shape[1] * crop.width / GRID**2)))
    centres = (np.arange(GRID) + 0.5) / GRID
    first, after = _neighbours(crop.top + centres * crop.height, chosen.shape[0])
    left, right = _neighbours(crop.left + centres * crop.width, chosen.shape[1])
    (above, down), (below, up) = first, after
    rows = chosen[above] * down[:, None, None] + chosen[below] * up[:, None, None]
    found = rows[:, left[0]] * left[1][:, None] + rows[:, right[0]] * right[1][:, None]
    return found[:, ::-1] if crop.flipped else found


def _neighbours(places: np.ndarray, cells: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the cells before and after each place in 0…1, with their weights f32[n]."""
    at = np.clip(places * cells - 0.5, 0, cells - 1)
    before = np.minimum(at.astype(int), max(cells - 2, 0))
    share = (at - before).astype(np.float32)
    return (before, 1 - share), (np.minimum(before + 1, cells - 1), share)


def batches(images: list[Image.Image], targets: Targets, first: int, steps: int) -> Iterator[tuple]:
    """Yield u8[B,S,S,3] and f32[B,G·G,K] for the steps from `first`; each depends on its number only."""

    def make(step: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng((0, step))
        rows, crops = random.integers(len(images), size=BATCH), [draw_crop(random) for _ in range(BATCH)]
        pixels = [cut(images[row], crop) for row, crop in zip(rows, crops, strict=True)]
        goals = [at_patches(targets.maps[row], crop) for row, crop in zip(rows, crops, strict=True)]
        return np.stack(pixels), np.stack(goals).reshape(BATCH, GRID**2, -1)

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(make, first)
        for step in range(first, steps):
            ready, ahead = ahead.result(), pool.submit(make, step + 1)
            yield ready


# ------------------------------------------------------------------------------------------------------------- student
class Student(nnx.Module):
    """The ViT with a linear layer for its patches, and two for its class token."""

    def __init__(self, classes: int, rngs: nnx.Rngs):
        self.vit = ViT(SHAPE, rngs=rngs)
        self.dense, self.pooled, self.classes = (
            nnx.Linear(SHAPE.width, out, rngs=rngs) for out in (COMPONENTS, COMPONENTS, classes)
        )

    def tokens(self, image: jax.Array, kept: jax.Array | None) -> jax.Array:
        """Return f32[B,1+n,D], the class token and the patches in i32[B,n] `kept`; all if it is None."""
        tokens, _ = self.vit.embed(image)
        if kept is not None:
            patches = jnp.take_along_axis(tokens[:, 1:], kept[..., None], axis=1)
            tokens = jnp.concatenate([tokens[:, :1], patches], axis=1)
        for block in self.vit.blocks:
            tokens = block(tokens)
        return self.vit.norm(tokens)


def jittered(image: jax.Array, key: jax.Array) -> jax.Array:
    """Change the brightness, the contrast and the colour of f32[B,S,S,3], 0…255."""
    factors = jax.random.uniform(key, (3, len(image), 1, 1, 1), minval=1 - JITTER, maxval=1 + JITTER)
    image = image * factors[0]
    for factor, axes in ((factors[1], (1, 2, 3)), (factors[2], 3)):
        middle = image.mean(axis=axes, keepdims=True)
        image = middle + factor * (image - middle)
    return jnp.clip(image, 0, 255)


def make_loss(definition: ModelDef, targets: Targets):
    """Return loss(params, image u8[B,S,S,3], goal f32[B,N,K], key, dropping=) -> f32[] and its three parts."""
    kernel = jnp.asarray(targets.basis @ targets.kernel)
    bias = jnp.asarray(targets.mean @ targets.kernel + targets.bias)

    def loss(params: Params, image: jax.Array, goal: jax.Array, key: jax.Array, *, dropping: bool):
        colours, places = jax.random.split(key)
        kept = None
        pooled = goal.mean(axis=1)
        probabilities = jax.nn.softmax(pooled @ kernel + bias)
        if dropping:
            order = jnp.argsort(jax.random.uniform(places, goal.shape[:2]), axis=1)
            kept = order[:, : round(KEPT * GRID**2)]
            goal = jnp.take_along_axis(goal, kept[..., None], axis=1)
        student = definition.merge(params)
        tokens = student.tokens(normalized(jittered(image.astype(jnp.float32), colours)), kept)
        cls, patches = tokens[:, 0], tokens[:, 1:]
        parts = {
            "dense": jnp.mean((student.dense(patches) - goal) ** 2),
            "pooled": jnp.mean((student.pooled(cls) - pooled / targets.spread) ** 2),
            "classes": optax.losses.softmax_cross_entropy(student.classes(cls), probabilities).mean(),
        }
        return parts["dense"] + parts["pooled"] + CLASS_WEIGHT * parts["classes"], parts

    return loss


def normalized(image: jax.Array) -> jax.Array:
    """Return the input of the ViT from pixel values in 0…255."""
    return (image / 255 - jnp.asarray(IMAGENET_MEAN)) / jnp.asarray(IMAGENET_STD)


def distill(images: list[Image.Image], targets: Targets, steps: int, place: Path) -> tuple[ModelDef, Params]:
    """Train the student, from the last saved state if there is one; return its structure and its moving average."""
    definition, params, _ = ModelDef.split(Student(len(targets.bias), nnx.Rngs(0)))
    schedule = optax.schedules.warmup_cosine_decay_schedule(0, RATE, round(WARM_UP * steps), steps)
    decays = {path: path.endswith("kernel") for path in params}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, 0.9, 0.98, weight_decay=WEIGHT_DECAY, mask=decays)
    )
    loss = make_loss(definition, targets)

    @partial(jax.jit, static_argnames="dropping", donate_argnums=0)
    def update(state: tuple, image: jax.Array, goal: jax.Array, step: int, *, dropping: bool):
        params, moments, average = state
        key = jax.random.fold_in(jax.random.key(0), step)
        (_, parts), gradient = jax.value_and_grad(loss, has_aux=True)(params, image, goal, key, dropping=dropping)
        updates, moments = optimizer.update(gradient, moments, params)
        params = optax.apply_updates(params, updates)
        share = jnp.minimum(AVERAGE, (step + 1) / (step + 10))
        average = jax.tree.map(lambda old, new: share * old + (1 - share) * new, average, params)
        return (params, moments, average), parts

    state, done = restored((params, optimizer.init(params), params), place / "state.npz")
    progress, saved, note = Progress("distill", steps, BATCH, first=done), time.monotonic(), ""
    for image, goal in progress.waiting(batches(images, targets, done, steps)):
        state, parts = update(state, image, goal, done, dropping=done < DROPPING * steps)
        done += 1
        if done % LOG_EVERY == 0:  # reading a value waits for the step
            note = ", ".join(f"{name} {float(part):.3f}" for name, part in parts.items())
        progress.advance(note)
        if time.monotonic() - saved > SAVE_SECONDS or done == steps:
            keep(state, done, place / "state.npz")
            saved = time.monotonic()
    progress.close()
    return definition, state[2]


def keep(state: tuple, done: int, path: Path) -> None:
    """Write the state after `done` steps."""
    partial_path = path.with_suffix(".partial.npz")
    np.savez(partial_path, *map(np.asarray, jax.tree.leaves(state)), done=done)
    partial_path.replace(path)


def restored(state: tuple, path: Path) -> tuple[tuple, int]:
    """Return the saved state and its number of steps; the given one and 0 if there is none."""
    if not path.exists():
        return jax.tree.map(jnp.array, state), 0  # copies, since the step donates them
    with np.load(path) as file:
        leaves = [jnp.asarray(file[f"arr_{index}"]) for index in range(len(jax.tree.leaves(state)))]
        return jax.tree.unflatten(jax.tree.structure(state), leaves), int(file["done"])


# -------------------------------------------------------------------------------------------------------------- probes
def probe(train: np.ndarray, train_labels: np.ndarray, val: np.ndarray, val_labels: np.ndarray) -> dict:
    """Return the mAP of logistic regressions f[n,D] -> bool[n,K], with the penalty that is best on a fifth of train."""
    held_out = np.random.default_rng(0).permutation(len(train)) < len(train) // 5

    def score(strength: float, fit: tuple, measure: tuple) -> float:
        scaler = StandardScaler().fit(fit[0])
        features, others = scaler.transform(fit[0]), scaler.transform(measure[0])
        found = []
        for column in range(train_labels.shape[1]):
            model = LogisticRegression(C=strength, max_iter=1000).fit(features, fit[1][:, column])
            found.append(average_precision_score(measure[1][:, column], model.decision_function(others)))
        return float(np.mean(found))

    parts = [(train[rows], train_labels[rows]) for rows in (~held_out, held_out)]
    strength = max(STRENGTHS, key=lambda strength: score(strength, *parts))
    return {"mAP": score(strength, (train, train_labels), (val, val_labels)), "C": strength}


def features_of(backbone: nnx.Module, prepare, images: list[Image.Image], side: int) -> np.ndarray:
    """Return the features `cls` f32[n,D] of whole photographs, resized to a square."""
    graph, state = nnx.split(backbone)
    run = jax.jit(lambda state, pixels: nnx.merge(graph, state)(prepare(pixels)).cls)
    resized = (np.asarray(image.resize((side, side), Image.Resampling.BILINEAR)) for image in images)
    return np.concatenate([np.asarray(run(state, pixels[None].astype(np.float32))) for pixels in resized])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="the VOCdevkit folder")
    parser.add_argument("--samples", type=int, default=400_000, help="crops to train on")
    parser.add_argument("--weights", required=True, help="the file of EfficientNet-Lite2 with its classifier")
    parser.add_argument("--out", type=Path, default=Path("runs/small_vit"))
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    splits = {name: open_voc(flags.root, 2012, name) for name in ("train", "val")}
    images = {name: [Image.fromarray(pixels) for pixels in split.images] for name, split in splits.items()}
    columns = frequent(flags.root)
    labels = {name: split.labels[:, columns] == POSITIVE for name, split in splits.items()}
    targets = said_by_teacher(images["train"], flags.weights, flags.out / "teacher.npz")
    definition, average = distill(images["train"], targets, flags.samples // BATCH, flags.out)
    student = definition.merge(average).vit
    _, values, _ = ModelDef.split(student)
    halves = {path: np.asarray(value, np.float16) for path, value in values.items()}
    save_file(halves, flags.out / "student.safetensors")
    teacher = mm.load_backbone(TEACHER, weights=flags.weights)
    results = {}
    for name, backbone, prepare, side in (
        ("teacher", teacher, teacher.preprocess, 260),
        ("teacher at 160 px", teacher, teacher.preprocess, SHAPE.native),
        ("student", student, normalized, SHAPE.native),
        ("untrained student", ViT(SHAPE, rngs=nnx.Rngs(0)), normalized, SHAPE.native),
    ):
        found = {part: features_of(backbone, prepare, of, side) for part, of in images.items()}
        results[name] = probe(found["train"], labels["train"], found["val"], labels["val"])
        print(f"{name}: mAP {100 * results[name]['mAP']:.2f}", flush=True)
    (flags.out / "results.json").write_text(json.dumps(results | {"samples": flags.samples}, indent=1))


if __name__ == "__main__":
    use_large_pages()
    main()
