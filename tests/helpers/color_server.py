"""A server in this process whose model is that of `color_model`, a client without sockets, and requests to it.

The client sees a whole response at once, and the server runs only while a request is awaited. Connections, signals and
what a client sees that breaks off are tested with sockets.
"""

import asyncio
import contextlib
import copy
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import uvicorn

from helpers.color_model import HALVES, color, make_run
from helpers.drawn_images import encoded
from mlmoe_jax.apps.serving.labeler import Labeler
from mlmoe_jax.apps.serving.server import make_app
from mlmoe_jax.apps.serving.service import READY, Service
from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.data.sources.label_studio_export import labeling_config
from mlmoe_jax.inference.predictor import Predictor

PNG = {"Content-Type": "image/png"}
CHOICES = labeling_config(["red", "green", "blue"])  # without the label dark
ENTRIES = ["first", "second"]


def make_labeler(bias: float = 0.0, tree: LabelTree = INDEPENDENT, **settings) -> Labeler:
    """Return a labeler; settings: of config.serve."""
    run = make_run(bias=bias, tree=tree)
    run.config.serve.update(settings)
    labeler = Labeler(Predictor(run, HALVES))
    labeler.gate_entries = {"g": ENTRIES, "static": ENTRIES}
    return labeler


def slowed(labeler: Labeler, seconds: float) -> Labeler:
    """Return a labeler whose batches take a time once everything is compiled."""

    def label(images, kind):
        time.sleep(seconds)
        return labeler.label(images, kind)

    slow = copy.copy(labeler)
    slow.compile, slow.label = labeler.compile, label
    return slow


@contextlib.contextmanager
def client_of(service: Service, *, hosts=()) -> Iterator[Callable[..., list[httpx.Response]]]:
    """Give a function that sends requests to the ready server at once; a request: the arguments of httpx."""
    transport = httpx.ASGITransport(make_app(service, hosts=hosts), raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)

    async def start() -> asyncio.Task:
        running = asyncio.create_task(service.run())
        while service.state != READY:
            assert not running.done(), running.result()
            await asyncio.sleep(0.01)
        return running

    async def send(requests) -> list[httpx.Response]:
        return await asyncio.gather(*(client.request(**{"method": "POST"} | request) for request in requests))

    async def stop() -> None:
        service.stop()
        await running
        await client.aclose()

    with asyncio.Runner() as runner, contextlib.closing(service):
        running = runner.run(start())
        yield lambda *requests: runner.run(send(requests))
        runner.run(stop())


@contextlib.contextmanager
def in_thread(server: uvicorn.Server) -> Iterator[tuple[tuple[str, int], Callable[[], None]]]:
    """Run a server with sockets in a thread; give its address and a function that stops it."""

    def stop() -> None:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()

    listener = socket.create_server(("127.0.0.1", 0))  # closed by the server
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname(), stop
    finally:
        stop()


# ------------------------------------------------------------------------------------------------------------ requests
def image_request(*channels: int, url: str = "/predict") -> dict:
    """An image of one color."""
    return {"url": url, "content": encoded(color(*channels)), "headers": PNG}


def tasks(*images, config: str = CHOICES) -> dict:
    """A request of Label Studio for the predictions of tasks with these addresses."""
    body = {"tasks": [{"data": {"image": image}} for image in images], "label_config": config}
    return {"url": "/label_studio/predict", "content": json.dumps(body)}
