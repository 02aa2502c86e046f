"""`digits-v1`: real handwriting in multi-label scenes, without a download.

The 1,797 scans of 8×8 pixels in scikit-learn (UCI "Optical Recognition of Handwritten Digits") are split at random, per
digit, into disjoint train, val and test scans *before* any scene is composed. The collection does not identify its
writers, so one writer may appear in several splits. A scene is a textured 64×64 canvas with 1 to 4 different digits at
random scale, slant, color and position. Its labels are its digits.

The labels are correlated on purpose (`draw_label_sets`):

* a head digit is accompanied by its companion with probability 0.9: 2 → 7, 5 → 3, 8 → 6;
* digits of one exclusive set never occur together: {2, 5, 8} and {0, 1, 4};
* the target number of digits is 1, 2, 3 and 4 for 15, 30, 30 and 25 % of the scenes.

`train`, `val` and `test` follow these rules. `test_shift` starts from the labels of `test` and trades them between
scenes (`break_correlations`). This keeps the number of digits of every scene and the number of scenes of every digit
exactly, and destroys all correlations. The drop from `test` to `test_shift` measures co-occurrence overfitting.

`digits_single` has one digit per image, rendered from these scans. The packaged backbone is pretrained on its train
split. Since this split has only 1,078 scans, its images are more varied (`render_varied_single`).

A change of any constant of this file needs another name than `digits-v1`. Random numbers come from
`numpy.random.RandomState`, because `numpy.random.Generator` does not guarantee its streams.

    python -m mlmoe_jax.data.sources.digits --out=DIR     # the scenes as image files with one CSV per split
"""

import argparse
import csv
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import RandomState
from PIL import Image

from mlmoe_jax.data.images import ArrayImages, RenderedImages
from mlmoe_jax.data.sources.source import DataSource
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.files import cache_folder
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import cached_file

NAME = "digits-v1"
CANVAS = 64
DIGITS = tuple(str(digit) for digit in range(10))
SCENES = {"train": 6_000, "val": 1_000, "test": 2_000, "test_shift": 2_000}
SINGLES = {"train": 240_000, "val": 2_000, "test": 4_000}
SCAN_SHARES = (0.60, 0.15)  # of train and val; test has the remaining scans

COMPANION = {2: 7, 5: 3, 8: 6}
COMPANION_PROBABILITY = 0.9
EXCLUSIVE = (frozenset({2, 5, 8}), frozenset({0, 1, 4}))
SIZE_PROBABILITY = (0.15, 0.30, 0.30, 0.25)
TRADES_PER_ROW = 10


# ---------------------------------------------------------------------------------------------------- source scans
@functools.cache
def source_scans() -> dict[str, list[np.ndarray]]:
    """Return split -> 10 arrays f32[n,8,8] in [0,1], the scans of each digit. No scan is in two splits."""
    from sklearn.datasets import load_digits  # here, because the import takes a second

    bunch = load_digits()
    order = RandomState(1797)
    parts = {"train": [], "val": [], "test": []}
    for digit in range(10):
        rows = order.permutation(np.flatnonzero(bunch.target == digit))
        ends = np.cumsum([round(share * len(rows)) for share in SCAN_SHARES])
        for part, members in zip(parts.values(), np.split(rows, ends), strict=True):
            part.append((bunch.images[members] / 16).astype(np.float32))
    return parts


# ---------------------------------------------------------------------------------------------------------- labels
def draw_label_sets(random: RandomState, count: int) -> np.ndarray:
    """Draw the labels of `count` scenes, bool[count,10], with the correlations in the docstring of the module."""
    labels = np.zeros((count, 10), bool)
    sizes = 1 + random.choice(4, size=count, p=SIZE_PROBABILITY)
    for present, size in zip(labels, sizes, strict=True):
        while (missing := size - present.sum()) > 0:
            banned = {digit for group in EXCLUSIVE if present[list(group)].any() for digit in group}
            allowed = [
                digit
                for digit in range(10)
                if not present[digit] and digit not in banned and (digit not in COMPANION or missing >= 2)
            ]
            digit = _one_of(random, allowed)
            present[digit] = True
            if digit in COMPANION and random.uniform() < COMPANION_PROBABILITY:
                present[COMPANION[digit]] = True
    return labels


