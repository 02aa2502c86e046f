"""What the README, the pages of docs/ and the configs tell people to type: every command and program of them.

All commands are parsed as the program parses them, and their configs load and are valid. With --all, those that train
and use digits really run, on few scenes.
"""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny
from helpers.devices import environment_of
from helpers.documents import CONFIGS, NOTES, PAGES, Block, blocks, commands_in_text, programs
from helpers.paths import REPOSITORY
from PIL import Image

from benchmarks.measure.options import parse as read_options
from mlmoe_jax.apps.cli.commands import COMMANDS
from mlmoe_jax.apps.cli.flags import parse_flags as parse
from mlmoe_jax.apps.papers import grid
from mlmoe_jax.apps.papers.grid import plan_runs
from mlmoe_jax.apps.papers.request import parse_request
from mlmoe_jax.config import default_config, load_config, split_references, validate
from mlmoe_jax.config.reference import describe_config
from mlmoe_jax.data.containers import reach
from mlmoe_jax.runs.folder import RunFolder
from tools.docs.source import parse_source

FOREIGN = {"docker", "find", "gcloud", "git", "kubectl", "pip", "ssh-add", "ssh-keygen", "tensorboard", "xpk"}
FOREIGN |= {"curl", "hf", "uv", "mkdir", "tar", "unzip"}
BLANK = "…"  # what the reader fills in
FILLED = {"--config": "mlvpt_digits", "--configs": "mlvpt_digits", "--table": "mlvpt.1"}
# Pages whose programs have tests of their own, which write the files that the programs import or stand in for the hub.
FOLLOWED_ELSEWHERE = {"extending.md", "api.md", "corpus.md", "deployment.md"}
GENERATED = {"configuration.md"}
EXECUTED = {"labels-by-name.md"}  # by a test of its own, because its configs read files that its commands write

CHECKED = [page for page in (*PAGES, *NOTES, *CONFIGS) if page.name not in GENERATED | EXECUTED | {"extending.md"}]
SHELL = [block for page in CHECKED for block in blocks(page, "bash")]
PROSE = [block for page in CHECKED for block in commands_in_text(page)]
PYTHON = [block for page in PAGES if page.name not in FOLLOWED_ELSEWHERE for block in blocks(page, "python")]


# ------------------------------------------------------------------------------------------------------- as parsed
def fill(word: str) -> str:
    """Return a word with a value that the program accepts for BLANK."""
    return word.replace(f"={BLANK}", f"={FILLED.get(word.partition('=')[0], 'x')}")


def completed(words: list[str]) -> list[str]:
    """Return a command in prose, such as `mlmoe predict`, with the flags that its mode needs."""
    modes = [word.removeprefix("--mode=") for word in words if word.removeprefix("--mode=") in COMMANDS]
    given = {word.partition("=")[0] for word in words}
    if not modes or "--help" in given:
        return words
    needed = [f"--{name}" for name in COMMANDS[modes[0]].needs]
    return words + [f"{flag}={BLANK}" for flag in needed if flag not in given]


def check_main(arguments: list[str]) -> None:
    """Assert that the program takes these arguments, and that their config loads and is valid."""
    if "--help" in arguments:
        with pytest.raises(SystemExit):
            parse(arguments)
        return
    if topics := [word.removeprefix("--help=") for word in arguments if word.startswith("--help=")]:
        assert all(map(describe_config, topics))
        return
    flags, overrides = parse(list(map(fill, arguments)))
    config, configs, sweep = (vars(flags).get(name) for name in ("config", "configs", "sweep"))
    for reference in filter(None, [config, *split_references(configs or "")]):
        config = load_config(reference, overrides)
        if sweep:
            axes = grid.parse_sweep(sweep, config)
            plan_runs(grid.combine_axes([grid.GridPoint("", {}, config)], axes), RunFolder("none"))
        else:
            validate(config)
    if flags.mode == "reproduce":
        options = {"only": flags.only, "dataset": flags.dataset, "root": flags.root, "seeds": flags.seeds}
        parse_request(flags.table, overrides=overrides, **options)
    if sweep and not config:
        for reference in grid.parse_sweep(sweep, default_config())[grid.METHOD]:
            validate(load_config(reference, overrides))


