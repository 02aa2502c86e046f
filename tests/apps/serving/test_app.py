"""The application without sockets: answers, refusals, limits and counters."""

import asyncio
import base64
import io
import re

import numpy as np
import pytest
from helpers.color_model import HALVES, NAMES, color, expected, make_run
from helpers.color_server import PNG, make_labeler, make_service, png, with_client
from PIL import Image
from starlette import formparsers

from mlmoe_jax.apps.serving.labeler import RequestLimits
from mlmoe_jax.apps.serving.middleware import HEADERS
from mlmoe_jax.apps.serving.server import make_app, own_names
from mlmoe_jax.apps.serving.service import STARTING, Service
from mlmoe_jax.inference.predictor import Predictor

WHERE = re.compile(r"(/[\w.-]+){2,}|Traceback|\.py\b")


@pytest.fixture(scope="module")
def labeler():
    made = make_labeler()
    made.compile()
    return made


@pytest.fixture
def ask(labeler):
    """A function that sends one request, and checks status and headers, and that an error is one sentence."""

    def call(status, path="/predict", method="POST", *, hosts=(), **request):
        async def use(client):
            return await client.request(method, path, **request)

        answer = with_client(Service(labeler), use, hosts=hosts)
        assert answer.status_code == status, answer.text
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        assert "access-control-allow-origin" not in answer.headers
        if answer.headers["content-type"] == "application/json":
            body = answer.json()
            if status != 200:
                assert list(body) == ["error"]
                assert not WHERE.search(body["error"]), body
                assert not body["error"].endswith(".")
            return body
        return answer

    return call


def programs(labeler) -> int:
    """Return the number of compiled programs."""
    return sum(step._cache_size() for step in labeler._steps.values())


# ---------------------------------------------------------------------------------------------------------- answers
@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", "IMAGE/JPEG; x=1"])
def test_a_raw_image_is_labeled_like_by_the_predictor(ask, kind):
    content = png(color(150, 90, 200))
    body = ask(200, content=content, headers={"Content-Type": kind})
    of_python = Predictor(make_run(), HALVES)(content)
    assert body == {"results": [{"image": "image 0", "labels": list(of_python.labels), "scores": of_python.scores}]}


def test_several_files_keep_their_names_and_order_and_a_bad_one_spoils_nothing(ask):
    files = [("images", (f"{n}.png", png(color(40 * n)))) for n in range(5)]
    files[2] = ("images", ("notes.txt", b"not an image"))
    body = ask(200, files=files)
    for n, result in enumerate(body["results"]):
        if n == 2:
            assert result == {"image": "notes.txt", "error": result["error"]}
            assert "cannot read notes.txt as an image" in result["error"]
            continue
        assert result["image"] == f"{n}.png"
        np.testing.assert_allclose(list(result["scores"].values()), expected(40 * n), rtol=1e-4)


def test_options(ask):
    content, more = png(color(90, 150, 110)), {"headers": PNG}
    assert ask(200, "/predict?top_k=2", content=content, **more)["results"][0]["labels"] == ["green", "blue"]
    (result,) = ask(200, "/predict?gates=true", content=content, **more)["results"]
    assert set(result["gates"]) == {"g", "static"}
    np.testing.assert_allclose(result["gates"]["g"]["blue"], [0.5, 90 / 255], atol=1e-5)
    assert "attention" not in result
    for query, part in {"top_k=0": "top_k", "top_k=9": "top_k", "top_k=x": "top_k", "gates=maybe": "gates"}.items():
        assert part in ask(422, f"/predict?{query}", content=content, **more)["error"]
    assert "the option topk is wrong" in ask(422, "/predict?topk=1", content=content, **more)["error"]


def test_attention_is_that_of_the_image_and_comes_with_it(ask):
    image = color(0)
    image[:2, 2:] = 250  # the upper right patch
    body = ask(200, "/predict?attention=1", content=png(image), headers=PNG)
    attention = body["results"][0]["attention"]
    assert attention["grid"] == [2, 2]
    assert attention["maps"]["labels"]["queries"] == list(NAMES)
    np.testing.assert_allclose(attention["maps"]["labels"]["weights"], [[0, 250 / 255, 0, 0]] * 4, atol=1e-4)
    seen = Image.open(io.BytesIO(base64.b64decode(attention["image"].partition(",")[2])))
    assert seen.size == (4, 4)


def test_a_model_without_gates_has_none(labeler):
    async def use(client):
        return await client.post("/predict?gates=1", content=png(color(1)), headers=PNG)

    answer = with_client(make_service(gates=False), use)
    assert (answer.status_code, answer.json()) == (422, {"error": "the model has no gates"})