def break_correlations(random: RandomState, labels: np.ndarray) -> np.ndarray:
    """Return a random binary matrix with the row sums and the column sums of `labels`, bool[N,K] (Curveball trades).

    A trade chooses two random rows and the labels that only one of the two rows has. It redistributes these labels at
    random between the two rows, such that each row keeps its number of labels (Strona et al., Nature Communications
    5:4114, 2014). There are TRADES_PER_ROW·N trades.
    """
    result = labels.copy()
    for _ in range(TRADES_PER_ROW * len(result)):
        first = random.randint(len(result))
        second = (first + 1 + random.randint(len(result) - 1)) % len(result)
        pool = np.flatnonzero(result[first] != result[second])
        count = result[first, pool].sum()
        if 0 < count < len(pool):
            pool = random.permutation(pool)
            result[first, pool] = np.arange(len(pool)) < count
            result[second, pool] = ~result[first, pool]
    return result


# ------------------------------------------------------------------------------------------------------- rendering
def _bilinear_weights(positions: np.ndarray, cells: int) -> np.ndarray:
    """Return the weights of bilinear interpolation, [n,cells] for n positions, along one axis with `cells` samples.

    `positions` are fractional indices of samples. The weights of samples outside the axis are left out, so scans fade
    out at their borders.
    """
    return np.maximum(0, 1 - np.abs(positions[..., None] - np.arange(cells)))


def _window(center: np.ndarray, half: float) -> tuple[tuple[slice, slice], np.ndarray, np.ndarray]:
    """Return slices of the canvas within `half` pixels of `center`, and y f32[h] and x f32[w] relative to `center`."""
    starts = np.floor(center - half).clip(0).astype(int)
    slices = tuple(map(slice, starts, np.ceil(center + half).astype(int)))
    pixels = np.arange(CANVAS, dtype=np.float32) + 0.5
    y, x = (pixels[part] - middle for part, middle in zip(slices, center, strict=True))
    return slices, y, x


def _blend(window: np.ndarray, ink: np.ndarray, polarity: int, contrast: float, tint) -> None:
    """Blend a color into a part of the canvas f32[h,w,3], in place.

    Args:
      ink: f32[h,w], the opacity of the color.
      polarity: 1 for a color that is brighter than the mean of `window`, −1 for a darker color. It is reversed if the
        color would be too bright or too dark.
      contrast: the difference from the mean.
      tint: f[3], an RGB value that is added to the color.
    """
    base = window.mean()
    if not 40 < base + polarity * contrast < 215:
        polarity = -polarity
    window += ink[..., None] * (base + polarity * contrast + tint - window)


def _draw_color(random: RandomState) -> tuple[int, float, np.ndarray]:
    """Draw the polarity, the contrast and the tint of a digit, see `_blend`."""
    return random.choice((-1, 1)), random.uniform(70, 130), random.uniform(-35, 35, size=3)


def paint_digit(random: RandomState, canvas: np.ndarray, scan: np.ndarray, center, size: float) -> None:
    """Paint a scan f32[8,8] onto the canvas f32[64,64,3], in place, in a color with contrast.

    `center` is (y, x), and `size` the height of the digit, in pixels.
    """
    aspect, slant = random.uniform(0.75, 1.1), random.uniform(-0.25, 0.25)
    color = _draw_color(random)

    window, y, x = _window(center, size / 2 + 1 + np.abs(slant) * size / 2)
    rows = _bilinear_weights(y * 8 / size + 3.5, 8)
    columns = _bilinear_weights((x[None] + slant * y[:, None]) * 8 / (size * aspect) + 3.5, 8)
    ink = (columns @ (rows @ scan)[:, :, None])[..., 0]
    _blend(canvas[window], np.clip(1.8 * ink - 0.25, 0, 1), *color)


def paint_warped(random: RandomState, canvas: np.ndarray, scan: np.ndarray, center, size: float) -> None:
    """Paint a scan as `paint_digit`, but also rotated by up to 17° and bent, with thin to bold strokes."""
    aspect, slant, angle = random.uniform(0.75, 1.15), random.uniform(-0.3, 0.3), random.uniform(-0.3, 0.3)
    color = _draw_color(random)
    gain = random.uniform(1.3, 2.6)  # bold strokes have more
    threshold = gain * random.uniform(0.05, 0.22)
    bend = random.uniform(-0.45, 0.45, size=(2, 4)).astype(np.float32)

    window, y, x = _window(center, 0.75 * size)
    row, column = _map_to_scan(y, x, (size, size * aspect), slant, angle, bend)
    ink = ((_bilinear_weights(row, 8) @ scan) * _bilinear_weights(column, 8)).sum(axis=-1)
    _blend(canvas[window], np.clip(gain * ink - threshold, 0, 1), *color)


