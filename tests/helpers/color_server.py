"""A server whose model is that of `color_model`, in this process."""

import asyncio
import io
import time

import numpy as np
from PIL import Image

from helpers.color_model import HALVES, make_run
from mlmoe_jax.apps.serving.labeler import Labeler, RequestLimits
from mlmoe_jax.apps.serving.server import make_app
from mlmoe_jax.apps.serving.service import READY, Service
from mlmoe_jax.inference.predictor import Predictor

PNG = {"Content-Type": "image/png"}
LIMITS = RequestLimits()


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def make_labeler(
    slow: float = 0.0, gates: bool = True, bias: float = 0.0, limits: RequestLimits = LIMITS, **settings
) -> Labeler:
    """Return a labeler. slow: seconds that a batch takes once everything is compiled. settings: of config.serve."""
    run = make_run(gates, bias)
    run.config.serve.update(settings)
    labeler = Labeler(Predictor(run, HALVES), limits)
    labeler.gate_entries = {"g": ["first", "second"], "static": ["first", "second"]} if gates else {}
    if slow:
        compile_all, label = labeler.compile, labeler.label

        def compile_then_slow(stopping):
            compile_all(stopping)
            labeler.slow = slow

        def slowly(images, kind):
            time.sleep(getattr(labeler, "slow", 0))
            return label(images, kind)

        labeler.compile, labeler.label = compile_then_slow, slowly
    return labeler


def make_service(
    slow: float = 0.0, gates: bool = True, limits: RequestLimits = LIMITS, name: str = "classifier", **options
) -> Service:
    return Service(make_labeler(slow, gates, limits=limits, name=name), **options)


def with_client(service: Service, use, *, hosts=()):
    """Return the result of `await use(client)` with a client of the ready server, without sockets."""
    import httpx

    async def main():
        app = make_app(service, hosts=hosts)
        running = asyncio.create_task(service.run())
        while service.state != READY:
            assert not running.done(), running.result()
            await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            result = await use(client)
        service.stop()
        await running
        service.close()
        return result

    return asyncio.run(main())
