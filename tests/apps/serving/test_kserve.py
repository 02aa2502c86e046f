"""The routes of the Open Inference Protocol, without sockets; test_serving_process.py asks with Triton's client."""

import json

import numpy as np
from helpers.color_model import NAMES, color, expected
from helpers.color_server import BINARY, INFER, binary, message

URL = INFER.removesuffix("/infer")
SCORES = [expected(150, 90, 200), expected(20, 130, 99)]


def assert_scores(tensor: dict) -> None:
    np.testing.assert_allclose(np.reshape(tensor["data"], (2, -1)), SCORES, rtol=1e-4)


def test_files_in_base64_are_labeled(ask):
    answer = ask(200, INFER, json=message())
    assert (answer["model_name"], answer["id"]) == ("classifier", "7")
    scores, labels = answer["outputs"]
    assert (scores["name"], scores["datatype"], scores["shape"]) == ("probability", "FP32", [2, len(NAMES)])
    assert_scores(scores)
    assert labels == {"name": "labels", "datatype": "BYTES", "shape": [2], "data": ["red;blue;dark", "green;dark"]}
    [best] = ask(200, INFER, json=message(("labels", {}), parameters={"top_k": 1}))["outputs"]
    assert best["data"] == ["blue", "green"]


def test_binary_tensors_in_both_directions(ask):
    request = message(("labels", {"binary_data": True}), ("probability", {"binary_data": True}), size=len(BINARY))
    answer = ask(200, INFER, **binary(request))
    length = int(answer.headers["inference-header-content-length"])
    head, content = json.loads(answer.content[:length]), answer.content[length:]
    texts = b"\x0d\0\0\0red;blue;dark\x0a\0\0\0green;dark"
    assert content.startswith(texts)
    sizes = [tensor.pop("parameters") for tensor in head["outputs"]]
    assert sizes == [{"binary_data_size": len(texts)}, {"binary_data_size": 32}]
    assert head["outputs"][1] == {"name": "probability", "datatype": "FP32", "shape": [2, 4]}
    np.testing.assert_allclose(np.frombuffer(content[len(texts) :], "<f4").reshape(2, 4), SCORES, rtol=1e-4)


def test_pixels_at_the_size_of_the_model(ask):
    pixels = np.stack([color(150, 90, 200), color(20, 130, 99)])
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [2, 4, 4, 3]}
    for data in (pixels.tolist(), pixels.ravel().tolist()):
        scores, _ = ask(200, INFER, json={"inputs": [tensor | {"data": data}]})["outputs"]
        assert_scores(scores)
    raw = {"inputs": [tensor | {"parameters": {"binary_data_size": pixels.nbytes}}]}
    answer, _ = ask(200, INFER, **binary(raw, pixels.tobytes()))["outputs"]
    assert answer == scores


def test_the_server_and_its_model_describe_themselves(ask):
    assert ask(200, "/v2", "GET")["extensions"] == ["binary_tensor_data"]
    assert ask(200, "/v2/health/live", "GET") == {"live": True}
    assert ask(200, "/v2/health/ready", "GET") == ask(200, f"{URL}/ready", "GET") == {"ready": True}
    model = ask(200, URL, "GET")
    assert [tensor["shape"] for tensor in model["inputs"]] == [[-1], [-1, 4, 4, 3]]
    assert [tensor["datatype"] for tensor in model["outputs"]] == ["FP32", "BYTES"]
    assert [label["name"] for label in model["labels"]] == list(NAMES)