def _map_to_scan(y, x, sides, slant: float, angle: float, bend: np.ndarray) -> np.ndarray:
    """Map pixels of a rotated and bent digit to the scan. Return the row and the column in the scan, f32[2,h,w].

    Args:
      y: vertical offsets from the center in pixels, f32[h]. `x` are the horizontal offsets, f32[w].
      sides: height and width of the digit in pixels.
      slant: horizontal shift per vertical pixel.
      angle: rotation in radians.
      bend: f32[2,4], the amplitudes of four waves that shift rows and columns, in pixels of the scan.
    """
    y, x = y[:, None], x[None]
    cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    v = (cosine * y + sine * x) * np.float32(8 / sides[0])
    u = (cosine * x - sine * y + np.float32(slant) * y) * np.float32(8 / sides[1])
    waves = np.concatenate([(np.sin(0.8 * side), np.cos(0.8 * side) - 1) for side in (u, v)])
    return np.stack([v, u]) + np.tensordot(bend, waves, axes=1) + 3.5  # the waves are zero at the center


def paint_canvas(random: RandomState) -> np.ndarray:
    """Return a random background f32[64,64,3]: a color with smooth blotches of two scales and with pixel noise."""
    color = random.uniform(60, 195, size=3)
    canvas = np.broadcast_to(color, (CANVAS, CANVAS, 3)).astype(np.float32)
    for cells, strength in ((3, 30), (9, 14)):
        weights = _bilinear_weights(np.linspace(0, cells - 1, CANVAS, dtype=np.float32), cells)
        blotches = random.uniform(-strength, strength, size=(cells, cells * 3)).astype(np.float32)
        columns = (weights @ blotches).reshape(CANVAS, cells, 3)
        canvas = canvas + weights @ columns
    grain = np.frombuffer(random.bytes(CANVAS * CANVAS * 3), np.uint8).reshape(canvas.shape)
    return canvas + (grain.astype(np.float32) - 127.5) * np.float32(random.uniform(0.02, 0.14))


def _finish(canvas: np.ndarray) -> np.ndarray:
    return np.clip(np.floor(canvas + 0.5), 0, 255).astype(np.uint8)


def _one_of(random: RandomState, candidates: Sequence) -> Any:
    return candidates[random.randint(len(candidates))]


