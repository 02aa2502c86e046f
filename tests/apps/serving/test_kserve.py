"""The routes of the Open Inference Protocol, without sockets; test_serving_process.py asks with Triton's client."""

import base64
import json
import struct

import numpy as np
import pytest
from helpers.color_model import NAMES, color, expected
from helpers.color_server import make_labeler, make_service, png, with_client

from mlmoe_jax.apps.serving.labeler import RequestLimits
from mlmoe_jax.apps.serving.server import make_app
from mlmoe_jax.apps.serving.service import Service

URL = "/v2/models/classifier"
TENSOR = {"name": "image", "datatype": "BYTES", "shape": [2]}
FILES = [png(color(150, 90, 200)), png(color(20, 130, 99))]
SCORES = [expected(150, 90, 200), expected(20, 130, 99)]
BINARY = b"".join(struct.pack("<I", len(file)) + file for file in FILES)
TEXTS = [base64.b64encode(file).decode() for file in FILES]


@pytest.fixture(scope="module")
def labeler():
    labeler = make_labeler()
    labeler.compile()
    return labeler


@pytest.fixture
def ask(labeler):
    """A function that sends one request and returns its answer, after a look at the status."""

    def call(status, path=f"{URL}/infer", method="POST", service=None, **request):
        async def use(client):
            return await client.request(method, path, **request)

        answer = with_client(service or Service(labeler), use)
        assert answer.status_code == status, answer.text
        if status != 200:
            assert list(answer.json()) == ["error"]
        return answer

    return call


def message(*outputs, size=None, **changes):
    """The JSON of a request with the files; with `size`, for binary data of this size after it."""
    content = {"data": TEXTS} if size is None else {"parameters": {"binary_data_size": size}}
    parameters = changes.pop("parameters", {})
    listed = {"outputs": [{"name": name, "parameters": more} for name, more in outputs]} if outputs else {}
    return {"id": "7", "parameters": parameters, "inputs": [TENSOR | content | changes], **listed}


def binary(head, content=BINARY, length=None):
    text = json.dumps(head).encode()
    return {"content": text + content, "headers": {"Inference-Header-Content-Length": length or str(len(text))}}


def test_files_in_base64_are_labeled(ask):
    answer = ask(200, json=message()).json()
    assert (answer["model_name"], answer["id"]) == ("classifier", "7")
    scores, labels = answer["outputs"]
    assert (scores["name"], scores["datatype"], scores["shape"]) == ("probability", "FP32", [2, len(NAMES)])
    np.testing.assert_allclose(np.reshape(scores["data"], (2, -1)), SCORES, rtol=1e-4)
    assert labels == {"name": "labels", "datatype": "BYTES", "shape": [2], "data": ["red;blue;dark", "green;dark"]}
    (best,) = ask(200, json=message(("labels", {}), parameters={"top_k": 1})).json()["outputs"]
    assert best["data"] == ["blue", "green"]


def test_binary_tensors_in_both_directions(ask):
    request = message(("labels", {"binary_data": True}), ("probability", {"binary_data": True}), size=len(BINARY))
    answer = ask(200, **binary(request))
    length = int(answer.headers["inference-header-content-length"])
    head, content = json.loads(answer.content[:length]), answer.content[length:]
    labels, scores = (content[: head["outputs"][0]["parameters"]["binary_data_size"]], content[-32:])
    assert labels == struct.pack("<I13sI10s", 13, b"red;blue;dark", 10, b"green;dark")
    assert head["outputs"][1] == {
        "name": "probability",
        "datatype": "FP32",
        "shape": [2, 4],
        "parameters": {"binary_data_size": 32},
    }
    assert len(content) == len(labels) + 32
    np.testing.assert_allclose(np.frombuffer(scores, "<f4").reshape(2, 4), SCORES, rtol=1e-4)


def test_pixels_at_the_size_of_the_model(ask):
    pixels = np.stack([color(150, 90, 200), color(20, 130, 99)])
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [2, 4, 4, 3]}
    for data in (pixels.tolist(), pixels.ravel().tolist()):
        (scores, _) = ask(200, json={"inputs": [tensor | {"data": data}]}).json()["outputs"]
        np.testing.assert_allclose(np.reshape(scores["data"], (2, -1)), SCORES, rtol=1e-4)
    raw = {"inputs": [tensor | {"parameters": {"binary_data_size": pixels.nbytes}}]}
    (answer, _) = ask(200, **binary(raw, pixels.tobytes())).json()["outputs"]
    assert answer == scores
    for data in ([*[0] * 95, 256], [*[0] * 95, -1], [*[0] * 95, 0.5], [*[0] * 95, 10**30], [0] * 95, [["a"] * 96]):
        assert "does not fit" in ask(400, json={"inputs": [tensor | {"data": data}]}).json()["error"]
    assert "UINT8 of shape [N, 4, 4, 3]" in ask(400, json={"inputs": [tensor | {"shape": [1, 4, 4]}]}).json()["error"]


