"""Exported folders that MLflow loads, and that are a Space of the Hugging Face hub."""

import json
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.documents import program_with
from helpers.exported import model_of
from helpers.outside import outside_python, run_outside
from helpers.tables import ImageTable
from PIL import Image

from mlmoe_jax.apps.export import templates
from mlmoe_jax.apps.export.run import loader
from mlmoe_jax.apps.export.targets import ExportTarget
from mlmoe_jax.runtime.formats import dump_json

SIDE, LABELS = 8, ["red", "green", "blue"]
DESCRIPTION = {
    "labels": LABELS,
    "thresholds": [0.5, 0.5, float("inf")],
    "attributes": {},
    "preprocess": {"image_size": SIDE, "resize": "square", "exif": "apply", "reduced_decoding": False},
}


def shares(folder):
    """A program whose probabilities are the means of the channels."""
    return lambda images: {"probability": (images.mean(axis=(1, 2)) / 255).astype(np.float32)}


@pytest.fixture
def exported(tmp_path):
    """A function that writes the folder of a template, and returns it with an image file of each color."""

    def write(files):
        folder, texts = tmp_path / "out", files(DESCRIPTION, ["numpy", "pillow"], "# A model\n")
        folder.mkdir()
        (folder / "load.py").write_text(loader(ExportTarget(None, shares)))
        (folder / "model.json").write_text(dump_json(DESCRIPTION))
        for name, text in texts.items():
            (folder / name).write_text(text)
        colors = {"red": (255, 0, 0), "gray": (128, 128, 128), "blue": (0, 0, 255)}
        paths = [tmp_path / f"{name}.png" for name in colors]
        for path, color in zip(paths, colors.values(), strict=True):
            Image.new("RGB", (20, 30), color).save(path)
        return folder, paths

    return write


SCORES = [[1, 0, 0], [128 / 255] * 3, [0, 0, 1]]


# -------------------------------------------------------------------------------------------------------------- Space
def test_the_page_of_a_space_shows_labels_at_their_thresholds(exported):
    folder, paths = exported(templates.space_files)
    label = runpy.run_path(str(folder / "app.py"))["label"]
    answers = [label(model_of(folder), str(path)) for path in paths]
    assert [labels for labels, _ in answers] == ["red", "red, green", ""]
    np.testing.assert_allclose([[*scores.values()] for _, scores in answers], SCORES, atol=1e-6)
    assert [*answers[0][1]] == LABELS
    assert label(model_of(folder), None) == ("", {})


def test_the_readme_of_a_space_says_what_runs_it(exported):
    yaml = pytest.importorskip("yaml", reason="pip install '.[dev]'")
    folder, _ = exported(templates.space_files)
    nothing, front, text = (folder / "README.md").read_text().split("---\n", 2)
    settings = yaml.safe_load(front)
    assert nothing == ""
    assert (settings["sdk"], settings["app_file"]) == ("gradio", "app.py")
    assert all(isinstance(value, str) for value in settings.values()), "3.10 as a number would be 3.1"
    assert text.strip() == "# A model"
    assert (folder / "requirements.txt").read_text() == "numpy\npillow\n"


_PAGE = """
import runpy, sys
import gradio
from gradio_client import Client, handle_file
folder, *paths = sys.argv[1:]
sys.path.insert(0, folder)
from load import Model
page = runpy.run_path(folder + "/app.py")["page"](Model())
_, address, _ = page.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
client = Client(address, verbose=False)
for path in paths:
    labels, scores = client.predict(handle_file(path), api_name="/label")
    print(gradio.__version__, labels, scores["label"])
try:
    client.predict(handle_file(folder + "/damaged.png"), api_name="/label")
except Exception as error:
    print(error)
page.close()
"""


@pytest.mark.slow
def test_gradio_answers_with_the_page_of_a_space(exported):
    python = outside_python("gradio")
    folder, paths = exported(templates.space_files)
    (folder / "damaged.png").write_bytes(paths[0].read_bytes()[:50])
    printed = run_outside(python, _PAGE, folder, *paths, GRADIO_ANALYTICS_ENABLED="False").splitlines()
    assert printed[:2] == [f"{templates.GRADIO} red red", f"{templates.GRADIO} red, green red"]
    assert "image cannot be read" in printed[3]


