"""What is installed, what is imported, and that the two agree."""

import ast
import functools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.apps import serving
from mlmoe_jax.models.backbones.catalog import CATALOG
from tools.docs.source import parse_source

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())

# a distribution -> the module that it installs, where the names differ
MODULES = {
    "orbax-checkpoint": "orbax",
    "scikit-learn": "sklearn",
    "pyyaml": "yaml",
    "pillow": "PIL",
    "absl-py": "absl",
    "huggingface-hub": "huggingface_hub",
    "tensorflow-datasets": "tensorflow_datasets",
    "tensorboardx": "tensorboardX",
    "vl-convert-python": "vl_convert",
}


# Required for parts of JAX that use them without requiring them: jax.export and the compilation cache.
INDIRECT = {"flatbuffers", "filelock"}
# Imported by one function each, which says how to install them.
OF_EXTRAS = {"jax2onnx", "onnx", "onnxruntime", "mlflow", "pillow_heif", "av"}
# Copied into an export, whose README lists the packages that they need.
COPIED = {"standalone.py", "space_app.py", "mlmoe_pyfunc.py"}


@functools.cache
def imported() -> set[str]:
    """The top-level modules that some file of the package imports, also inside functions."""
    found = set()
    files = [file for file in (REPOSITORY / "mlmoe_jax").rglob("*.py") if file.name not in COPIED]
    for file in files:
        for node in ast.walk(parse_source(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.partition(".")[0])
    return found


def required() -> dict[str, str]:
    """Distribution -> module, of requirements.txt."""
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    names = [re.match(r"[\w.-]+", line).group().lower() for line in lines if line and not line.startswith("#")]
    return {name: MODULES.get(name, name.replace("-", "_")) for name in names}


def test_every_folder_with_python_files_is_installed():
    settings = PROJECT["tool"]["setuptools"]
    moved = settings["package-dir"]
    folders = {file.parent for file in (REPOSITORY / "mlmoe_jax").rglob("*.py")}
    expected = {".".join(folder.relative_to(REPOSITORY).parts) for folder in folders} | set(moved)
    assert sorted(settings["packages"]) == sorted(expected)
    assert len(settings["packages"]) == len(set(settings["packages"]))
    for name, folder in moved.items():
        assert list((REPOSITORY / folder).glob("*.py")), name


def test_an_index_gets_no_relative_link_and_no_package_of_an_extra():
    pytest.importorskip("setuptools")
    made = runpy.run_path(str(REPOSITORY / "setup.py"))
    page = "[Guide](docs/a.md#b) ![x](c.png) [e](https://e.org)"
    assert made["absolute_links"](page) == "Guide x [e](https://e.org)"
    linked = "[Guide](https://h/r/docs/a.md#b) ![x](https://h/r/c.png) [e](https://e.org)"
    assert made["absolute_links"](page, "https://h/r") == linked
    assert not re.findall(r"\]\((?!https://)[^)]*\)", made["absolute_links"]((REPOSITORY / "README.md").read_text()))
    assert set(required()) - {re.match(r"[\w.-]+", line).group().lower() for line in made["requirements"]()} == {
        "tensorflow-datasets"
    }


def test_a_wheel_holds_everything(tmp_path, monkeypatch):
    """What goes into a wheel is what setuptools copies."""
    distribution = pytest.importorskip("setuptools").Distribution
    settings = PROJECT["tool"]["setuptools"]
    monkeypatch.chdir(REPOSITORY)
    names = {"packages": "packages", "package_dir": "package-dir", "package_data": "package-data"}
    built = distribution({"script_name": "", **{name: settings[key] for name, key in names.items()}})
    copying = built.get_command_obj("build_py")
    copying.build_lib = str(tmp_path)
    copying.ensure_finalized()
    copying.run()

    def files(folder):
        return {
            file.relative_to(folder).as_posix()
            for file in folder.rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }

    expected = files(REPOSITORY / "mlmoe_jax") | {f"configs/{name}" for name in files(REPOSITORY / "configs")}
    assert files(tmp_path / "mlmoe_jax") == expected
    assert "py.typed" in expected


@pytest.mark.slow
def test_wheel_and_sdist_work_in_an_environment_of_their_own(tmp_path):
    """The wheel is made of the sdist, and installed without the checkout beside the dependencies of this one."""
    pytest.importorskip("setuptools", minversion="77", reason="pip install '.[dev]'")
    source, unpacked, environment = tmp_path / "source", tmp_path / "unpacked", tmp_path / "environment"
    options = {"capture_output": True, "text": True, "check": True}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, **options).stdout
    for name in filter(None, listed.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)

    def built(kind: str, folder: Path) -> Path:
        code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(tmp_path)!r}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, **options)
        return tmp_path / done.stdout.splitlines()[-1]

    shutil.unpack_archive(built("sdist", source), unpacked, filter="data")
    [folder] = unpacked.iterdir()
    wheel = built("wheel", folder)
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    [packages] = environment.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))

    code = (
        "import importlib.metadata as m, mlmoe_jax as mm\n"
        "from pathlib import Path\n"
        "assert m.version('mlmoe-jax') == mm.__version__\n"
        "assert (Path(mm.__file__).parent / 'py.typed').exists()\n"
        "print(len(m.requires('mlmoe-jax')), mm.__file__)\n"
        "print(mm.load_backbone('vit_digits').preprocess.image_size)"
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    options |= {"cwd": tmp_path, "env": clean}
    count, file, size = subprocess.run([python, "-c", code], **options).stdout.split()
    extras = PROJECT["project"]["optional-dependencies"].values()
    assert int(count) == len(required()) - 1 + sum(map(len, extras)), (
        "all but tensorflow-datasets, which is in an extra"
    )
    assert file == str(packages / "mlmoe_jax" / "__init__.py")
    assert size == "64"
    command = [environment / "bin" / "mlmoe", "--mode=summary", "--config=linear_probe:dataset=digits", "--json"]
    assert json.loads(subprocess.run(command, **options).stdout)


def test_the_command_exists():
    module, function = PROJECT["project"]["scripts"]["mlmoe"].split(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_every_requirement_is_used():
    modules = imported() | INDIRECT | {entry.weights.package.partition("/")[0] for entry in CATALOG.values()}
    assert not {name for name, module in required().items() if module not in modules}


def test_everything_that_is_imported_is_required():
    foreign = imported() - set(sys.stdlib_module_names) - {"mlmoe_jax"}
    of_server = {
        line.partition(">")[0].replace("-", "_") for line in PROJECT["project"]["optional-dependencies"]["serve"]
    }
    assert set(serving.LIBRARIES) == of_server, "a missing one is told"
    assert foreign <= set(required().values()) | OF_EXTRAS | of_server
    pattern = rf"^\s*(import|from) ({'|'.join(of_server)})\b"
    files = [file for file in (REPOSITORY / "mlmoe_jax").rglob("*.py") if file.parent.name != "serving"]
    outside = [file for file in files if re.search(pattern, file.read_text(), re.MULTILINE)]
    assert not outside, "the rest works without the extra"
    assert "torch" not in foreign


@pytest.mark.parametrize("name", ["base", "tpu", "cuda", "serve"])
def test_lock_files_have_every_requirement(name):
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    lines += PROJECT["project"]["optional-dependencies"].get(name, [])
    wanted = {re.split(r"[\[<>=! ]", line)[0].lower().replace("_", "-") for line in lines if line and line[0] != "#"}
    entries = re.findall(r"^([a-z0-9-]+)==((?:.*\n)(?: .*\n)*)", (REPOSITORY / f"locks/{name}.lock").read_text(), re.M)
    assert not wanted - dict(entries).keys(), "run: bash locks/make.sh"
    assert all("--hash=sha256:" in rest for _, rest in entries)


def test_nothing_tells_people_to_install_this_package_from_an_index():
    """No such package is on the index: anybody could register the name."""
    from_index = re.compile(r"pip install (?!-e )[^\n`]*\bmlmoe[-_.]jax\b|\bmlmoe[-_.]jax\[", re.IGNORECASE)
    assert from_index.search('pip install "mlmoe-jax[serve]"')
    assert not from_index.search("pip install -e mlmoe_jax")
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    told = [REPOSITORY / line for line in listed.splitlines() if not line.startswith("tests/")]
    assert [str(path) for path in told if from_index.search(path.read_text(errors="ignore"))] == []
