"""Explain predictions for single images: attention maps, and the gates that weight the experts.

A run folder stores explained sample images of one split for the report:

    samples/index.json     a dict; its keys are listed below
    samples/NNNN.jpg       the part of the image that the model received; its longer side has at most MOST_SIDE pixels
    samples/explained.npz  `gates/NAME` f16[S,K,E], or f16[1,K,E] for gates that do not depend on the image, and
                           `attention/NAME` f16[S,Q,N]

Keys of index.json:

    split          the name of the split
    grid           [rows, columns] of the patches
    prompt_groups  [side, group, expert] of each prompt, see `list_prompts`; null if prompts have no groups
    entries        name of a gate -> names of its E entries
    samples        a list with one dict per image: `id`, `file`, `codes` (the K label codes, see `data.split`) and
                   `scores` (K probabilities)

Shape letters: S sample images, K labels, E entries of a gate, Q queries (class token, prompts, or labels),
N patches; see `models.outputs.Prediction`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.label_matrix import LabelMatrix
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.transforms import evaluated_part
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.adapters.catalog import prompts_class
from mlmoe_jax.models.adapters.group_prompts import SIDES, prompt_coordinates
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.models.outputs import LABELS, PROMPTS
from mlmoe_jax.runs.folder import SAMPLE_ARRAYS, SAMPLE_INDEX, SAMPLES, RunFolder
from mlmoe_jax.runs.restore import Run, open_run
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.batches import run_batches
from mlmoe_jax.runtime.formats import UNPACKED_BYTES, dump_json
from mlmoe_jax.runtime.progress import megabytes, status

MOST_SIDE = 224  # maximum side of a thumbnail in pixels
IMAGES_PER_DEVICE = 8  # in a batch: attention maps of many labels are large
THUMBNAIL_QUALITY = 85  # of JPEG


# ------------------------------------------------------------------------------------------------- names of the prompts
def list_prompts(config: ConfigDict) -> list[tuple[str, int, int]] | None:
    """Return (side, group, expert) of each prompt in the order of the model; None if the prompts have no groups.

    `side` is `co` (co-occurrence groups) or `dc` (discriminative groups). Groups are numbered from 0, as in
    `LabelSpace`. Experts are numbered from 1, as in `Head.gate_entries`.
    """
    if not prompts_class(config).uses_groups:
        return None
    prompts = config.model.prompts
    sides = SIDES[prompts.sides]
    coordinates = prompt_coordinates(len(sides), prompts.num_groups, prompts.per_group).tolist()
    return [(sides[side], group, expert + 1) for side, expert, group in coordinates]


def query_names(kind: str, count: int, labels: Sequence[str], groups: Sequence[Sequence[Any]] | None) -> Sequence[str]:
    """Return the names of the `count` queries of the attention map `Prediction.attention[kind]`.

    `labels` are the K label names, and `groups` is the result of `list_prompts`.
    """
    if kind == LABELS:
        return labels
    if kind != PROMPTS:
        return ["class token"]
    if groups is None:
        return [f"prompt {number + 1}" for number in range(count)]
    return [f"{side} group {group + 1}, expert {expert}" for side, group, expert in groups]


# ------------------------------------------------------------------------------------------------------------- samples
def choose_samples(codes: LabelMatrix, count: int) -> np.ndarray:
    """Choose at most `count` images that cover as many labels as possible, and return their rows i64[S], sorted.

    Each iteration chooses the first image with the most uncovered positive labels by its codes i8[N,K]; they are then
    covered. If no remaining image has an uncovered label, all labels become uncovered again. Images without positive
    labels are chosen last. The choice is deterministic.
    """
    positive = codes.marked(POSITIVE).astype(np.int64)
    samples, free, unseen = [], np.ones(len(codes), bool), np.ones(codes.shape[1], bool)
    gain = positive.sum(axis=1)
    while len(samples) < count and free.any():
        row = int(np.argmax(np.where(free, gain, -1)))
        if not gain[row]:
            unseen[:], gain = True, positive.sum(axis=1)
            row = int(np.argmax(np.where(free, gain, -1)))
        new = unseen & (codes[row] == POSITIVE)
        unseen &= ~new
        gain -= positive @ new
        samples.append(row)
        free[row] = False
    return np.sort(np.array(samples, np.int64))


class Explained(NamedTuple):
    """S explained images. `arrays` has `gates/NAME` and `attention/NAME`; `grid` is (rows, columns) of patches."""

    rows: np.ndarray  # i64[S], rows of the readable images
    images: np.ndarray  # u8[S,H,W,3], the model input
    scores: np.ndarray  # f32[S,K]
    arrays: dict[str, np.ndarray]  # the content of explained.npz
    grid: tuple[int, int]


def explain_images(run: Run, split: Split) -> Explained:
    """Compute the explanations of all readable images of a split; UserError if there is none."""
    step, size = run.eval_step("gates", "attention", "grid", "image"), IMAGES_PER_DEVICE * run.mesh.size
    batches = run_batches(
        lambda batch: _transferred(step(run.values, run.frozen, batch)),
        build_loader(run.config.data, split, batch_size=size, labels=False),
        run.mesh,
        advice="explain fewer images per device, or on a device with more memory",
    )
    parts: dict[str, list[np.ndarray]] = {}
    for output in batches:
        readable = output["mask"] > 0
        for name, values in output["arrays"].items():
            if len(values) == len(readable):
                parts.setdefault(name, []).append(values[readable])
            else:  # static gates do not depend on the image
                parts[name] = [values]
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    rows, images, scores = (joined.pop(name) for name in ("rows", "images", "scores"))
    if not len(rows):
        raise UserError(f"none of {len(split):,} images of {split.name} can be read, so none can be explained")
    return Explained(rows.astype(np.int64), images, scores, joined, tuple(map(int, output["grid"])))


def _transferred(output: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a step's result that is copied to the host: the mask, the grid, and arrays by name."""
    arrays = {"rows": output["id"], "images": output["image"], "scores": jax.nn.sigmoid(output["logits"])}
    for kind in ("gates", "attention"):
        arrays |= {f"{kind}/{name}": weights.astype(np.float16) for name, weights in output[kind].items()}
    return {"mask": output["mask"], "arrays": arrays, "grid": output["grid"]}


