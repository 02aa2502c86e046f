"""Run folders."""

import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hypothesis import strategies as st

from mlmoe_jax.apps.cli.commands import COMMANDS
from mlmoe_jax.apps.cli.flags import parse_flags
from mlmoe_jax.main import main
from mlmoe_jax.runs.folder import RunFolder
from tools.fuzz.hostile import Case, damaged, damaged_csv, damaged_json, damaged_npz, encoded, write

DATA = b"image,labels,split\n" + b"".join(
    b"%d.png,%s,%s\n" % (n, (b"sea", b"sea;sun", b"sand")[n % 3], b"train" if n < 16 else b"val") for n in range(24)
)


def prepare_run(base: Path) -> None:
    """Train the packaged backbone for two steps on 24 images."""
    for n in range(24):
        write(base / f"files/{n}.png", encoded(size=(64, 64)))
    write(base / "files/t.csv", DATA)
    keys = (
        *(
            "data.name=csv",
            f"data.root={base}/files",
            "data.table=t.csv",
            "data.val_split=val",
            "data.test_splits=val,",
        ),
        *("train.epochs=1", "train.batch_size=8", "eval.batch_size=8", "train.log_every=1", "report.samples=2"),
        *("model.prompts.num_groups=2", "model.prompts.groups=computed"),
    )
    command = ["--config=mlvpt_digits", f"--workdir={base}/run", *(f"--config.{key}" for key in keys)]
    if code := main(command):
        raise RuntimeError(f"cannot train a run: exit code {code}")


def make_run(base: Path) -> None:
    """Write a run folder without a model, with every file that reports, thresholds and comparisons read."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from helpers import made_run

    made_run.make_run(base / "run")
    command(["--mode=report", f"--workdir={base}/run"])  # the first report takes seconds to set up its charts


def changed_run(draw: st.DrawFn, base: Path, place: Path, names: Sequence[str]) -> str:
    """Copy the run with damage in one file; return a description."""
    run = place / "run"
    shutil.copytree(base / "run", run, ignore=shutil.ignore_patterns("tensorboard"))
    path = run / draw(st.sampled_from([name for name in names if (run / name).exists()]))
    damage = {".json": damaged_json, ".npz": damaged_npz, ".csv": damaged_csv}.get(path.suffix, damaged)
    content = damage(draw, path.read_bytes())
    if path.suffix == ".jsonl" and draw(st.booleans()):
        first, _, rest = path.read_bytes().partition(b"\n")
        content = damaged_json(draw, first) + b"\n" + rest
    path.write_bytes(content)
    return f"{path.relative_to(run)} {content[:150]!r}"


READ = (
    *(
        "config.json",
        "labels.txt",
        "label_space.npz",
        "backbone.json",
        "thresholds.json",
        "metrics.jsonl",
        "results.json",
    ),
    *(
        "per_class.csv",
        "cooccurrence.csv",
        "scores/test.npz",
        "starts.json",
        "images.npz",
        "samples/index.json",
        "samples/explained.npz",
    ),
)


def run_folder(draw: st.DrawFn, base: Path, place: Path) -> Case:
    changed = changed_run(draw, base, place, READ)
    folder, mode = (
        place / "run",
        draw(st.sampled_from(("report", "report", "report", "thresholds", "calibrate", "compare"))),
    )
    arguments = {
        "report": ["--mode=report", f"--workdir={folder}"],
        "thresholds": ["--mode=thresholds", f"--workdir={folder}"],
        "calibrate": ["--mode=calibrate", f"--workdir={folder}"],
        "compare": ["--mode=compare", f"--workdir={folder}", f"--workdir={base / 'run'}"],
    }[mode]
    return f"{mode}: {changed}", partial(command, arguments)


def model(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """Restore a model with damaged files, and place the selected values on the device."""
    from mlmoe_jax.runs.restore import open_run

    names = (
        "config.json",
        "label_space.npz",
        "preprocess.json",
        "backbone.json",
        "frozen.safetensors",
        "thresholds.json",
    )
    notes = [str(path.relative_to(base / "run")) for path in (base / "run/checkpoints").rglob("*") if path.is_file()]
    changed = changed_run(draw, base, place, (*names, *sorted(notes)))
    return f"open: {changed}", lambda: open_run(RunFolder(place / "run"))


def command(arguments: list[str]) -> None:
    """Run a command as `main` does, but raise its errors."""
    flags, pairs = parse_flags(arguments)
    COMMANDS[flags.mode].run(flags, pairs)
