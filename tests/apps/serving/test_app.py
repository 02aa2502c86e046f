"""The application without sockets: answers, the queue, time limits and counters."""

import asyncio
import base64
import io
import re

import httpx
import numpy as np
import pytest
from helpers import hostile_decoder
from helpers.color_model import HALVES, NAMES, color, expected, make_run
from helpers.color_server import PNG, client_of, image_request, make_labeler, slowed
from helpers.drawn_images import encoded
from PIL import Image
from starlette import formparsers

from mlmoe_jax.apps.serving import service as service_module
from mlmoe_jax.apps.serving.request_images import RequestLimits
from mlmoe_jax.apps.serving.server import LOOPBACK, make_app, own_names
from mlmoe_jax.apps.serving.service import STARTING, Service
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runtime.workers import Workers


def programs(labeler) -> int:
    """Return the number of compiled programs."""
    return sum(step._cache_size() for step in labeler._steps.values())


def assert_scores(result: dict, *channels: int) -> None:
    np.testing.assert_allclose(list(result["scores"].values()), expected(*channels), rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------- answers
@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", "IMAGE/JPEG; x=1"])
def test_a_raw_image_is_labeled_like_by_the_predictor(ask, kind):
    content = encoded(color(150, 90, 200))
    body = ask(200, content=content, headers={"Content-Type": kind})
    of_python = Predictor(make_run(), HALVES)(content)
    assert body == {"results": [{"image": "image 0", "labels": list(of_python.labels), "scores": of_python.scores}]}


def test_several_files_keep_their_names_and_order_and_a_bad_one_spoils_nothing(ask):
    files = [("images", (f"{n}.png", encoded(color(40 * n)))) for n in range(4)]
    files[2] = ("images", ("notes.txt", b"not an image"))
    results = ask(200, files=files)["results"]
    assert list(bad := results.pop(2)) == ["image", "error"]
    assert "cannot read notes.txt as an image" in bad["error"]
    for n, result in zip((0, 1, 3), results, strict=True):
        assert result["image"] == f"{n}.png"
        assert_scores(result, 40 * n)


def test_an_image_that_its_decoder_does_not_survive_spoils_nothing(labeler, monkeypatch):
    monkeypatch.setattr(service_module, "_DECODE_SECONDS", 0.5)
    monkeypatch.setattr(
        service_module, "Workers", lambda _, *given, **more: Workers(hostile_decoder.decode, *given, **more)
    )
    with client_of(service := Service(labeler)) as send:
        answers = send(
            *({"url": "/predict", "files": [("a", (what.decode(), what))]} for what in (b"sleep", b"crash", b"memory"))
        )
    assert [(answer.status_code, answer.json()["error"]) for answer in answers] == [
        (422, "cannot read sleep as an image: it takes more than 0.5 s; store it again"),
        (422, "cannot read crash as an image: its process has ended; store it again"),
        (422, "cannot read memory as an image: its process has ended; store it again"),
    ]
    assert service.readers.replaced == 3


def test_an_image_with_several_frames_says_so(ask):
    frames = [Image.fromarray(color(value)) for value in (200, 10)]
    animation = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    files = [("images", (name, content)) for name, content in (("a.gif", animation), ("b.png", encoded(color(200))))]
    several, one = ask(200, files=files)["results"]
    assert several["note"] == "it has several frames, of which the first is labeled"
    assert "note" not in one
    assert several["labels"] == one["labels"]


def test_files_of_a_form_stay_in_memory(ask, monkeypatch):
    sizes = []
    monkeypatch.setattr(formparsers, "SpooledTemporaryFile", lambda max_size: sizes.append(max_size) or io.BytesIO())
    ask(200, files=[("images", ("a.png", encoded(color(9))))])
    assert sizes == [1 << 40]


def test_options(ask):
    image = image_request(90, 150, 110)
    assert ask(200, **image | {"url": "/predict?top_k=2"})["results"][0]["labels"] == ["green", "blue"]
    [result] = ask(200, **image | {"url": "/predict?gates=true"})["results"]
    assert set(result["gates"]) == {"g", "static"}
    np.testing.assert_allclose(result["gates"]["g"]["blue"], [0.5, 90 / 255], atol=1e-5)
    assert "attention" not in result


def test_a_server_answers_with_new_names(tmp_path):
    (tmp_path / "rename.csv").write_text("red,warm\nblue,warm\n")
    (tmp_path / "leave_out.txt").write_text("dark\n")
    labeler = make_labeler()
    labeler.predictor = labeler.predictor.rename(tmp_path / "rename.csv", tmp_path / "leave_out.txt")
    explained = image_request(150, 90, 200, url="/predict?attention=true")
    joined = image_request(150, 90, 200, url="/predict?gates=true")
    with client_of(Service(labeler)) as send:
        model, answer, refusal = send({"method": "GET", "url": "/model"}, explained, joined)
    assert model.json()["labels"] == [{"name": "warm", "threshold": 0.5}, {"name": "green", "threshold": 0.5}]
    (result,) = answer.json()["results"]
    assert result["labels"] == ["warm"]
    assert result["scores"] == pytest.approx(dict(zip(("warm", "green"), expected(200, 90)[:2], strict=True)), rel=1e-4)
    maps = result["attention"]["maps"]["labels"]
    assert maps["queries"] == ["warm", "warm", "green"]
    assert len(maps["weights"]) == 3
    assert refusal.status_code == 422
    assert refusal.json()["error"].startswith("gates are of one label")


def test_attention_is_that_of_the_image_and_comes_with_it(ask):
    image = color(0)
    image[:2, 2:] = 250  # the upper right patch
    [result] = ask(200, "/predict?attention=1", content=encoded(image), headers=PNG)["results"]
    assert result["attention"]["grid"] == [2, 2]
    assert result["attention"]["maps"]["labels"]["queries"] == list(NAMES)
    weights = result["attention"]["maps"]["labels"]["weights"]
    np.testing.assert_allclose(weights, [[0, 250 / 255, 0, 0]] * 4, atol=1e-4)
    seen = Image.open(io.BytesIO(base64.b64decode(result["attention"]["image"].partition(",")[2])))
    assert seen.size == (4, 4)


def test_the_model_and_the_document_describe_the_server(ask):
    body = ask(200, "/model", "GET")
    assert body["labels"] == [{"name": name, "threshold": 0.5} for name in NAMES]
    assert body["gates"]["g"] == ["first", "second"]
    document = ask(200, "/openapi.json", "GET")
    assert {"/predict", "/model", "/health", "/metrics"} <= set(document["paths"])
    predict = document["paths"]["/predict"]["post"]
    assert [option["name"] for option in predict["parameters"]] == ["top_k", "gates", "attention"]
    assert set(predict["requestBody"]["content"]) == {"image/*", "application/octet-stream", "multipart/form-data"}


@pytest.mark.parametrize("path", ["/", "/page.js", "/style.css"])
def test_pages_need_nothing_from_elsewhere(ask, path):
    text = ask(200, path, "GET").text
    assert not re.findall(r"https?://", text)
    assert "style=" not in text, "the policy of the page forbids it"
    assert not re.search(r"<script(?! src)", text)


# ------------------------------------------------------------------------------------------------ names of the server
@pytest.mark.parametrize(
    "header",
    [{"Sec-Fetch-Site": "same-origin"}, {"Host": "localhost"}, {"Host": "127.0.0.1:8000"}, {"Host": "[::1]:80"}],
    ids=str,
)
def test_pages_of_its_own_and_local_names_are_answered(ask, header):
    ask(200, content=encoded(color(1)), headers=PNG | header)


@pytest.mark.parametrize(
    ("host", "names"),
    [
        *((host, {*LOOPBACK, host}) for host in ("localhost", "127.0.0.1", "127.0.1.1")),
        ("::1", {*LOOPBACK, "[::1]"}),
        *((host, set()) for host in ("0.0.0.0", "192.168.0.7", "::", "example.org")),  # others reach it by any name
    ],
)
def test_a_server_on_a_local_address_answers_to_its_own_name(host, names):
    assert set(own_names(host)) == names
    assert set(own_names(host, ["Labels.example.org"])) == names | ({"labels.example.org"} if names else set())


def test_a_server_answers_to_the_name_of_its_proxy(labeler):
    with client_of(Service(labeler), hosts=own_names("127.0.0.1", ["labels.example.org"])) as send:
        named = [
            {"url": "/model", "method": "GET", "headers": {"Host": name}}
            for name in ("LABELS.example.org:8443", "x.org")
        ]
        assert [answer.status_code for answer in send(*named)] == [200, 403]


def test_the_page_is_whole_below_a_path_of_a_proxy(ask):
    """Every address of the page is relative."""
    page, script = ask(200, "/", "GET").text, ask(200, "/page.js", "GET").text
    assert re.findall(r'(?:href|src)="([^"]*)"', page) == ["data:,", "style.css", "page.js", "openapi.json", "metrics"]
    assert re.findall(r"fetch\([`\"]([^?`\"]*)", script) == ["predict", "model"]


def test_health_has_a_head(labeler):
    with client_of(Service(labeler)) as send:
        [answer] = send({"url": "/health", "method": "HEAD"})
        assert answer.status_code == 200


def test_an_error_of_the_server_is_told_without_its_reason(ask, labeler, monkeypatch):
    def broken(images, kind):
        raise RuntimeError("secret /home/me/run")

    with monkeypatch.context() as patch:
        patch.setattr(labeler, "label", broken)
        assert ask(500, **image_request(1)) == {"error": "the server failed; its log has the reason"}
    ask(200, **image_request(1))


# ------------------------------------------------------------------------------------------- queue, times and counters
def test_nothing_is_lost_and_answers_match_their_requests(labeler):
    before = programs(labeler)
    requests = [image_request(n, 255 - n, url="/predict" + "?attention=1" * (n % 7 == 0)) for n in range(100)]
    with client_of(Service(labeler)) as send:
        for n, answer in enumerate(send(*requests)):
            assert answer.status_code == 200, answer.text
            [result] = answer.json()["results"]
            assert_scores(result, n, 255 - n)
        [metrics] = send({"method": "GET", "url": "/metrics"})
    assert programs(labeler) == before, "nothing is compiled for a request"
    values = dict(re.findall(r"^(\w+(?:\{[^}]*\})?) ([\d.]+)$", metrics.text, re.MULTILINE))
    assert values['mlmoe_requests_total{path="/predict",status="200"}'] == "100.0"
    assert values['mlmoe_images_total{result="labeled"}'] == "100.0"
    assert values["mlmoe_batch_images_sum"] == "100.0"
    assert float(values["mlmoe_batch_images_count"]) < 60
    assert values['mlmoe_request_seconds_count{path="/predict"}'] == "100.0"
    assert values["mlmoe_queue_images"] == values["mlmoe_taken_images"] == "0.0"


def test_a_full_queue_is_429_and_the_others_are_answered(labeler):
    service = Service(slowed(labeler, 0.1), RequestLimits(images=3, queue=3))
    with client_of(service) as send:
        answers = send(*(image_request(n) for n in range(12)))
        files = [("a", ("a.png", encoded(color(1))))] * 4
        too_many, later = send({"url": "/predict", "files": files}, image_request(1))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 9
    assert {answer.headers.get("retry-after", "") for answer in answers} == {"", "1"}
    assert too_many.status_code == 400, "more than the queue can ever take"
    assert later.status_code == 200
    assert service.active == 0


def test_late_results_are_504_and_late_requests_408(labeler):
    service = Service(slowed(labeler, 0.5), RequestLimits(seconds=0.2))

    async def never():
        yield b"\x89PNG"
        await asyncio.sleep(5)

    with client_of(service) as send:
        late, slow = send(image_request(1), image_request(1) | {"content": never()})
    assert (late.status_code, late.json()["error"]) == (504, "there is no result after 0.2 s")
    assert (slow.status_code, slow.json()["error"]) == (408, "the request did not arrive within 0.2 s")
    assert service.active == 0


def test_a_server_is_ready_once_it_has_compiled_and_not_before(ask, labeler):
    async def early():
        transport = httpx.ASGITransport(make_app(Service(labeler)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/health"), await client.post("/predict", content=encoded(color(1)), headers=PNG)

    health, answer = asyncio.run(early())
    assert (health.status_code, health.json()) == (503, {"status": STARTING})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert ask(200, "/health", "GET") == {"status": "ready"}


def test_compiling_covers_every_batch_size_and_can_be_stopped():
    labeler = make_labeler()
    labeler.compile()
    before = programs(labeler)
    assert before == sum(map(len, labeler.sizes.values()))
    for count in (1, 2, 4, 5, 17, 32):
        outputs = labeler.label([color(7 * n) for n in range(count)], "labeled")
        np.testing.assert_allclose([one.logits[0] for one in outputs], [(7 * n - 100) / 10 for n in range(count)], 1e-4)
    assert programs(labeler) == before
    labeler._time = lambda images, kind: float(len(images))
    labeler.compile()
    sizes = [labeler.next_batch_size(waiting, "labeled") for waiting in (1, 5, 100)]
    assert sizes == [1, 4, 32], "by the times that it measured"
    answers, stopped = iter([False, False, True]), make_labeler()
    stopped.compile(lambda: next(answers))
    assert programs(stopped) == 2, "a server that stops compiles no further programs"
