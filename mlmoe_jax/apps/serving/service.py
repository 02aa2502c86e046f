"""The state of a server: the compiled model, its queue, and one answer per request."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request

from mlmoe_jax.apps.serving.batching import Batcher, Full, Room
from mlmoe_jax.apps.serving.labeler import EXPLAINED, LABELED, Labeler, Output
from mlmoe_jax.apps.serving.metrics import Metrics
from mlmoe_jax.apps.serving.requests import Options, Refused, content_type_of, images_of, options_of
from mlmoe_jax.data.images import BadImage
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.explain import MOST_SIDE, thumbnail
from mlmoe_jax.inference.predict import by_label

STARTING, READY, STOPPING = "starting", "ready", "stopping"
_DIGITS = 5  # of the weights in answers
_READERS = min(4, os.cpu_count() or 1)  # threads that decode images


class Service:
    """Labels the images of requests.

    ready: called when the model is compiled. failed: called with the error if it cannot be compiled. state: one of
    STARTING, READY and STOPPING.
    """

    def __init__(
        self,
        labeler: Labeler,
        *,
        ready: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda error: None,
    ):
        self.labeler, self.limits = labeler, labeler.predictor.run.config.serve
        self.state, self._ready, self._failed = STARTING, ready, failed
        self.room = Room(self.limits.queue)
        # One thread calls the model, so that a batch is complete before the next one takes memory.
        self._device = ThreadPoolExecutor(1, "device")
        self._readers = ThreadPoolExecutor(_READERS, "reader")
        most = {kind: sizes[-1] for kind, sizes in labeler.sizes.items()}
        self.metrics = Metrics(lambda: len(self._batcher), lambda: self.room.taken, labeler.sizes[LABELED])
        self._batcher = Batcher(
            labeler.label,
            most,
            wait=self.limits.wait,
            device=self._device,
            coming=lambda: self.room.taken > len(self._batcher),  # images that are being read
            observe=self.metrics.batch,
        )

    # ------------------------------------------------------------------------------------------------ start and end
    async def run(self) -> None:
        """Compile the model, and then label until `stop` was called and the queue is empty."""
        try:
            compile_all = partial(self.labeler.compile, lambda: self.state == STOPPING)
            await asyncio.get_running_loop().run_in_executor(self._device, compile_all)
        except Exception as error:  # the server ends with it
            self._failed(error)
            return
        if self.state == STARTING:
            self.state = READY
            self._ready()
        await self._batcher.run()

    def stop(self) -> None:
        """Accept no further images, and let `run` end once the queue is empty."""
        self.state = STOPPING
        self._batcher.close()

    def close(self) -> None:
        """End the threads; `run` has ended."""
        for threads in (self._device, self._readers):
            threads.shutdown(cancel_futures=True)

    # ---------------------------------------------------------------------------------------------------- a request
    async def results(self, request: Request) -> list[dict[str, Any]]:
        """Return the results of a request, as JSON values; Refused if there are none."""
        if self.state != READY:
            raise Refused(503, f"the server is {self.state}", Retry_After="5")
        kind, options = content_type_of(request.headers), options_of(request.query_params)
        self._check(options)
        received = False
        try:
            async with asyncio.timeout(self.limits.seconds):
                with self.room.reserved(1):
                    images = await images_of(
                        request,
                        kind,
                        most_bytes=self.limits.megabytes << 20,
                        most_images=min(self.limits.images, self.limits.queue),
                    )
                    received = True
                    with self.room.reserved(len(images) - 1):
                        return await self._label(images, options)
        except Full as full:
            raise Refused(429, "the server is busy", Retry_After="1") from full
        except TimeoutError as late:
            if not received:
                reason = f"the request did not arrive within {self.limits.seconds:g} s"
                raise Refused(408, reason, Connection="close") from late
            raise Refused(504, f"there is no result after {self.limits.seconds:g} s") from late

    def _check(self, options: Options) -> None:
        try:
            self.labeler.predictor.check_top_k(options.top_k)
        except UserError as error:
            raise Refused(422, str(error)) from error
        if options.gates and not self.labeler.gate_entries:
            raise Refused(422, "the model has no gates")

    async def _label(self, images: list[tuple[str, bytes]], options: Options) -> list[dict[str, Any]]:
        """Return one result per (name, content)."""
        loop = asyncio.get_running_loop()
        read = await asyncio.gather(
            *(loop.run_in_executor(self._readers, self.labeler.read, content, name) for name, content in images),
            return_exceptions=True,
        )
        if unexpected := [one for one in read if isinstance(one, BaseException) and not isinstance(one, BadImage)]:
            raise unexpected[0]
        decoded = [one for one in read if not isinstance(one, BadImage)]
        self.metrics.unreadable(len(read) - len(decoded))
        if not decoded:
            raise Refused(422, str(read[0]))
        outputs = iter(await self._batcher.submit(decoded, EXPLAINED if options.attention else LABELED))
        self.metrics.labeled(len(decoded))
        return [
            {"image": name, "error": str(image)}
            if isinstance(image, BadImage)
            else self._result(name, image, next(outputs), options)
            for (name, _), image in zip(images, read, strict=True)
        ]

    def _result(self, name: str, image: np.ndarray, output: Output, options: Options) -> dict[str, Any]:
        predictor = self.labeler.predictor
        result = predictor.result(name, output.logits, options.top_k)
        found = {"image": name, "labels": list(result.labels), "scores": result.scores}
        if options.gates:
            found["gates"] = {gate: by_label(predictor.names, weights) for gate, weights in output.gates.items()}
        if options.attention:
            jpeg = base64.b64encode(thumbnail(image, MOST_SIDE)).decode()
            maps = {
                kind: {"queries": self.labeler.queries(kind), "weights": _rounded(weights)}
                for kind, weights in output.attention.items()
            }
            found["attention"] = {"image": f"data:image/jpeg;base64,{jpeg}", "grid": output.grid, "maps": maps}
        return found


def _rounded(weights: np.ndarray) -> list[list[float]]:
    return np.round(weights.astype(np.float64), _DIGITS).tolist()
