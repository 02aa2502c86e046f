"""OpenVINO, if it is installed, gives the probabilities of ONNX Runtime."""

import numpy as np
import pytest
from helpers.documents import blocks
from helpers.exported import CNNS, ON_VIT, random_run
from helpers.paths import REPOSITORY

from mlmoe_jax.apps.export.targets import ALWAYS, TARGETS, Export

SHOWN = blocks(REPOSITORY / "docs" / "deployment.md", "python", "Export")
[PROGRAM] = [block.text for block in SHOWN if "openvino" in block.text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "changes"), [("mlvpt_digits", ON_VIT), ("linear_probe", CNNS["efficientnet_lite0"])]
)
def test_openvino_gives_the_same_probabilities(reference, changes, small_backbones, tmp_path, monkeypatch, capsys):
    pytest.importorskip("openvino", reason="openvino is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    TARGETS["onnx"].write(Export(random_run(reference, **changes), tmp_path, {}, ALWAYS))
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(PROGRAM, names)
    assert capsys.readouterr().out == "(2, 6)\n"
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    pixels = np.random.default_rng(1).integers(0, 256, (5, 32, 32, 3)).astype(np.uint8)
    for count in (1, 2, 5):
        scores = names["program"]({"image": pixels[:count]})["probability"]
        expected = session.run(None, {"image": pixels[:count]})[0]
        np.testing.assert_allclose(scores, expected, atol=1e-4)
