"""The state of a server: the compiled model, the queue, the counters, and the answers to requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import HTTPException, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from mlmoe_jax.apps.serving.batching import Batcher
from mlmoe_jax.apps.serving.labeler import EXPLAINED, LABELED, Labeler
from mlmoe_jax.apps.serving.request_images import RequestImages, limited_body
from mlmoe_jax.data.images import BadImage
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.explain import MOST_SIDE, list_prompts, query_names, thumbnail
from mlmoe_jax.inference.predictor import weights_by_label
from mlmoe_jax.models.outputs import Prediction

STARTING, READY, STOPPING = "starting", "ready", "stopping"
QUEUE = 128  # images that are read, wait or are labeled at a time; further requests get the status 429
WAIT = 0.005  # longest time in seconds that an image waits for images that are being read
REQUEST_SECONDS = 30.0  # time limit of a request
_DIGITS = 5  # digits of weights in answers
_READERS = min(4, os.cpu_count() or 1)  # threads that decode images
UNREADY: dict[int | str, Any] = {503: {"description": "It is starting or stopping."}}
T = TypeVar("T")
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Options(BaseModel):
    """The query of /predict."""

    model_config = ConfigDict(extra="forbid")
    top_k: int | None = Field(None, ge=1, description="Number of labels per image, instead of thresholds.")
    gates: bool = Field(False, description="Return routing weights too.")
    attention: bool = Field(False, description="Return attention maps and the image as the model received it too.")


def require_readable(results: Sequence[dict[str, Any]]) -> None:
    """Raise HTTPException if the results of all images are errors."""
    if all("error" in result for result in results):
        raise HTTPException(422, results[0]["error"])


class ServerMetrics:
    """Counters of one server.

    Args:
      waiting: returns the number of images that wait.
      active: returns the number of images that are read, wait or are labeled.
      sizes: batch sizes.
    """

    def __init__(self, waiting: Callable[[], int], active: Callable[[], int], sizes: tuple[int, ...]):
        self._registry = CollectorRegistry()
        options = {"registry": self._registry}
        self.requests = Counter("mlmoe_requests", "Requests by path and status.", ("path", "status"), **options)
        self.seconds = Histogram("mlmoe_request_seconds", "Time per request.", ("path",), buckets=_BUCKETS, **options)
        self.images = Counter("mlmoe_images", "Images by result, labeled or unreadable.", ("result",), **options)
        self.batches = Histogram("mlmoe_batch_images", "Images per batch.", buckets=sizes, **options)
        Gauge("mlmoe_queue_images", "Images that wait for a batch.", **options).set_function(waiting)
        text = "Images that are being read, wait or are being labeled."
        Gauge("mlmoe_taken_images", text, **options).set_function(active)

    def text(self) -> bytes:
        """Return all values in the text format of Prometheus."""
        return generate_latest(self._registry)


class Service:
    """Labels the images of requests. `state` is STARTING, READY or STOPPING.

    Args:
      labeler: the model.
      ready: called when the model is compiled.
      failed: called with the error if compilation fails.
      queue, wait, seconds: as QUEUE, WAIT and REQUEST_SECONDS.
    """

    def __init__(
        self,
        labeler: Labeler,
        *,
        ready: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda error: None,
        queue: int = QUEUE,
        wait: float = WAIT,
        seconds: float = REQUEST_SECONDS,
    ):
        self.labeler, self.state, self.active = labeler, STARTING, 0
        self._ready, self._failed, self._queue, self.seconds = ready, failed, queue, seconds
        # One thread calls the model, so that only one batch takes memory.
        self._device, self._readers = ThreadPoolExecutor(1, "device"), ThreadPoolExecutor(_READERS, "reader")
        self.metrics = ServerMetrics(lambda: len(self._batcher), lambda: self.active, labeler.sizes[LABELED])
        self._batcher = Batcher(
            self._label_batch,
            {kind: sizes[-1] for kind, sizes in labeler.sizes.items()},
            next_size=labeler.next_batch_size,
            wait=wait,
            device=self._device,
            more_expected=lambda: self.active > len(self._batcher),  # images that are being read
        )

    # ------------------------------------------------------------------------------------------------ start and end
    async def run(self) -> None:
        """Compile the model, and then label images until `stop` was called and the queue is empty."""
        try:
            compile_all = partial(self.labeler.compile, lambda: self.state == STOPPING)
            await asyncio.get_running_loop().run_in_executor(self._device, compile_all)
        except Exception as error:  # raised by `serve`
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
        """End the threads. `run` has ended."""
        for threads in (self._device, self._readers):
            threads.shutdown(cancel_futures=True)

    @property
    def health(self) -> int:
        """The status 200 if the server is ready, else 503."""
        return 200 if self.state == READY else 503

    # ---------------------------------------------------------------------------------------------------- a request
    def describe(self) -> dict[str, Any]:
        """Return the description of the model and the limits of requests, as JSON values."""
        return self.labeler.describe() | {"limits": {**asdict(self.labeler.limits), "seconds": self.seconds}}

    @property
    def most_images(self) -> int:
        """The largest number of images of a request."""
        return min(self.labeler.limits.images, self._queue)

    def parts(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the body of a request; HTTPException if it is too large."""
        return limited_body(request, self.labeler.limits.megabytes << 20)

    async def body(self, request: Request) -> bytes:
        """Return the body of a request; HTTPException if it is too large."""
        return b"".join([part async for part in self.parts(request)])

    def check(self, options: Options) -> None:
        """Raise HTTPException if options do not fit the model."""
        if options.gates and not self.labeler.gate_entries:
            raise HTTPException(422, "the model has no gates")
        try:
            self.labeler.predictor.check_top_k(options.top_k)
        except UserError as error:
            raise HTTPException(422, str(error)) from error

    @contextlib.asynccontextmanager
    async def admit(self) -> AsyncIterator[Callable[[int], None]]:
        """Reserve a place in the queue for a request, within the time limit.

        Yields a function to call with the number of images once the request has arrived, which reserves their places.

        Raises:
          HTTPException: the server is not ready or is busy, or the request or its answer takes too long.
        """
        if self.state != READY:
            raise HTTPException(503, f"the server is {self.state}", {"Retry-After": "5"})
        late = HTTPException(408, f"the request did not arrive within {self.seconds:g} s", {"Connection": "close"})
        reserved = 0

        def reserve(images: int) -> None:
            nonlocal reserved
            if self.active + images - reserved > self._queue:
                raise HTTPException(429, "the server is busy", {"Retry-After": "1"})
            self.active += images - reserved
            reserved = images

        def arrived(images: int) -> None:
            nonlocal late
            late = HTTPException(504, f"there is no result after {self.seconds:g} s")
            reserve(images)

        try:
            reserve(1)
            async with asyncio.timeout(self.seconds):
                yield arrived
        except TimeoutError as error:
            raise late from error
        finally:
            self.active -= reserved

    async def in_reader(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that reads a part of a request, called in a thread for this."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    async def results(self, images: RequestImages, options: Options) -> list[dict[str, Any]]:
        """Return the result of each image, as JSON values; a result has an error if its image cannot be read."""
        decoded = await asyncio.gather(*(self.in_reader(self._decode, *image) for image in images))
        readable = [image for image in decoded if not isinstance(image, BadImage)]
        self.metrics.images.labels("unreadable").inc(len(decoded) - len(readable))
        outputs = iter(await self._batcher.submit(readable, EXPLAINED if options.attention else LABELED))
        self.metrics.images.labels("labeled").inc(len(readable))
        results = []
        for (name, _), image in zip(images, decoded, strict=True):
            if isinstance(image, BadImage):
                results.append({"image": name, "error": str(image)})
            else:
                results.append(self._result(name, image, next(outputs), options))
        return results

    def _decode(self, name: str, content: bytes | np.ndarray | BadImage) -> np.ndarray | BadImage:
        if not isinstance(content, bytes):
            return content
        try:
            return self.labeler.read(content, name)
        except BadImage as error:
            return error

    def _label_batch(self, images: list[np.ndarray], kind: str) -> list[Prediction]:
        self.metrics.batches.observe(len(images))
        return self.labeler.label(images, kind)

    def _result(self, name: str, image: np.ndarray, output: Prediction, options: Options) -> dict[str, Any]:
        predictor = self.labeler.predictor
        result = predictor.result(name, output.logits, options.top_k)
        answer = {"image": name, "labels": list(result.labels), "scores": result.scores}
        if options.gates:
            answer["gates"] = {
                gate: weights_by_label(predictor.names, weights) for gate, weights in output.gates.items()
            }
        if options.attention:
            answer["attention"] = self._attention(image, output)
        return answer

    def _attention(self, image: np.ndarray, output: Prediction) -> dict[str, Any]:
        """Return the attention maps of an image u8[H,W,3], with their grid and the image itself, as JSON values."""
        jpeg = base64.b64encode(thumbnail(image, MOST_SIDE)).decode()
        names, prompts = self.labeler.predictor.names, list_prompts(self.labeler.predictor.run.config)
        maps = {}
        for kind, weights in output.attention.items():
            rounded = np.round(np.float64(weights), _DIGITS).tolist()
            maps[kind] = {"queries": query_names(kind, len(weights), names, prompts), "weights": rounded}
        return {"image": f"data:image/jpeg;base64,{jpeg}", "grid": output.grid, "maps": maps}