def check_module(name: str, arguments: list[str]) -> None:
    """Assert that a module that can be run has these flags, and that the configs among their values load."""
    place = Path(importlib.util.find_spec(name).origin)
    source = (place.with_name("__main__.py") if place.name == "__init__.py" else place).read_text()
    assert 'if __name__ == "__main__":' in source
    if name == "benchmarks.measure" and arguments:
        read_options(importlib.import_module(f"{name}.{arguments[0]}").Options, arguments[1:], name, "")
        return
    for word in arguments:
        if word.startswith("--") and not word.startswith("--config."):
            assert f'"{word.partition("=")[0]}"' in source, word
        elif ":dataset=" in word:
            validate(load_config(word, []))


def check_launch(script: str, arguments: list[str]) -> None:
    """Assert that a launch script knows the flags of its own, and the program those that follow `--`."""
    text = (REPOSITORY / script).read_text()
    assert subprocess.run(["bash", "-n", REPOSITORY / script], check=False).returncode == 0
    if script in ("launch/local.sh", "launch/multiprocess.sh", "launch/slurm.sbatch"):
        own, rest = [], [word for word in arguments if word.startswith("--")]
    else:
        own, rest = arguments, []
        if "--" in arguments:
            at = arguments.index("--")
            own, rest = arguments[:at], arguments[at + 1 :]
    for flag in (word.partition("=")[0] for word in own if word.startswith("--")):
        assert flag.removeprefix("--") in text, f"{script} has no {flag}"
    if rest:
        check_main(rest)


def check(words: list[str]) -> None:
    """Assert that one program, with its arguments, is there and would take them."""
    match words:
        case ["python", "-m", "mlmoe_jax.main", *arguments] | ["mlmoe", *arguments]:
            check_main(arguments)
        case ["python", "-c", program]:
            compile(program, "", "exec")
        case ["python", "-m", module, *arguments]:
            check_module(module, arguments)
        case ["bash", script, *arguments]:
            check_launch(script, arguments)
        case ["python", ("load.py" | "exported/load.py" | "exported_onnx/load.py"), *_]:
            pass  # a file of an exported model
        case ["sbatch", *arguments]:
            at = arguments.index("launch/slurm.sbatch")
            check_launch(arguments[at], arguments[at + 1 :])
        case [program, *_]:
            assert program in FOREIGN, words


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_documented_command_is_understood(block, monkeypatch):
    monkeypatch.setattr(reach, "find_commit", lambda address: (address, ["train.parquet"]))  # no network
    monkeypatch.syspath_prepend(REPOSITORY)  # for benchmarks and tools
    monkeypatch.chdir(REPOSITORY)
    for words in programs(block):
        check(words)


@pytest.mark.parametrize("block", PROSE, ids=str)
def test_a_command_in_prose_is_understood(block, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY)
    monkeypatch.chdir(REPOSITORY)
    for words in programs(block):
        check(completed(words))


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_command_of_a_page_is_overlooked(page):
    found = [words for block in SHELL + PROSE if block.page == page for words in programs(block)]
    modules = [words[2] for words in found if words[:2] == ["python", "-m"]]
    text = re.sub("```text.*?```", "", page.read_text(), flags=re.DOTALL)  # what a command prints
    assert modules.count("mlmoe_jax.main") == text.count("python -m mlmoe_jax.main")
    assert sum(words[0] == "mlmoe" for words in found) == len(re.findall(r"(?<![\w/-])mlmoe (?=[a-z-])", text))
    for folder in ("benchmarks.", "tools."):
        assert sum(name.startswith(folder) for name in modules) == text.count(f"python -m {folder}")


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_documented_program_imports_what_exists(block):
    """It compiles, and what it imports, and takes from what it imports, is there."""
    tree, modules = parse_source(block.text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.partition(".")[0]] = importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), ast.unparse(node)