def test_the_model_and_the_document_describe_the_server(ask):
    body = ask(200, "/model", "GET")
    assert body["labels"] == [{"name": name, "threshold": 0.5} for name in NAMES]
    assert body["gates"]["g"] == ["first", "second"]
    document = ask(200, "/openapi.json", "GET")
    assert {"/predict", "/model", "/health", "/metrics", "/v2"} <= set(document["paths"])
    predict = document["paths"]["/predict"]["post"]
    assert [option["name"] for option in predict["parameters"]] == ["top_k", "gates", "attention"]
    assert set(predict["requestBody"]["content"]) == {"image/*", "application/octet-stream", "multipart/form-data"}


@pytest.mark.parametrize("path", ["/", "/page.js", "/style.css"])
def test_pages_need_nothing_from_elsewhere(ask, path):
    text = ask(200, path, "GET").text
    assert not re.findall(r"https?://", text)
    assert "style=" not in text, "the policy of the page forbids it"
    assert not re.search(r"<script(?! src)", text)


# --------------------------------------------------------------------------------------------------------- refusals
def test_bodies_that_are_no_images(ask):
    content = png(color(9))
    assert "none of JPEG" in ask(422, content=b"hello", headers=PNG)["error"]
    assert "cut short" in ask(422, content=content[:50], headers=PNG)["error"]
    assert "no image" in ask(422, content=b"", headers=PNG)["error"]
    assert "no image" in ask(422, data={"images": "text"}, files=[("images", ("a.png", b""))])["error"]
    assert "content type" in ask(415, content=content, headers={"Content-Type": "text/plain"})["error"]
    assert "content type" in ask(415, content=content)["error"]


def test_forms_that_cannot_be_read(ask, monkeypatch):
    sizes = []
    monkeypatch.setattr(formparsers, "SpooledTemporaryFile", lambda max_size: sizes.append(max_size) or io.BytesIO())
    form = {"Content-Type": "multipart/form-data; boundary=xx"}
    part = b'--xx\r\nContent-Disposition: form-data; name="a"; filename="a.png"\r\n\r\n' + png(color(9))
    unknown = {"Content-Type": "multipart/form-data"}
    many = [("images", ("a.png", png(color(9))))] * 33
    for request in (
        {"content": part, "headers": form},
        {"content": part + b"\r\n--xx\r\n", "headers": form},
        {"content": b"garbage", "headers": form},
        {"content": part, "headers": unknown},
        {"files": many},
    ):
        assert "should be a whole multipart/form-data with 1 to 32 files" in ask(400, **request)["error"]
    assert len(sizes) == 34
    assert min(sizes) == 1 << 40, "files stay in memory"


def test_size_and_pixels_are_limited(labeler):
    service = make_service(limits=RequestLimits(megabytes=1, megapixels=1))
    large = io.BytesIO()
    Image.new("L", (1001, 1000)).save(large, "PNG")

    async def chunks():
        for _ in range(20):
            yield bytes(1 << 16)

    async def use(client):
        declared = await client.post("/predict", content=bytes(1 + (1 << 20)), headers=PNG)
        unknown = await client.post("/predict", content=chunks(), headers=PNG)
        form = await client.post("/predict", files=[("a", ("a.png", bytes(1 << 20)))])
        pixels = await client.post("/predict", content=large.getvalue(), headers=PNG)
        return declared, unknown, form, pixels

    *too_large, pixels = with_client(service, use)
    assert [answer.status_code for answer in too_large] == [413] * 3
    assert {answer.json()["error"] for answer in too_large} == {"the request has more than 1,048,576 bytes"}
    assert pixels.status_code == 422
    assert "it has more than 1,000,000 pixels" in pixels.json()["error"]
    assert service.active == 0


def test_other_sites_and_names_are_refused(ask):
    request = {"content": png(color(1)), "headers": PNG}
    for site in ("cross-site", "same-site"):
        assert "other sites" in ask(403, **request | {"headers": PNG | {"Sec-Fetch-Site": site}})["error"]
    ask(200, **request | {"headers": PNG | {"Sec-Fetch-Site": "same-origin"}})
    hosts = ("localhost", "127.0.0.1", "[::1]")
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        assert "name of this machine" in ask(403, **request | {"headers": PNG | {"Host": host}}, hosts=hosts)["error"]
    for host in ("localhost", "127.0.0.1:8000", "[::1]:80"):
        ask(200, **request | {"headers": PNG | {"Host": host}}, hosts=hosts)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_a_server_on_a_local_address_answers_to_its_own_name(ask, host):
    in_header = f"[{host}]" if ":" in host else host
    ask(200, content=png(color(1)), headers=PNG | {"Host": f"{in_header}:8000"}, hosts=own_names(host))
    for other in ("0.0.0.0", "192.168.0.7", "::", "example.org"):
        assert own_names(other) == (), "a server that others reach answers to any name"


