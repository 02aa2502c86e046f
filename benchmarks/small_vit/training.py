"""The distillation: samples, steps, and the state from which it resumes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from flax import nnx
from PIL import Image

from benchmarks.small_vit.crops import at_patches, cut, draw_crop
from benchmarks.small_vit.student import GRID, SHAPE, Student, make_loss, whiten
from benchmarks.small_vit.teacher import Targets, view
from mlmoe_jax.models.params import ModelDef, Params
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.storage import whole_file

BATCH, RATE, WEIGHT_DECAY, WARM_UP, AVERAGE = 128, 5e-3, 0.05, 0.05, 0.999
MUON_RMS = 0.2  # of an update by Muon, about that of an update by Adam (Liu et al., 2025)
DROPPING = 0.9  # the first part of the training, in which patches are dropped
AREA = (0.4, 1.0)  # of a crop of a view
LOG_EVERY, SAVE_SECONDS = 20, 300


def batches(images: list[Image.Image], targets: Targets, first: int, steps: int) -> Iterator[tuple]:
    """Yield u8[B,S,S,3] and f32[B,G·G,K] for the steps from `first`; each depends on its number only."""

    def make(step: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng((0, step))
        pixels, goals = [], []
        for _ in range(BATCH):
            row, number = random.integers(targets.maps.shape[:2])
            crop = draw_crop(random, AREA)
            pixels.append(cut(images[row], crop.of(view(row, number)), SHAPE.native))
            goals.append(at_patches(targets.maps[row, number], crop, GRID))
        return np.stack(pixels), np.stack(goals).reshape(BATCH, GRID**2, -1)

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(make, first)
        for step in range(first, steps):
            ready, ahead = ahead.result(), pool.submit(make, step + 1)
            yield ready


def start(images: list[Image.Image], targets: Targets) -> tuple[ModelDef, Params]:
    """Return the structure and the first parameters of the student."""
    student = Student(targets.maps.shape[-1], len(targets.bias), nnx.Rngs(0))
    whiten(student, np.concatenate([image for image, _ in batches(images, targets, 0, 1 + 1000 // BATCH)]))
    definition, params, _ = ModelDef.split(student)
    return definition, params


def make_optimizer(steps: int, params: Params) -> optax.GradientTransformation:
    """Return Muon for matrices and AdamW for the rest, with a warm-up and a cosine."""
    rate = optax.schedules.warmup_cosine_decay_schedule(0, RATE, round(WARM_UP * steps), steps)
    decays = {path: path.endswith("kernel") for path in params}
    muon = optax.contrib.muon(rate, weight_decay=WEIGHT_DECAY, weight_decay_mask=decays, consistent_rms=MUON_RMS)
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def distill(images: list[Image.Image], targets: Targets, steps: int, place: Path) -> tuple[ModelDef, Params]:
    """Train the student, from the last saved state if there is one; return its structure and its moving average."""
    definition, params = start(images, targets)
    optimizer, loss = make_optimizer(steps, params), make_loss(definition, targets)

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
    with whole_file(epath.Path(path)) as partial_path, open(partial_path, "wb") as file:
        np.savez(file, *map(np.asarray, jax.tree.leaves(state)), done=done)


def restored(state: tuple, path: Path) -> tuple[tuple, int]:
    """Return the saved state and its number of steps; the given one and 0 if there is none."""
    if not path.exists():
        return jax.tree.map(jnp.array, state), 0  # copies, since the step donates them
    with np.load(path) as file:
        leaves = [jnp.asarray(file[f"arr_{index}"]) for index in range(len(jax.tree.leaves(state)))]
        return jax.tree.unflatten(jax.tree.structure(state), leaves), int(file["done"])
