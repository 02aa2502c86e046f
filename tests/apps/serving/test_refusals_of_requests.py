"""What a server refuses: requests, with a status and a sentence, and settings."""

import contextlib
import socket

import numpy as np
import pytest
from helpers.color_model import color
from helpers.color_server import PNG, image_request, make_labeler, tasks
from helpers.drawn_images import encoded
from helpers.refusals import Refusal, each

from mlmoe_jax.apps import serving
from mlmoe_jax.apps.serving.label_studio_backend import TaskImages
from mlmoe_jax.apps.serving.server import _listening

IMAGE, LARGE = encoded(color(9)), bytes(1 + (1 << 20))
TOO_LARGE = "the request has more than 1,048,576 bytes"
FORM = {"Content-Type": "multipart/form-data; boundary=xx"}
PART = b'--xx\r\nContent-Disposition: form-data; name="a"; filename="a.png"\r\n\r\n' + IMAGE
WHOLE = "should be a whole multipart/form-data with 1 to 4 files"


class Parts:
    """A body whose length is not declared."""

    async def __aiter__(self):
        for _ in range(20):
            yield bytes(1 << 16)


def predict(name: str, status: int, says: str, query: str = "", **request):
    """A request to /predict, by default of a PNG file."""
    given = request if "files" in request else {"content": IMAGE, "headers": PNG} | request
    return pytest.param(status, says, {"url": f"/predict{query}", **given}, id=name)


def studio(name: str, status: int, says: str, *images, **more):
    """A request of Label Studio."""
    return pytest.param(status, says, tasks(*images, **more), id=name)


def outside(path: str):
    """A task whose image is not in the folder of the images."""
    return studio(f"the file '{path}' of a task", 422, "cannot read", f"/data/local-files/?d={path}")


REQUESTS = [
    predict("text as an image", 422, "none of JPEG", content=b"hello"),
    predict("an image cut short", 422, "cut short", content=IMAGE[:50]),
    predict("nothing", 422, "no image", content=b""),
    predict("an empty file", 422, "no image", data={"images": "text"}, files=[("images", ("a.png", b""))]),
    predict("text", 415, "content type", headers={"Content-Type": "text/plain"}),
    predict("no content type", 415, "content type", headers={}),
    predict("a form without its end", 400, WHOLE, content=PART + b"\r\n--xx\r\n", headers=FORM),
    predict("a form of other bytes", 400, WHOLE, content=b"garbage", headers=FORM),
    predict("a form without a boundary", 400, WHOLE, headers={"Content-Type": "multipart/form-data"}),
    predict("too many files", 400, WHOLE, files=[("images", ("a.png", IMAGE))] * 5),
    predict("a large body", 413, TOO_LARGE, content=LARGE),
    predict("a large body in parts", 413, TOO_LARGE, content=Parts()),
    predict("a large file", 413, TOO_LARGE, files=[("a", ("a.png", LARGE))]),
    predict("many pixels", 422, "it has more than 1,000,000 pixels", content=encoded(np.zeros((1001, 1000), np.uint8))),
    *(predict(f"top_k={value}", 422, "top_k", f"?top_k={value}") for value in ("0", "9")),
    predict("gates=maybe", 422, "gates", "?gates=maybe"),
    predict("another option", 422, "the option topk is wrong", "?topk=1"),
    *(
        predict(f"a page of a {site} site", 403, "other sites", headers=PNG | {"Sec-Fetch-Site": site})
        for site in ("cross-site", "same-site")
    ),
    *(
        predict(f"the host '{host}'", 403, "name of this machine", headers=PNG | {"Host": host})
        for host in ("evil.example:8000", "127.0.0.1.evil.example", "")
    ),
    pytest.param(404, "Not Found", {"url": "/../../etc/passwd", "method": "GET"}, id="another address"),
    pytest.param(405, "", {"url": "/predict", "method": "GET"}, id="GET /predict"),
    pytest.param(405, "", {"url": "/health"}, id="POST /health"),
    # Label Studio
    studio(
        "a config without choices",
        422,
        "no Choices for an Image",
        "x",
        config="<View><Image name='i' value='$i'/></View>",
    ),
    studio("a bomb", 400, "should be JSON with tasks", "x", config='<!DOCTYPE x [<!ENTITY a "a">]><View/>'),
    pytest.param(400, "should be JSON", {"url": "/label_studio/predict", "json": {"tasks": 5}}, id="no list of tasks"),
    studio("many tags", 413, "a label_config of 4,194,304 bytes and 200,000 tags", "x", config="<a>" * 200_001),
    studio("no tasks", 422, "there are no tasks"),
    studio("a large task", 413, TOO_LARGE, "x" * (1 << 20)),
    studio("a task without an address", 422, "the task has no address of an image", None),
    pytest.param(
        413,
        "the JSON has more than 300,000 names",
        {"url": "/label_studio/predict", "content": b"{}," * 300_001},
        id="many values",
    ),
    studio("many tasks", 413, "a request may have 1,000 tasks", *[None] * 1001),
    studio("half a character", 422, "cannot read \\ud800 as an image: ", "\ud800"),  # which JSON can hold
    studio(
        "a file beside the folder", 422, "it is not in the folder of the images", "/data/local-files/?d=../secret.png"
    ),
    *map(outside, ("link.png", "/etc/passwd", "")),
]


@pytest.mark.parametrize(("status", "says", "request_"), REQUESTS)
def test_a_refused_request_is_told_why(ask, status, says, request_):
    assert says in ask(status, **request_)["error"]


def test_a_model_without_gates_has_none(ask, labeler, monkeypatch):
    monkeypatch.setattr(labeler, "gate_entries", {})
    assert ask(422, **image_request(1, url="/predict?gates=1")) == {"error": "the model has no gates"}


# ------------------------------------------------------------------------------------------------------------ settings
@contextlib.contextmanager
def taken(at):
    """A port to which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def ours(at):
    """The address of a server that is still loading its model."""
    with _listening("127.0.0.1", 0) as listener:
        yield listener.getsockname()


def bind_reusing(address) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(address)


@contextlib.contextmanager
def missing_library(at):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "LIBRARIES", ("no_such_module",))
        yield


def setting(name: str, says: str, function, *arguments) -> Refusal:
    """A call that needs nothing."""
    return Refusal(name, None, lambda at: function(*arguments), says)


REFUSALS = [
    Refusal("a port in use", taken, lambda port: _listening("127.0.0.1", port), "cannot listen on 127.0.0.1:"),
    Refusal("the port of a server that loads", ours, bind_reusing, "in use", error=OSError),
    *(
        setting(f"the port {port}", f":{port}: port must be 0-65535", _listening, "127.0.0.1", port)
        for port in (-1, 70_000)
    ),
    setting("no host", "--host is empty", _listening, "", 0),
    setting("an unknown host", "cannot listen on no.such.host.invalid", _listening, "no.such.host.invalid", 0),
    Refusal("a missing library", missing_library, lambda at: serving.require_libraries(), 'pip install -e ".[serve]"'),
    setting("a diverged model", "has diverged", lambda: make_labeler(bias=float("nan")).compile()),
    setting("a missing folder of images", "serve.folder=/no/images is not a folder", TaskImages, "/no/images", "", 1),
    setting("a server without http", "serve.label_studio=host should begin with http", TaskImages, "", "host", 1),
]


@each(REFUSALS)
def test_refused_settings(case, tmp_path):
    case.check(tmp_path)
