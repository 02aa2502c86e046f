"""A made-up run folder with every file that a report reads, small and drawn once.

Limits: no model, and the data set of its config has other images.
"""

import html
import io
import json
import re
from datetime import datetime
from pathlib import Path

import numpy as np
from PIL import Image

from helpers import scored_run
from helpers.metric_cases import evaluate_scores
from mlmoe_jax.data.labels.grouping import cooccurrence
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.evaluation.metrics import multilabel
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.runs.decisions import Thresholds, write_thresholds
from mlmoe_jax.runs.folder import RunFolder

# Names that would do harm if a page took them for markup.
NAMES = ("cat", "dog", "<script>window.hurt=1</script>", "<img src=x onerror=window.hurt=1>", "pears & </script> plums")
STEPS, IMAGES, GRID = (20, 40, 60), 40, (2, 3)
TIME = datetime.fromisoformat("2026-01-02T03:04:05+00:00").timestamp()  # at which the training starts, in seconds


def make_run(path: Path, *, seed: int = 0, samples: int = 3, **keys) -> RunFolder:
    """Write a run folder whose config has the defaults and `keys`, such as eval__select_on="test"."""
    folder = scored_run.write_run(path, names=NAMES, **({"data__test_splits": ("test",)} | keys))
    draw, truth = np.random.default_rng(seed), np.random.default_rng(7)  # the same labels, so that runs can be compared
    shape, groups = (IMAGES, len(NAMES)), np.array([0, 0, 1, 1, 1], np.int32)
    codes = {split: truth.choice([0, 1], shape, p=[0.6, 0.4]).astype(np.int8) for split in ("val", "test")}
    codes["test"][0, 0], codes["test"][1, 0] = 2, -1  # a difficult and an unknown label
    with io.BytesIO() as file:
        LabelSpace(NAMES, *cooccurrence(codes["val"]), IMAGES, groups, groups[::-1].copy()).save(file)
        folder.write_bytes("label_space.npz", file.getvalue())
    limits = dict(zip(NAMES, (0.1, 0.2, 0.3, 0.4, np.inf), strict=True))
    write_thresholds(folder, Thresholds(limits, {"split": "val"}))

    scores, results, rows = {}, {}, []
    for split, of_split in codes.items():
        scores[split] = np.clip(0.35 + 0.3 * (of_split == 1) + 0.2 * draw.normal(size=shape), 0, 1)
        judged = scores[split], of_split == 1, of_split >= 0
        results[split] = evaluate_scores(*judged, {"0.5": 0.5})
        columns = multilabel.per_class(*judged[:2], mask=judged[2])
        rows += [[split, name, *(columns[f][k] for f in ("positives", "AP", "AUC"))] for k, name in enumerate(NAMES)]
    scored = [SplitScores(split, image_ids(split, IMAGES), scores[split], codes[split]) for split in codes]
    scored_run.write_results(folder, results, *scored)
    folder.write_csv("per_class.csv", ["split", "label", "positives", "AP", "AUC"], rows)

    fixed = {"loss/co": 2.0, "learning_rate": 1e-3, "images_per_second": 80.0, "data_wait": 0.1, "gradient_norm": 2.0}
    for step in STEPS:
        row = {"step": step, "epoch": step / 20, "time": TIME + step, "loss": 100 / step, **fixed}
        folder.append_row(row | {"val/raw/mAP": 0.5 + step / 1000, "val/ema/mAP": 0.6 - abs(step - 40) / 1000})
    params = {"total": 87_602_710, "trainable": 1_022_230, "backbone": 86_580_480}
    macs = {"layers": 24_513_954_816, "full": 26_033_209_344, "executed": 21_857_879_232}
    cost = {"params": params, "macs": macs, "memory": {"frozen": 350_000_000}}
    folder.write_json("cost.json", cost | {"modules": {"backbone/blocks": [85_000_000, 0]}})
    start = {"time": "2026-01-02T03:04:05+00:00", "device": "TPU v5e", "devices": 16, "processes": 4, "mesh": {}}
    versions = {0: "0.8.0", 20: "0.8.0", 40: "0.9.1"}
    starts = [start | {"step": s, "versions": {"python": "3.11.7", "jax": jax}} for s, jax in versions.items()]
    folder.write_json("starts.json", starts)
    gaps = [["test", "cat", "dog", 0.25], ["test", "dog", "cat", "nan"]]
    folder.write_csv("cooccurrence.csv", ["split", "a", "b", "gap"], gaps)
    if samples:
        write_samples(folder, codes["test"][:samples], scores["test"][:samples], draw)
    return folder


def image_ids(split: str, count: int) -> np.ndarray:
    """The ids of a split's images."""
    return np.array([f"{split}/{n:03}.jpg" for n in range(count)])


def write_samples(folder: RunFolder, codes: np.ndarray, scores: np.ndarray, draw: np.random.Generator) -> None:
    """Write samples/ of the first images of the test split, with gates of each image and static ones, and attention."""
    count, labels = codes.shape
    patches, prompts = GRID[0] * GRID[1], [["co", 0, 1], ["co", 1, 1]]
    weights = {"co": draw.dirichlet(np.ones(2), (count, labels)), "experts": draw.dirichlet(np.ones(3), (1, labels))}
    maps = {"prompts": draw.random((count, 2, patches)), "labels": draw.random((count, labels, patches))}
    arrays = {f"gates/{name}": values for name, values in weights.items()}
    arrays |= {f"attention/{name}": values / values.sum(-1, keepdims=True) for name, values in maps.items()}
    folder.write_npz("samples/explained.npz", **{name: values.astype(np.float16) for name, values in arrays.items()})
    listed = []
    for n in range(count):
        buffer = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (8, 12, 3)).astype(np.uint8)).save(buffer, "JPEG")
        folder.write_bytes(f"samples/{n:04}.jpg", buffer.getvalue())
        listed.append(
            {"id": f"test/{n:03}.jpg", "file": f"samples/{n:04}.jpg"}
            | {"codes": codes[n].tolist(), "scores": scores[n].tolist()}
        )
    entries = {"co": ["expert 1", "expert 2"], "experts": ["shared 1", "shared 2", "task 1"]}
    index = {"split": "test", "grid": GRID, "prompt_groups": prompts, "entries": entries, "samples": listed}
    folder.write_json("samples/index.json", index)


def data_block(page: str, name: str):
    """The JSON of a page's data block."""
    start = page.index(f'id="data-{name}">') + len(f'id="data-{name}">')
    return json.loads(page[start : page.index("</script>", start)])


def section(text: str, name: str) -> str:
    """Return the visible text of a section."""
    inner = text.split(f'<section id="{name}"')[1].split("</section>")[0]
    inner = re.sub(r"<script.*?</script>|<wbr>", "", inner, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", inner)).split())