# ------------------------------------------------------------------------------------------------------------- MLflow
def test_a_table_of_files_or_bytes_becomes_a_table_of_probabilities(exported, monkeypatch):
    folder, paths = exported(templates.mlflow_files)
    frames = []
    frame = lambda scores, index, columns: frames.append((scores, index, columns))  # noqa: E731
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=frame))
    loading = json.loads((folder / "MLmodel").read_text())["flavors"]["python_function"]
    code = runpy.run_path(str(folder / f"{loading['loader_module']}.py"))
    model = code["_load_pyfunc"](str(folder / loading["data"]))
    contents = [path.read_bytes() for path in paths]
    for table in (ImageTable(path=[str(path) for path in paths]), ImageTable(image=contents, path=[None] * 3)):
        model.predict(table)
        scores, index, columns = frames.pop()
        np.testing.assert_allclose(scores, SCORES, atol=1e-6)
        assert (index, columns) == ("abc", LABELS)
    many = ImageTable(image=contents * 30)
    model.predict(many)
    np.testing.assert_allclose(frames.pop()[0], SCORES * 30, atol=1e-6)
    for wrong in (ImageTable(image=[contents[0], None]), ImageTable(image=contents, path=paths)):
        with pytest.raises(ValueError, match="should have one column"):
            model.predict(wrong)


def test_the_model_file_of_mlflow_has_signature_and_thresholds(exported):
    folder, _ = exported(templates.mlflow_files)
    described = json.loads((folder / "MLmodel").read_text())
    assert [column["name"] for column in json.loads(described["signature"]["outputs"])] == LABELS
    assert described["metadata"]["thresholds"] == [0.5, 0.5, None]
    assert "numpy\npillow\n" in (folder / "requirements.txt").read_text()
    assert {name for name in templates.mlflow_files(DESCRIPTION, [], "")} <= {file.name for file in folder.iterdir()}


_LOADED = """
import base64, json, sys, warnings
import mlflow, pandas
folder, *paths = sys.argv[1:]
warnings.simplefilter("error", FutureWarning)
model = mlflow.pyfunc.load_model(folder)
contents = [open(path, "rb").read() for path in paths]
tables = [model.predict(pandas.DataFrame(columns)) for columns in ({"path": paths}, {"image": contents})]
assert tables[0].equals(tables[1])
from mlflow.pyfunc.scoring_server import init
from fastapi.testclient import TestClient
rows = [[base64.b64encode(content).decode()] for content in contents]
body = {"dataframe_split": {"columns": ["image"], "data": rows}}
answer = TestClient(init(model)).post("/invocations", json=body)
served = pandas.DataFrame(answer.json()["predictions"])
assert (served - tables[0]).abs().to_numpy().max() < 1e-6
assert "mlmoe_jax" not in sys.modules
print(json.dumps([list(tables[0]), tables[0].to_numpy().tolist(), model.metadata.metadata["labels"]]))
"""


@pytest.mark.slow
def test_mlflow_loads_and_serves_the_folder(exported):
    python = outside_python("mlflow")
    folder, paths = exported(templates.mlflow_files)
    printed = run_outside(python, _LOADED, folder, *paths, MLFLOW_DISABLE_TELEMETRY="true")
    columns, scores, labels = json.loads(printed.splitlines()[-1])
    assert columns == labels == LABELS
    np.testing.assert_allclose(scores, SCORES, atol=1e-6)
    for path, name in zip(paths, ("a.jpg", "b.png"), strict=False):
        path.rename(folder.parent / name)
    folder.rename(folder.parent / "classifier")
    documented = program_with("mlflow", "deployment.md")
    assert "0.501961" in run_outside(python, documented, cwd=folder.parent, MLFLOW_DISABLE_TELEMETRY="true")