def test_unknown_addresses_and_methods(ask):
    assert ask(404, "/../../etc/passwd", "GET") == {"error": "Not Found"}
    ask(405, "/predict", "GET")
    ask(405, "/health")


def test_an_error_of_the_server_is_told_without_its_reason(labeler, monkeypatch):
    def broken(images, kind):
        raise RuntimeError("secret /home/me/run")

    service = Service(labeler)

    async def use(client):
        monkeypatch.setattr(service.labeler, "label", broken)
        first = await client.post("/predict", content=png(color(1)), headers=PNG)
        monkeypatch.undo()
        return first, await client.post("/predict", content=png(color(1)), headers=PNG)

    failed, next_one = with_client(service, use)
    assert (failed.status_code, failed.json()) == (500, {"error": "the server failed; its log has the reason"})
    assert failed.headers["content-security-policy"]
    assert next_one.status_code == 200


# ------------------------------------------------------------------------------------------- queue, times and counters
def test_nothing_is_lost_and_answers_match_their_requests(labeler):
    service = Service(labeler)
    before = programs(labeler)

    async def one(client, n):
        query = "?attention=1" if n % 7 == 0 else ""
        answer = await client.post(f"/predict{query}", content=png(color(n, 255 - n)), headers=PNG)
        assert answer.status_code == 200, answer.text
        (result,) = answer.json()["results"]
        np.testing.assert_allclose(list(result["scores"].values()), expected(n, 255 - n), rtol=1e-4)

    async def use(client):
        await asyncio.gather(*(one(client, n) for n in range(100)))
        return (await client.get("/metrics")).text

    text = with_client(service, use)
    assert programs(labeler) == before, "nothing is compiled for a request"
    values = dict(re.findall(r"^(\w+(?:\{[^}]*\})?) ([\d.]+)$", text, re.MULTILINE))
    assert values['mlmoe_requests_total{path="/predict",status="200"}'] == "100.0"
    assert values['mlmoe_images_total{result="labeled"}'] == "100.0"
    assert values["mlmoe_batch_images_sum"] == "100.0"
    assert float(values["mlmoe_batch_images_count"]) < 60
    assert values['mlmoe_request_seconds_count{path="/predict"}'] == "100.0"
    assert values["mlmoe_queue_images"] == values["mlmoe_taken_images"] == "0.0"


def test_a_full_queue_is_429_and_the_others_are_answered():
    service = make_service(slow=0.3, queue=4, wait=0.0)

    async def use(client):
        posts = (client.post("/predict", content=png(color(n)), headers=PNG) for n in range(12))
        answers = await asyncio.gather(*posts)
        too_many = await client.post("/predict", files=[("a", ("a.png", png(color(1))))] * 5)
        return answers, too_many, await client.post("/predict", content=png(color(1)), headers=PNG)

    answers, too_many, later = with_client(service, use)
    codes = [answer.status_code for answer in answers]
    assert sorted(codes) == [200] * 4 + [429] * 8
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1"
    assert too_many.status_code == 400, "more than the queue can ever take"
    assert later.status_code == 200
    assert service.active == 0


def test_late_results_are_504_and_late_requests_408():
    service = make_service(slow=1.0, seconds=0.2)

    async def never():
        yield png(color(1))[:10]
        await asyncio.sleep(5)

    async def use(client):
        late = await client.post("/predict", content=png(color(1)), headers=PNG)
        return late, await client.post("/predict", content=never(), headers=PNG)

    late, slow = with_client(service, use)
    assert (late.status_code, late.json()["error"]) == (504, "there is no result after 0.2 s")
    assert slow.status_code == 408
    assert service.active == 0


def test_a_server_is_ready_once_it_has_compiled_and_not_before(labeler):
    import httpx

    service = Service(labeler)

    async def main():
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            health = await client.get("/health")
            return health, await client.post("/predict", content=png(color(1)), headers=PNG)

    health, early = asyncio.run(main())
    assert (health.status_code, health.json()) == (503, {"status": STARTING})
    assert (early.status_code, early.headers["retry-after"]) == (503, "5")

    async def use(client):
        return await client.get("/health")

    ready = with_client(Service(labeler), use)
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})


def test_compiling_covers_every_batch_size_and_refuses_a_diverged_model(refusal):
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
    assert [labeler.next_batch_size(waiting, "labeled") for waiting in (1, 5, 100)] == [1, 4, 32], (
        "by the times that it measured"
    )
    assert "diverged" in refusal(make_labeler(bias=float("nan")).compile)
    answers, stopped = iter([False, False, True]), make_labeler()
    stopped.compile(lambda: next(answers))
    assert programs(stopped) == 2, "a server that stops compiles no further programs"