def write_samples(folder: RunFolder, run: Run, split: Split, *, count: int) -> None:
    """Explain at most `count` images of a split, and write them to `samples/` in the run folder.

    If the arrays of so many labels have more than UNPACKED_BYTES, fewer images are kept. Existing samples are replaced.
    All processes must call this function; the first one writes. Raises UserError if no image can be read.
    """
    samples = split.take(choose_samples(split.labels, count), split.name)
    explained = explain_images(run, samples)
    if not distributed.is_first():
        return
    size = sum(array.nbytes for array in explained.arrays.values())
    if (kept := max(1, len(explained.rows) * UNPACKED_BYTES // max(1, size))) < len(explained.rows):
        status(f"{kept} of {len(explained.rows)} sample images are kept, because their maps have {megabytes(size)}")
        arrays = {name: array[:kept] for name, array in explained.arrays.items()}
        explained = Explained(*(value[:kept] for value in explained[:3]), arrays, explained.grid)
    former = folder.inside(SAMPLES)  # nothing is removed through a link
    for path in [folder / SAMPLE_INDEX, folder / SAMPLE_ARRAYS, *former.glob("*.jpg")]:  # the index first
        path.unlink(missing_ok=True)
    listed = _write_thumbnails(folder, run.config.data, samples, explained)
    folder.write_npz(SAMPLE_ARRAYS, **explained.arrays)
    index = {
        "split": split.name,
        "grid": explained.grid,
        "prompt_groups": list_prompts(run.config),
        "entries": head_class(run.config).gate_entries(run.config),
        "samples": listed,
    }
    folder.write_text(SAMPLE_INDEX, dump_json(index) + "\n")  # last: readers ignore samples without an index


def _write_thumbnails(
    folder: RunFolder, data_config: ConfigDict, samples: Split, explained: Explained
) -> list[dict[str, Any]]:
    """Write a thumbnail of each explained image. Return the list `samples` of index.json."""
    decoding = Decoding.from_config(data_config, at_least=2 * MOST_SIDE)
    listed = []
    for number, (row, scores) in enumerate(zip(explained.rows, explained.scores, strict=True)):
        file = f"{SAMPLES}/{number:04}.jpg"
        image = samples.images.read(row, decoding)
        folder.write_bytes(file, thumbnail(evaluated_part(image, data_config), MOST_SIDE))
        rounded = [round(score, 5) for score in scores.tolist()]
        listed.append(
            {"id": str(samples.ids[row]), "file": file, "codes": samples.labels[row].tolist(), "scores": rounded}
        )
    return listed


def write_requested_samples(folder: RunFolder, config: ConfigDict, run: Run | None = None) -> None:
    """Write `config.report.samples` sample images to the run folder; 0 = none.

    The images are from the first test split, or without test splits from the validation split. Without `run`, the run
    of the folder is opened. Raises UserError if there is no split, or no image can be read.
    """
    if not config.report.samples:
        return
    run = run or open_run(folder, own=True)
    data = run.config.data
    if not (name := next(iter((*data.test_splits, data.val_split)))):
        raise UserError("data.test_splits and data.val_split are empty; name the split to take sample images from")
    write_samples(folder, run, run.open_split(name), count=config.report.samples)


def thumbnail(image: np.ndarray, side: int) -> bytes:
    """Encode an image u8[h,w,3] as a JPEG file. Reduce it first if its longer side has more than `side` pixels."""
    small, buffer = Image.fromarray(image), io.BytesIO()
    small.thumbnail((side, side))
    small.save(buffer, "JPEG", quality=THUMBNAIL_QUALITY)
    return buffer.getvalue()