# ---------------------------------------------------------------------------------------------------------- as run
RUNNER = """
import re, sys
from pathlib import Path
from mlmoe_jax.apps.cli.flags import parse_flags as parse

_, module, *arguments = sys.argv[1:]

def runs():
    if module != "mlmoe_jax.main":
        return module == "mlmoe_jax.data.sources.digits"
    flags, _ = parse(arguments)
    get = vars(flags).get
    config, workdir = get("config") or "", get("workdir")
    folders = workdir if isinstance(workdir, list) else [workdir]
    there = all(Path(folder or ".").exists() for folder in [*folders, get("against")])
    own_images = flags.mode in ("data", "pack") and "own_csv" in config
    of_digits = re.search("mlvpt_digits|dataset=digits$", config)
    if of_digits and flags.mode == "train":
        arguments.append("--config.train.epochs=2")
    ends = flags.mode != "serve" and not get("profile")  # a small training has no step 100
    of_run = not config and workdir and there and not get("sweep")
    return ends and (flags.mode == "summary" or own_images or of_digits or of_run)

if runs():
    from helpers import tiny
    from mlmoe_jax.data.sources import digits
    from mlmoe_jax.main import main

    tiny.use()
    tiny.use_scenes()
    if module == "mlmoe_jax.main":
        Path("done").open("a").write(" ".join(arguments) + "\\n")
        sys.exit(main(arguments))
    digits.write_files(Path(arguments[0].removeprefix("--out=")))
"""
# Other programs would set machines up or install packages.
SHELL_OF_DIGITS = """
set -euo pipefail
python() { "$PYTHON" runner.py "$@"; }
mlmoe() { python -m mlmoe_jax.main "$@"; }
bash() { :; }
sbatch() { :; }
pip() { :; }
curl() { :; }
uv() { :; }
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder in which digits and its backbone are small, with images of one's own and two trained runs."""
    folder = tmp_path_factory.mktemp("documented")
    tiny.write_cache(folder)
    (folder / "runner.py").write_text(RUNNER)
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    (folder / "photos").mkdir()
    rows, draw = ["image,labels"], np.random.default_rng(0)
    for number in range(20):
        image = Image.fromarray(draw.integers(0, 256, (64, 64, 3), dtype=np.uint8))
        image.save(folder / "photos" / f"{number}.jpg")
        rows.append(f"{number}.jpg,{'sea;boat' if number % 2 else 'sea'}")
    (folder / "photos" / "labels.csv").write_text("\n".join(rows) + "\n")
    for name in ("a.jpg", "b.png"):
        image.save(folder / name)
    run_shell(folder, "python -m mlmoe_jax.main --config=mlvpt_digits --workdir=runs/digits")
    run_shell(folder, "python -m mlmoe_jax.main --config=linear_probe:dataset=digits --workdir=runs/probe")
    return folder


def run_shell(folder: Path, text: str) -> list[str]:
    """Run a block's commands on digits, as a shell does; return which ran."""
    (folder / "done").write_text("")
    environment = environment_of(PYTHON=sys.executable, MLMOE_CACHE=str(folder))
    command = ["bash", "-c", SHELL_OF_DIGITS + text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return (folder / "done").read_text().splitlines()


OF_DIGITS = {"README.md": 1, "getting-started.md": 10, "evaluation.md": 5, "methods.md": 1}


@pytest.mark.slow
@pytest.mark.parametrize("page", OF_DIGITS)
def test_the_documented_commands_on_digits_run(place, page):
    """They are meant to work in the order in which a page shows them."""
    shown = [block for path in PAGES if path.name == page for block in blocks(path, "bash")]
    ran = [line for block in shown for line in run_shell(place, block.text)]
    assert len(ran) >= OF_DIGITS[page], ran


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_documented_program_runs(block: Block, place):
    program = f"from helpers import tiny\ntiny.use()\ntiny.use_scenes()\n{block.text}"
    environment = environment_of(PYTHONPATH=os.pathsep.join(sys.path), MLMOE_CACHE=str(place))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
