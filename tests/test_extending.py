"""docs/extending.md, followed literally on a copy of the package: every example together makes a run that works."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.runtime.keys import format_value

PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
FENCED = re.compile(r"^```(python|shell)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCED.findall(PAGE)
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
NEW_FILE = re.compile(r"# (\S+\.py)")
NEW_ENTRY = re.compile(r"# (\S+\.py), (?:below the line with (?P<line>.+)|in (?P<registry>[A-Z_]+)):")

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
    entry = NEW_ENTRY.fullmatch(place)
    assert entry, f"a block of docs/extending.md begins with '{place}', which is no place"
    lines = (root / entry[1]).read_text().splitlines(keepends=True)
    row = row_below(lines, **entry.groupdict())
    indent = re.match(r" *", lines[row])[0]
    lines.insert(row, textwrap.indent(content, indent))
    (root / entry[1]).write_text("".join(lines))


def row_below(lines: list[str], *, line: str | None, registry: str | None) -> int:
    """Return the row below the only line with a text, or of the first entry of a registry."""
    if line:
        (row,) = [row for row, text in enumerate(lines) if line in text]
        return row + 1
    (row,) = [row for row, text in enumerate(lines) if text.startswith(f"{registry}: ")]
    while lines[row].strip() != "{":
        row += 1
    return row + 1


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


def test_every_addition_is_one_file_one_entry_and_one_command():
    """A run has one backbone, so there is no command for the second one."""
    for name, section in SECTIONS.items():
        kinds = [
            language if language == "shell" else "entry" if NEW_ENTRY.match(block) else "file"
            for language, block in FENCED.findall(section)
        ]
        others = {
            "config key": ["entry", "shell"],
            "launch target": [],
            "tests of an addition": [],
            "vision transformer": ["file", "entry"],
        }
        assert kinds == others.get(name, ["file", "entry", "shell"]), name


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
    kept = json.loads((run / "config.json").read_text())
    for setting in settings():
        key, _, value = setting.removeprefix("--config.").partition("=")
        found = reduce(getitem, key.split("."), kept)
        found = tuple(found) if isinstance(found, list) else found
        assert format_value(found) == value, "the run used what the page adds"
    assert (run / "labels.txt").read_text().split() == ["even", "prime", "square", "loop"]
    assert 0 <= json.loads((run / "results.json").read_text())["test"]["metrics"]["subset_accuracy@0.5"] <= 1
    assert {"model.bin", "model.json", "load.py", "README.md"} == {
        path.name for path in (extended / "exported").iterdir()
    }
    assert "| `model.bin` | the program and its weights" in (extended / "exported" / "README.md").read_text()
    report = (run / "report.html").read_text()
    assert "Whole images" in report
    assert "share of images whose labels are all predicted correctly, at the threshold 0.5" in report


# What follows from the declaration of the key of the page, `data.mask`: one line of output for each.
MEANING = """
import json, sys
from functools import reduce
from operator import getitem
from pathlib import Path
from mlmoe_jax.apps.cli.commands import COMMANDS
from mlmoe_jax.config.reference import describe_config, reference_page
from mlmoe_jax.config import apply_overrides, default_config, find_unread, find_unused, portable, to_json
from mlmoe_jax.runs.naming import default_folder
help_text = " ".join(describe_config("data.mask").split())
print("help:", help_text)
print("page:", f"* {help_text.replace('data.mask', '`data.mask`')}" in reference_page())
config = apply_overrides(default_config(), [("data.mask", "/home/ada/mask.png")])
crop = apply_overrides(default_config(), [("data.resize", "crop")])
print("unused:", find_unused(config, [("data.mask", "")]), find_unused(crop, [("data.mask", "")]))
stages = {mode: command.stages for mode, command in COMMANDS.items() if command.stages}
print("unread:", *(mode for mode in stages if find_unread([("data.mask", "")], stages[mode])))
print("name:", default_folder("vpt", [("data.mask", "mask.png"), ("seed", "1")]))
print("shared:", repr(portable(config).data.mask))
from mlmoe_jax.apps.export.run import describe_images
print("export:", describe_images(config).get("mask"))
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training.resume import changed_keys, config_of_run
folder = Path("stored")
(folder / "checkpoints").mkdir(parents=True)
(folder / "config.json").write_text(to_json(default_config()))
print("resume:", changed_keys(config, RunFolder(folder)))
config_of_run(config, RunFolder(folder))
"""
FOLLOWS = """\
help: data.mask (empty; for resize=square): Image whose black pixels are hidden in every image, such as the border of \
a microscope; if empty, none.
page: True
unused: [] ['data.mask has no effect, because data.resize is crop']
unread: thresholds calibrate encode
name: runs/vpt,seed=1
shared: ''
export: /home/ada/mask.png
resume: []
"""
BROKEN = {
    "nothing": ("", "", ""),
    "only_if": ('only_if={"resize": ("square",)},', "", "help: unused:"),
    "stages": ('stages=("image",),', "", "unread: export:"),
    "on_resume": ('on_resume="reported",', "", "name: resume:"),
    "type": ("PathKey(", "TextKey(", "shared:"),
}


@pytest.mark.parametrize("field", BROKEN)
@pytest.mark.variants("field")
@pytest.mark.budget(20)  # a process that imports jax
def test_everything_about_a_key_follows_from_its_declaration(extended, tmp_path, field):
    """Without one of its fields, other lines of the output differ."""
    shutil.copytree(extended, tmp_path, dirs_exist_ok=True)
    given, other, differing = BROKEN[field]
    declared = tmp_path / "mlmoe_jax" / "data" / "data_keys.py"
    before, name, text = declared.read_text().partition("    mask=")
    key, end, after = text.partition("\n    ),\n")
    declared.write_text("".join((before, name, key.replace(given, other), end, after)))
    done = subprocess.run(
        [sys.executable, "-c", MEANING],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    found, expected = done.stdout.splitlines(), FOLLOWS.splitlines()
    assert [line.split()[0] for line in expected if line not in found] == differing.split(), done.stdout + done.stderr
    assert ("the results can differ" in done.stderr) == (field != "on_resume")


def test_the_additions_are_formatted_like_the_package(extended):
    places = [block.partition("\n")[0] for language, block in BLOCKS if language == "python"]
    added = [(NEW_FILE.fullmatch(place) or NEW_ENTRY.fullmatch(place))[1] for place in places]
    ruff = Path(sys.executable).parent / "ruff"
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    settings = ["--config", str(REPOSITORY / "pyproject.toml"), "--no-cache"]
    for command in (["check", *settings], ["format", "--check", *settings]):
        done = subprocess.run([ruff, *command, *added], cwd=extended, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
