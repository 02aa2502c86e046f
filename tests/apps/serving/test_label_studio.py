"""The ML backend of Label Studio: its answers, and the images that a task may name."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.color_model import color, expected
from helpers.color_server import make_labeler, png, with_client

from mlmoe_jax.apps.serving.label_studio_backend import TaskImages
from mlmoe_jax.apps.serving.labeler import RequestLimits
from mlmoe_jax.apps.serving.service import Service
from mlmoe_jax.data.sources.label_studio_export import labeling_config

CONFIG = labeling_config(["red", "green", "blue"])  # without the label dark
RED = png(color(200))


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """A function that sends requests to a server with a folder of images, and returns (status, body) of each."""
    folder = tmp_path_factory.mktemp("served") / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(RED)
    (folder.parent / "secret.png").write_bytes(RED)
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    labeler = make_labeler(folder=str(folder), limits=RequestLimits(images=2, megabytes=1))

    def call(*requests):
        async def use(client):
            answers = [await client.request(*request[:2], content=json.dumps(request[2])) for request in requests]
            return [(answer.status_code, answer.json()) for answer in answers]

        return with_client(Service(labeler), use)

    return call


def request(*images, config=CONFIG):
    return "POST", "/label_studio/predict", {"tasks": [{"data": {"image": i}} for i in images], "label_config": config}


def inline(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def test_what_label_studio_asks(ask):
    local, upload = "/data/local-files/?d=a.png", "/data/upload/1/x.png"
    other = CONFIG.replace('name="labels"', 'name="tags"').replace('value="$image"', 'value="$photo"')
    other = other.replace("<Choices", '<Choices name="good" toName="image"><Choice value="yes" /></Choices><Choices', 1)
    setup = ("POST", "/label_studio/setup", {"project": "1.2", "schema": CONFIG, "hostname": "http://169.254.169.254"})
    renamed = ("POST", "/label_studio/predict", {"tasks": [{"data": {"photo": local}}], "label_config": other})
    health, version, answer, (_, tagged) = ask(
        ("GET", "/label_studio/health", None), setup, request(local, upload, inline(png(color(0, 200))), "x"), renamed
    )
    assert health == (200, {"status": "UP", "model_class": "mlmoe"})
    assert version == (200, {"model_version": "mlmoe"})
    status, body = answer
    assert (status, body["model_version"]) == (200, "mlmoe")
    (red,), none, (green,), unread = body["results"]  # four tasks, of which the model takes two at a time
    result = {"from_name": "labels", "to_name": "image", "type": "choices", "value": {"choices": ["red"]}}
    score = pytest.approx(expected(200)[0], abs=1e-5)
    assert red == {"model_version": "mlmoe", "score": score, "result": [result]}
    assert green["result"][0]["value"] == {"choices": ["green"]}
    assert none == unread == []
    assert tagged["results"][0][0]["result"] == [result | {"from_name": "tags"}]


def test_requests_of_another_form_are_refused(ask):
    no_choices = request("/data/local-files/?d=a.png", config="<View><Image name='i' value='$i'/></View>")
    bomb = request("x", config='<!DOCTYPE x [<!ENTITY a "a">]><View/>')
    form = ("POST", "/label_studio/predict", {"tasks": 5})
    outside = request("/data/local-files/?d=../secret.png")
    answers = ask(no_choices, bomb, form, request(), request("x" * (1 << 20)), request(None), outside)
    assert [status for status, _ in answers] == [422, 400, 400, 422, 413, 422, 422]
    assert all(list(body) == ["error"] for _, body in answers)
    assert answers[-1][1]["error"].endswith("it is not in the folder of the images")
    (status, body), *_ = ask(request(*[None] * 1001))
    assert (status, body["error"].startswith("a request may have 1,000 tasks")) == (413, True)
    (status, body), *_ = ask(request("\ud800"))  # half a character, which JSON can hold
    assert (status, body["error"].startswith("cannot read \\ud800 as an image: ")) == (422, True)


@pytest.mark.parametrize("path", ["../secret.png", "link.png", "/etc/passwd", "sub/../../secret.png", ""])
def test_no_file_outside_the_folder_is_read(ask, path, tmp_path):
    (status, body), (_, model) = ask(request(f"/data/local-files/?d={path}"), ("GET", "/model", None))
    assert status == 422
    assert str(tmp_path.parent) not in json.dumps((body, model))


# ------------------------------------------------------------------------------------------------------ fetched images
@contextmanager
def site(answer):
    """A server whose requests are recorded in `log`; answer(path, token) returns (status, headers, body)."""
    log = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            log.append((self.path, self.headers.get("Authorization")))
            status, headers, body = answer(*log[-1])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", log
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("token", "header"), [("abc", "Token abc"), ("a.b.c", "Bearer short"), ("", None)], ids=["legacy", "jwt", "none"]
)
def test_an_image_is_fetched_from_label_studio_with_the_token(monkeypatch, token, header):
    monkeypatch.setenv("LABEL_STUDIO_API_KEY", token)

    def answer(path, sent):
        return (200, {}, b'{"access": "short"}' if path == "/api/token/refresh/" else RED)

    with site(answer) as (address, log):
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
    with site(lambda path, token: (200, {}, RED)) as (server, log):
        _, error = TaskImages("", server, 1000)._read(address.format(host=server.removeprefix("http://")))
    assert not log
    assert str(error).endswith(f"it is not on the server {server}")


def test_a_redirect_to_another_server_is_refused_and_a_large_answer_cut(monkeypatch):
    monkeypatch.setenv("LABEL_STUDIO_API_KEY", "abc")
    with site(lambda path, token: (200, {}, RED)) as (other, log):

        def answer(path, token):
            places = {"/there": f"{other}/a.png", "/here": "/data/a.png"}
            return (302, {"Location": places[path]}, b"") if path in places else (200, {}, RED)

        with site(answer) as (server, _):
            images = TaskImages("", server, 1000)
            assert images.read("/here") == RED
            assert "it redirects to another server" in str(images._read("/there")[1])
            assert "it has more than 10 bytes" in str(TaskImages("", server, 10)._read("/here")[1])
    assert not log


def test_a_folder_that_is_missing_and_an_address_without_http_are_refused(refusal):
    assert refusal(TaskImages, "/no/images", "", 1).startswith("serve.folder=/no/images is not a folder")
    assert refusal(TaskImages, "", "localhost:8080", 1).startswith("serve.label_studio=localhost:8080 should begin")


def test_without_a_folder_or_a_server_no_address_is_read():
    assert "set serve.folder" in str(TaskImages("", "", 1000)._read("/data/local-files/?d=a.png")[1])
    assert TaskImages("", "", 1000).read(inline(RED)) == RED