def test_the_server_and_its_model_describe_themselves(ask):
    assert ask(200, "/v2", "GET").json()["extensions"] == ["binary_tensor_data"]
    assert ask(200, "/v2/health/live", "GET").json() == {"live": True}
    assert ask(200, "/v2/health/ready", "GET").json() == ask(200, f"{URL}/ready", "GET").json() == {"ready": True}
    model = ask(200, URL, "GET").json()
    assert [tensor["shape"] for tensor in model["inputs"]] == [[-1], [-1, 4, 4, 3]]
    assert [tensor["datatype"] for tensor in model["outputs"]] == ["FP32", "BYTES"]
    assert [label["name"] for label in model["labels"]] == list(NAMES)
    for path in ("/v2/models/other", "/v2/models/other/infer", f"{URL}/versions/1"):
        assert "only model of this server is classifier" in ask(404, path, "GET").json()["error"]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"content": b"{"}, "the body is wrong: Invalid JSON"),
        ({"content": b"[" * 500}, "the body is wrong: Invalid JSON"),
        ({"json": {"inputs": []}}, "inputs is wrong"),
        ({"json": {"inputs": [TENSOR, TENSOR]}}, "inputs is wrong"),
        ({"json": message(name="other")}, "inputs.0.name is wrong"),
        ({"json": message(datatype="FP32")}, "inputs.0.datatype is wrong"),
        ({"json": message(datatype="UINT8")}, "the tensor image should be BYTES of shape [N]"),
        ({"json": message(shape=[2, 2])}, "the tensor image should be BYTES of shape [N]"),
        ({"json": message(shape=[])}, "the tensor image should be BYTES of shape [N]"),
        ({"json": message(shape=[-1])}, "inputs.0.shape.0 is wrong"),
        ({"json": message(shape=[0])}, "1 to 32 images"),
        ({"json": message(shape=[33])}, "1 to 32 images"),
        ({"json": message(shape=[3])}, "does not fit"),
        ({"json": message(data=["ä", "?"])}, "does not fit"),
        ({"json": message(data=[1, 2])}, "does not fit"),
        ({"json": {"inputs": [TENSOR]}}, "does not fit"),
        ({"json": message(parameters={"topk": 1})}, "parameters.topk is wrong"),
        ({"json": message(parameters=dict.fromkeys("abcdefghijk", 1))}, "too many parameters"),
        ({"json": message(("labels", {"classification": 2}))}, "outputs.0.parameters.classification is wrong"),
        (binary(message(size=len(BINARY)), BINARY + b"x"), "does not fit"),
        (binary(message(size=len(BINARY) - 1), BINARY[:-1]), "does not fit"),
        (binary(message(size=9), b"\xff\xff\xff\xff1234\x00"), "does not fit"),
        (binary(message(size=3), b"\xff\xff\xff"), "does not fit"),
        (binary(message(size=9), b""), "does not fit"),
        (binary(message(size=len(BINARY)), length="x"), "should be the length of the JSON"),
        (binary(message(size=len(BINARY)), length="99999"), "should be the length of the JSON"),
    ],
)
def test_a_malformed_request_is_told_what_is_wrong(ask, request_, reason):
    assert reason in ask(400, **request_).json()["error"]


def test_a_name_that_no_address_can_have_is_refused(refusal):
    sentence = refusal(make_app, make_service(name="a{b:c}"))
    assert sentence.startswith("serve.name=a{b:c} is part of an address")


def test_limits_hold(ask):
    service = make_service(limits=RequestLimits(megabytes=1))
    assert "more than 1,048,576 bytes" in ask(413, service=service, content=bytes(1 + (1 << 20))).json()["error"]
    for part in (b"{},", b"[],", b'"a":1,'):
        assert "the JSON has more than 1,000 names" in ask(413, content=b'{"inputs":[' + part * 5000).json()["error"]
    assert "compressed" in ask(415, content=b"", headers={"Content-Encoding": "gzip"}).json()["error"]
    assert "top_k" in ask(422, json=message(parameters={"top_k": 9})).json()["error"]
    unreadable = message(data=[TEXTS[0], base64.b64encode(b"text").decode()])
    assert "cannot read image 1" in ask(422, json=unreadable).json()["error"]
    assert "other sites" in ask(403, json=message(), headers={"Sec-Fetch-Site": "cross-site"}).json()["error"]
