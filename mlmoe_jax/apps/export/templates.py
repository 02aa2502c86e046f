"""Files that make an exported folder an MLflow model or a Hugging Face Space. They use its load.py, not mlmoe_jax."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlmoe_jax.runtime.formats import dump_json

GRADIO = "6.31.0"  # the version of the tests
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_FRONT = """---
title: Multi-label image classifier
emoji: 🏷️
colorFrom: blue
colorTo: green
sdk: gradio
sdk_version: {gradio}
python_version: "{python}"
app_file: app.py
---

"""


def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


def mlflow_files(description: Mapping[str, Any], packages: Sequence[str], readme: str) -> dict[str, str]:
    """Return file name -> text of the files that let `mlflow.pyfunc.load_model` load an exported folder.

    The YAML files are written as JSON, which is valid YAML, so writing them does not need MLflow. `description` is the
    content of model.json, `packages` the requirements of load.py, and `readme` the text of the README.
    """
    inputs = [{"name": "image", "type": "binary"}, {"name": "path", "type": "string"}]
    signature = {
        "inputs": json.dumps([column | {"required": False} for column in inputs]),
        "outputs": json.dumps([{"name": label, "type": "float", "required": True} for label in description["labels"]]),
    }
    loading = {"loader_module": "mlmoe_pyfunc", "code": ".", "data": ".", "python_version": sys.version.split()[0]}
    model = {
        "flavors": {"python_function": loading | {"env": {"virtualenv": "python_env.yaml"}}},
        "metadata": {key: description[key] for key in ("labels", "thresholds")},
        "signature": signature,
    }
    environment = {"python": loading["python_version"], "dependencies": ["-r requirements.txt"]}
    return {
        "MLmodel": dump_json(model, indent=2) + "\n",
        "mlmoe_pyfunc.py": _source("mlmoe_pyfunc.py"),
        "python_env.yaml": json.dumps(environment, indent=2) + "\n",
        "requirements.txt": "\n".join(["mlflow", "pandas", *packages]) + "\n",
        "README.md": readme + "\nMLflow loads this folder: `mlflow.pyfunc.load_model(FOLDER)`.\n",
    }


def space_files(description: Mapping[str, Any], packages: Sequence[str], readme: str) -> dict[str, str]:
    """Return the files (name -> text) of a Space of the hub, a Gradio app; the arguments are as in `mlflow_files`."""
    return {
        "app.py": _source("space_app.py"),
        "requirements.txt": "\n".join(packages) + "\n",  # the Space installs Gradio itself
        "README.md": _FRONT.format(gradio=GRADIO, python=_PYTHON) + readme,
    }
