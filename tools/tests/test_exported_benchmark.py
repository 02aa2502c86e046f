"""`python -m benchmarks.exported`: its images, its times and its table."""

import numpy as np
import pytest
from helpers import tiny

from benchmarks import exported


def test_a_split_is_read_as_in_evaluation(run):
    images, label, mask = exported.read_split(run("published").folder, "val")
    assert (images.shape, images.dtype) == ((tiny.FEW["val"], 8, 8, 3), np.uint8)
    assert label.shape == mask.shape == (tiny.FEW["val"], 10)
    assert 0 < label.mean() < 1


def test_the_shortest_of_the_times_counts(monkeypatch):
    clock = iter([0, 5, 5, 6, 6, 8, 8, 12])  # a takes 5 and then 2 seconds, b 1 and then 4
    monkeypatch.setattr(exported.time, "perf_counter", lambda: next(clock))
    programs = dict.fromkeys("ab", lambda images: images)
    assert exported.times(programs, np.zeros((1, 2, 2, 3), np.uint8), 2) == {"a": 2, "b": 1}


def test_ratios_in_the_table_are_to_the_first_program():
    rows = {
        "float32": {"bytes": 4e6, "mAP": 0.75, "1": 0.5, "8": 2.0},
        "int8": {"bytes": 1e6, "mAP": 0.74, "1": 0.25, "8": 0.5},
    }
    *_, first, second = exported.table(rows, [1, 8]).splitlines()
    assert first == "| float32 | 4.0 | 1.00 | 75.00 | +0.00 | 2.0 | 1.00 | 4.0 | 1.00 |"
    assert second == "| int8 | 1.0 | 0.25 | 74.00 | -1.00 | 4.0 | 2.00 | 16.0 | 4.00 |"


def test_a_program_is_opened(tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
    image = onnx.helper.make_tensor_value_info("image", onnx.TensorProto.UINT8, ["B", 2, 2, 3])
    probability = onnx.helper.make_tensor_value_info("probability", onnx.TensorProto.FLOAT, ["B", 2, 2, 3])
    node = onnx.helper.make_node("Cast", ["image"], ["probability"], to=onnx.TensorProto.FLOAT)
    graph = onnx.helper.make_graph([node], "cast", [image], [probability])
    opset = onnx.helper.make_opsetid("", 21)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), tmp_path / "model.onnx")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    np.testing.assert_array_equal(exported.opened(tmp_path, 1)(pixels), pixels)
