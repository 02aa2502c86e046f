"""The notebooks of the documentation run, and store the outputs that the site shows."""

import os
import sys

import pytest
from helpers.paths import REPOSITORY

from tools.docs import build_site as site

nbformat = pytest.importorskip("nbformat", reason="pip install '.[dev]'")
NOTEBOOKS = sorted((REPOSITORY / "docs").rglob("*.ipynb"))
FEW_SCENES = "from helpers import tiny; tiny.use_scenes(train=128, val=32, test=32, test_shift=32)"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """On few scenes, so that it takes seconds."""
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason="pip install '.[dev]'")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), *sys.path]))
    notebook = site.executed(path, tmp_path, FEW_SCENES)
    stored = nbformat.read(path, as_version=4)
    for ran, shown in zip(notebook.cells, stored.cells, strict=True):
        kinds = [[output.output_type for output in cell.get("outputs", ())] for cell in (ran, shown)]
        assert kinds[0] == kinds[1], "run: python -m tools.docs.build_site --run-notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_stores_outputs_without_paths(path):
    stored = nbformat.read(path, as_version=4)
    texts = [output.get("text", "") for cell in stored.cells for output in cell.get("outputs", ())]
    assert any(texts)
    assert not [text for text in texts if "/home/" in text or "/tmp/" in text or str(REPOSITORY) in text]
    assert os.path.getsize(path) < 500_000