def _place_in_quadrant(random: RandomState, quadrant: int) -> tuple[np.ndarray, float]:
    """Draw (center, size) of a digit inside the canvas, with its center (y, x) in the quadrant, in pixels."""
    size = random.uniform(16, 28)
    low, high = size / 2, 27.0  # the center is at least 5 pixels from the middle lines
    near = random.uniform(low, high, size=2)
    return np.where([quadrant // 2, quadrant % 2], CANVAS - near, near), size


def render_scene(random: RandomState, labels: np.ndarray, scans: list[np.ndarray]) -> np.ndarray:
    """Render a scene u8[64,64,3] with the digits of `labels`, bool[10], in different quadrants.

    `scans` has an array f32[n,8,8] for each of the 10 digits.
    """
    canvas = paint_canvas(random)
    quadrants = random.permutation(4)
    for digit, quadrant in zip(random.permutation(np.flatnonzero(labels)), quadrants, strict=False):
        center, size = _place_in_quadrant(random, quadrant)
        paint_digit(random, canvas, _one_of(random, scans[digit]), center, size)
    return _finish(canvas)


def render_single(random: RandomState, digit: int, scans: list[np.ndarray]) -> np.ndarray:
    """Render an image u8[64,64,3] with one digit at a random position. `scans` is as in `render_scene`."""
    canvas = paint_canvas(random)
    size = random.uniform(16, 40)
    center = random.uniform(size / 2, CANVAS - size / 2, size=2)
    paint_digit(random, canvas, _one_of(random, scans[digit]), center, size)
    return _finish(canvas)


LYING = (2, 3, 4, 5, 6, 7, 9)  # not digits after a rotation by 90 degrees, unlike 0, 1 and 8


def render_varied_single(random: RandomState, digit: int, scans: list[np.ndarray]) -> np.ndarray:
    """Render an image u8[64,64,3] with one warped digit.

    Half of the images also have 1 to 3 digits rotated by 90 degrees. The rotated digits have strokes but no label. A
    network must therefore recognize the upright digit by its shape and not by the presence of strokes.
    """
    canvas = paint_canvas(random)
    if random.uniform() < 0.5:
        size = random.uniform(16, 40)
        center = random.uniform(size / 2, CANVAS - size / 2, size=2)
    else:
        upright, *others = random.permutation(4)
        for quadrant in others[: 1 + random.randint(3)]:
            lying = np.rot90(_one_of(random, scans[_one_of(random, LYING)]), random.choice((1, 3)))
            paint_warped(random, canvas, lying, *_place_in_quadrant(random, quadrant))
        center, size = _place_in_quadrant(random, upright)
    paint_warped(random, canvas, _one_of(random, scans[digit]), center, size)
    return _finish(canvas)


# --------------------------------------------------------------------------------------------------------- sources
def _stream(split: str, *parts: int) -> RandomState:
    return RandomState([2026, *split.encode(), *parts])


def scene_labels(split: str) -> np.ndarray:
    """Return the labels of all scenes of a split, bool[N,10]."""
    if split == "test_shift":
        return break_correlations(_stream(split, 0), scene_labels("test"))
    return draw_label_sets(_stream(split, 0), SCENES[split])


def open_scenes(split: str) -> Split:
    """Open a split of the scenes, with all images in memory."""
    labels, images = _scenes(split, SCENES[split])
    ids = [f"{split}/{row:05d}.png" for row in range(len(labels))]
    return Split(split, DIGITS, labels.astype(np.int8), ids, ArrayImages(images))


@functools.cache  # for sweeps; all splits together take 135 MB
def _scenes(split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels bool[N,10] and the images u8[N,64,64,3] of N = `count` scenes; the images are read-only."""
    labels = scene_labels(split)
    images = _cached(f"{split}-{count}.npy", lambda: _render_scenes(split, labels))
    images.setflags(write=False)
    return labels, images


def _render_scenes(split: str, labels: np.ndarray) -> np.ndarray:
    scans = source_scans()[split.removesuffix("_shift")]
    return np.stack([render_scene(_stream(split, 1, row), present, scans) for row, present in enumerate(labels)])


def _cached(name: str, render: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the array `name` from the cache folder, or else `render()`, which is then stored there.

    The cache folder belongs to the version of this source file. Rendering all scenes takes half a minute.
    """

    def write(partial: Path) -> None:
        with open(partial, "wb") as file:
            np.save(file, render())

    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return np.load(cached_file(cache_folder() / NAME / version / name, write), mmap_mode="r")


def _render_single(split: str, scans: list[np.ndarray], row: int) -> np.ndarray:
    render = render_varied_single if split == "train" else render_single
    return render(_stream(split, 2, row), row % 10, scans)


def open_single(split: str) -> Split:
    """Open a split of images with one digit, which are rendered on access."""
    rows = np.arange(SINGLES[split])
    labels = (rows[:, None] % 10 == np.arange(10)).astype(np.int8)
    images = RenderedImages(len(rows), functools.partial(_render_single, split, source_scans()[split]))
    return Split(split, DIGITS, labels, [f"{split}/{row:06d}.png" for row in rows], images)


# ----------------------------------------------------------------------------------------------------- as files
def write_files(out: Path) -> None:
    """Write the scenes of every split as `out/SPLIT/NNNNN.png`, and `out/SPLIT.csv` with the labels joined by ;."""
    for name in SCENES:
        split = open_scenes(name)
        (out / name).mkdir(parents=True, exist_ok=True)
        with open(out / f"{name}.csv", "w", newline="") as table:
            rows = csv.writer(table)
            rows.writerow(["image", "labels"])
            for row, identifier in enumerate(split.ids):
                Image.fromarray(split.images.read(row)).save(out / identifier)
                rows.writerow([identifier, ";".join(DIGITS[k] for k in np.flatnonzero(split.labels[row]))])
        status(f"{out / name}.csv: {len(split)} images")


SCENES_SOURCE = DataSource(
    lambda data_config, split: open_scenes(split),
    splits=tuple(SCENES),
    labels=len(DIGITS),
)
SINGLES_SOURCE = DataSource(
    lambda data_config, split: open_single(split),
    splits=tuple(SINGLES),
    labels=len(DIGITS),
)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write digits-v1 as image files and one CSV per split.")
    parser.add_argument("--out", required=True, type=Path, help="folder to write into")
    write_files(parser.parse_args().out)
