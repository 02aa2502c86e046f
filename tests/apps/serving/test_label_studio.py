"""The ML backend of Label Studio: its answers, and the images that a task may name."""

import base64
from contextlib import contextmanager

import pytest
import uvicorn
from helpers.color_model import color, expected
from helpers.color_server import CHOICES, in_thread, tasks
from helpers.drawn_images import encoded
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from mlmoe_jax.apps.serving.label_studio_backend import TaskImages

RED = encoded(color(200))


def inline(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def test_what_label_studio_asks(ask):
    local, upload = "/data/local-files/?d=a.png", "/data/upload/1/x.png"
    assert ask(200, "/label_studio/health", "GET") == {"status": "UP", "model_class": "mlmoe"}
    setup = {"project": "1.2", "schema": CHOICES, "hostname": "http://169.254.169.254"}
    assert ask(200, "/label_studio/setup", json=setup) == {"model_version": "mlmoe"}
    body = ask(200, **tasks(local, upload, inline(encoded(color(0, 200))), "x", upload))
    assert body["model_version"] == "mlmoe"
    [red], none, [green], *unread = body["results"]  # five tasks, of which the server takes four at a time
    result = {"from_name": "labels", "to_name": "image", "type": "choices", "value": {"choices": ["red"]}}
    score = pytest.approx(expected(200)[0], abs=1e-5)
    assert red == {"model_version": "mlmoe", "score": score, "result": [result]}
    assert green["result"][0]["value"] == {"choices": ["green"]}
    assert [none, *unread] == [[]] * 3
    other = CHOICES.replace('name="labels"', 'name="tags"')
    other = other.replace("<Choices", '<Choices name="good" toName="image"><Choice value="yes" /></Choices><Choices', 1)
    [[tagged]] = ask(200, **tasks(local, config=other))["results"]
    assert tagged["result"] == [result | {"from_name": "tags"}], "the control with the labels of the model"


def test_the_labeling_config_names_the_key_of_the_image(ask):
    body = {"tasks": [{"data": {"photo": inline(RED)}}], "label_config": CHOICES.replace("$image", "$photo")}
    [[red]] = ask(200, "/label_studio/predict", json=body)["results"]
    assert red["result"][0]["value"] == {"choices": ["red"]}


# ------------------------------------------------------------------------------------------------------ fetched images
@contextmanager
def site(answers: dict[str, Response] | None = None):
    """A server with `log`, the path and the token of each request; answers: path -> response, by default an image."""
    log = []

    async def answer(request: Request) -> Response:
        log.append((request.url.path, request.headers.get("authorization")))
        return (answers or {}).get(request.url.path, Response(RED))

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    with in_thread(uvicorn.Server(uvicorn.Config(app, log_level="error"))) as ((host, port), _):
        yield f"http://{host}:{port}", log


@pytest.mark.parametrize(
    ("token", "header"), [("abc", "Token abc"), ("a.b.c", "Bearer short"), ("", None)], ids=["legacy", "jwt", "none"]
)
def test_an_image_is_fetched_from_label_studio_with_the_token(monkeypatch, token, header):
    monkeypatch.setenv("LABEL_STUDIO_API_KEY", token)
    with site({"/api/token/refresh/": Response(b'{"access": "short"}')}) as (address, log):
        images = TaskImages("", f"{address}/", 1000)
        assert images.read("/data/upload/1/a.png") == images.read(f"{address}/data/upload/1/a.png") == RED
    assert log[-1] == ("/data/upload/1/a.png", header)


@pytest.mark.parametrize(
    "address",
    [
        *("http://127.0.0.1:1/a.png", "http://{host}@127.0.0.1:1/a.png", "//127.0.0.1:1/a.png", "file:///etc/passwd"),
        *("ftp://{host}/a.png", "https://{host}/a.png", "http://{host}.evil.test/a.png", "s3://bucket/a.png"),
    ],
)
def test_no_other_server_is_asked(address):
    with site() as (server, log):
        _, error = TaskImages("", server, 1000)._read(address.format(host=server.removeprefix("http://")))
    assert not log
    assert str(error).endswith(f"is not on the server {server}")


def test_only_redirects_within_the_server_are_followed_and_a_large_answer_is_cut(monkeypatch):
    monkeypatch.setenv("LABEL_STUDIO_API_KEY", "abc")
    with site() as (other, log):
        places = {"/there": f"{other}/a.png", "/here": "/data/a.png"}
        with site({path: RedirectResponse(place) for path, place in places.items()}) as (server, _):
            images = TaskImages("", server, 1000)
            assert images.read("/here") == RED
            assert "it redirects to http://127.0.0.1, which is not on the server" in str(images._read("/there")[1])
            assert "it has more than 10 bytes" in str(TaskImages("", server, 10)._read("/here")[1])
    assert not log


def test_without_a_folder_or_a_server_no_address_is_read():
    assert "set serve.folder" in str(TaskImages("", "", 1000)._read("/data/local-files/?d=a.png")[1])
    assert TaskImages("", "", 1000).read(inline(RED)) == RED
