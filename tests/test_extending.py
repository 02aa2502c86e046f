"""docs/extending.md, followed literally on a copy of the package: every example together makes a run that works."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.config import flatten, from_json
from mlmoe_jax.config.keys import format_value

PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
FENCED = re.compile(r"^```(python|shell)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCED.findall(PAGE)
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
NEW_FILE, NEW_LINE = re.compile(r"# (\S+\.py)"), re.compile(r"# (\S+\.py), below the line with (.+)")

# Two steps of training on the first 26 scans and what follows them, the report, and a prediction from the folder alone.
RUN = """
import sys
import jax
import numpy as np
from flax import nnx
from sklearn import datasets
whole = datasets.load_digits
datasets.load_digits = lambda **options: [part[:26] for part in whole(**options)]
from mlmoe_jax.main import main
export = ["--mode=export", "--workdir=run", "--format=single", "--output=exported"]
adapted = sys.argv.index("ADAPTED")
for arguments in (sys.argv[1:adapted], ["--mode=report", "--workdir=run"], export, sys.argv[adapted + 1 :]):
    if code := main(arguments):
        sys.exit(code)
from mlmoe_jax.inference.predictor import Predictor
predict = Predictor.from_run("run")
(result,) = predict([np.zeros((64, 64, 3), np.uint8)], top_k=len(predict.names))
print("predicted", predict.run.step, len(result.labels))
from mlmoe_jax.models.backbones.catalog import entry
encode = lambda image: entry("rotary_small").shape.build(rngs=nnx.Rngs(0))(image).cls
print("encoded", *jax.eval_shape(encode, np.zeros((2, 64, 64, 3), np.float32)).shape)
"""
SMALL = (
    "--config.train.epochs=1",
    "--config.train.batch_size=8",
    "--config.eval.batch_size=8",
    "--config.train.log_every=1",
    "--config.log.tensorboard=False",
)


def follow(block: str, root: Path) -> None:
    """Do what a Python block of the page says below `root`; refuse one that says nothing."""
    place, _, content = block.partition("\n")
    if new := NEW_FILE.fullmatch(place):
        file = root / new[1]
        assert not file.exists(), f"{new[1]} is there already"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return
    below = NEW_LINE.fullmatch(place)
    assert below, f"a block of docs/extending.md begins with '{place}', which is no place"
    assert content.count("\n") == 1, "one line"
    lines = (root / below[1]).read_text().splitlines(keepends=True)
    (row,) = [row for row, line in enumerate(lines) if below[2] in line]
    indent = re.match(r" *", lines[row])[0]
    lines.insert(row + 1, indent + content)
    (root / below[1]).write_text("".join(lines))


def settings(*names: str) -> list[str]:
    """Return the `--config.…` settings of the commands in sections of the page; by default in all but `adapter`.

    An adapter needs a ViT, and the other commands together train a convolutional network.
    """
    chosen = [text for name, text in SECTIONS.items() if (name in names if names else name != "adapter")]
    blocks = [text for section in chosen for language, text in FENCED.findall(section) if language == "shell"]
    commands = [shlex.split(text.replace("\\\n", " ")) for text in blocks]
    return [argument for command in commands for argument in command if argument.startswith("--config.")]


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A folder with a copy of the package and the additions of the page."""
    root = tmp_path_factory.mktemp("extended")
    for folder in ("mlmoe_jax", "configs"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for language, block in BLOCKS:
        if language == "python":
            follow(block, root)
    return root


def test_every_addition_is_one_file_one_line_and_one_command():
    """A run has one backbone, so there is no command for the second one."""
    for name, section in SECTIONS.items():
        kinds = [
            language if language == "shell" else "line" if NEW_LINE.match(block) else "file"
            for language, block in FENCED.findall(section)
        ]
        others = {"launch target": [], "vision transformer": ["file", "line"]}
        assert kinds == others.get(name, ["file", "line", "shell"]), name


@pytest.mark.slow
def test_the_additions_train_save_restore_and_predict(extended):
    (extended / "follow.py").write_text(RUN)
    environment = os.environ | {"PYTHONPATH": str(extended), "JAX_PLATFORMS": "cpu"}
    joint = ["--config=configs/finetune.py:dataset=digits", "--workdir=run", *SMALL, *settings()]
    adapted = ["--config=configs/linear_probe.py:dataset=digits", "--workdir=adapted", *SMALL]
    adapted += settings("data set", "adapter")
    done = subprocess.run(
        [sys.executable, "follow.py", *joint, "ADAPTED", *adapted],
        cwd=extended,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *_, predicted, encoded = done.stdout.splitlines()
    assert predicted == "predicted 2 4", "step 2, and each of the four labels has a score"
    assert encoded == "encoded 2 64", "the second backbone is in the catalog, too"
    stored = json.loads((extended / "adapted" / "config.json").read_text())
    assert stored["model"]["adapters"] == {"factors": {"targets": ["value", "fc2"]}}, (
        "its own key, declared in its file"
    )
    assert (extended / "adapted" / "results.json").exists()
    run = extended / "run"
    kept = flatten(from_json((run / "config.json").read_text()))
    for setting in settings():
        key, _, value = setting.removeprefix("--config.").partition("=")
        assert format_value(kept[key]) == value, "the run used what the page adds"
    assert (run / "labels.txt").read_text().split() == ["even", "prime", "square", "loop"]
    assert 0 <= json.loads((run / "results.json").read_text())["test"]["metrics"]["subset_accuracy@0.5"] <= 1
    assert {"model.bin", "model.json", "load.py", "README.md"} == {
        path.name for path in (extended / "exported").iterdir()
    }
    assert "| `model.bin` | the program and its weights" in (extended / "exported" / "README.md").read_text()
    report = (run / "report.html").read_text()
    assert "Whole images" in report
    assert "share of images whose labels are all predicted correctly, at the threshold 0.5" in report


def test_the_additions_are_formatted_like_the_package(extended):
    added = [NEW_FILE.match(block)[1] for language, block in BLOCKS if language == "python" and "below" not in block]
    ruff = Path(sys.executable).parent / "ruff"
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    settings = ["--config", str(REPOSITORY / "pyproject.toml"), "--no-cache"]
    for command in (["check", *settings], ["format", "--check", *settings]):
        done = subprocess.run([ruff, *command, *added], cwd=extended, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
