"""The state of a server: the compiled model, the queue of images, the counters, and the results of requests."""

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from fastapi import HTTPException
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from mlmoe_jax.apps.serving.batching import Batcher
from mlmoe_jax.apps.serving.labeler import EXPLAINED, LABELED, Labeler
from mlmoe_jax.apps.serving.request_images import LIMITS, RequestImages, RequestLimits
from mlmoe_jax.apps.serving.turns import Turns
from mlmoe_jax.data.decoding import MAX_DECODED, BadImage
from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.explain import MOST_SIDE, list_prompts, query_names, thumbnail
from mlmoe_jax.inference.predictor import weights_by_label
from mlmoe_jax.models.outputs import LABELS, Prediction
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.workers import WorkerLost, Workers

Result = dict[str, Any]  # what `Service.results` returns about an image
STARTING, READY, STOPPING = "starting", "ready", "stopping"
_WAIT = 0.005  # longest time in seconds that an image waits for images that are being read
_FIRST_FRAME = "it has several frames, of which the first is labeled"
_DIGITS = 5  # digits of weights in answers
_READERS = min(4, os.cpu_count() or 1)  # processes that decode one image at a time each
_DECODE_SECONDS = 10.0  # the longest time that decoding one image may take
_DECODE_BYTES = 3 * MAX_DECODED  # of decoding, of the decoded array, and of the process itself
_PENALTY = 10  # seconds that a request waits behind others per second that its images were decoded
_GAUGES = {
    "queue_images": "Images that wait for a batch.",
    "taken_images": "Images that are being read, wait or are being labeled.",
    "replaced_readers": "Processes that decode images, replaced because an image took too long or they ended.",
}
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class RequestOptions(BaseModel):
    """The query parameters of /predict."""

    model_config = ConfigDict(extra="forbid")
    top_k: int | None = Field(None, ge=1, description="Number of labels per image, instead of thresholds.")
    gates: bool = Field(False, description="Return routing weights too.")
    attention: bool = Field(False, description="Return attention maps and the image as the model received it too.")


def require_result(results: Sequence[Result]) -> None:
    """Raise HTTPException if the results of all images are errors."""
    if all("error" in result for result in results):
        raise HTTPException(422, results[0]["error"])


class _Decoded(NamedTuple):
    """The model's input u8[H,W,3] from an image file, and whether the file has several frames."""

    pixels: np.ndarray
    has_frames: bool


class ServerMetrics:
    """The Prometheus metrics of one server.

    `sizes` are the buckets of the histogram of batch sizes. `gauges` has a function for each name in _GAUGES.
    """

    def __init__(self, sizes: tuple[int, ...], **gauges: Callable[[], int]):
        self._registry = CollectorRegistry()
        options = {"registry": self._registry}
        self.requests = Counter("mlmoe_requests", "Requests by path and status.", ("path", "status"), **options)
        self.seconds = Histogram("mlmoe_request_seconds", "Time per request.", ("path",), buckets=_BUCKETS, **options)
        self.refused = Counter("mlmoe_refused_connections", "Connections closed for what they sent.", **options)
        self.images = Counter("mlmoe_images", "Images by result, labeled or unreadable.", ("result",), **options)
        self.batches = Histogram("mlmoe_batch_images", "Images per batch.", buckets=sizes, **options)
        for name, value in gauges.items():
            Gauge(f"mlmoe_{name}", _GAUGES[name], **options).set_function(value)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


class Service:
    """The service that labels the images of requests.

    `compiled` is called when the model is compiled, with None or the error of the compilation.

    Attributes:
      state: STARTING, READY or STOPPING.
      active: the places in use: one per image in progress, and one per complete request whose images are not counted
        yet.
      readers: the processes that decode images.
    """

    def __init__(
        self,
        labeler: Labeler,
        limits: RequestLimits = LIMITS,
        *,
        compiled: Callable[[Exception | None], None] = lambda error: None,
    ):
        self.labeler, self.limits, self._compiled = labeler, limits, compiled
        self.state, self.active = STARTING, 0
        reader, most_pixels = ImageReader.from_config(labeler.predictor.run.config.data), int(limits.megapixels * 1e6)
        reader = replace(reader, decoding=replace(reader.decoding, most_pixels=most_pixels))
        self.readers = Workers(reader.encoded, _READERS, seconds=_DECODE_SECONDS, most_bytes=_DECODE_BYTES)
        self._turns = Turns(_READERS)
        self.metrics = ServerMetrics(
            labeler.sizes[LABELED],
            queue_images=lambda: len(self._batcher),
            taken_images=lambda: self.active,
            replaced_readers=lambda: self.readers.replaced,
        )
        self._batcher = Batcher(
            labeler,
            self.metrics.batches.observe,
            wait=_WAIT,
            more_expected=lambda: self.active > len(self._batcher),  # images that are being read
        )

    # ------------------------------------------------------------------------------------------------ start and end
    async def run(self) -> None:
        """Compile the model, and then label queued images, until `stop` has been called and the queue is empty."""
        try:
            await asyncio.to_thread(self.labeler.compile, lambda: self.state == STOPPING)
        except Exception as error:  # raised by `serve`
            self._compiled(error)
            return
        if self.state == STARTING:
            self.state = READY
            self._compiled(None)
        await self._batcher.run()

    def stop(self) -> None:
        """Refuse new requests, and let `run` return once the queue is empty."""
        self.state = STOPPING
        self._batcher.close()

    def close(self) -> None:
        """End the processes. Call this after `run` has returned."""
        self.readers.kill()
        self.readers.close()

    # ---------------------------------------------------------------------------------------------------- a request
    def describe(self) -> dict[str, Any]:
        """Return the description of the model and the server, which can be written as JSON.

        Keys: `labels` (a list of names with thresholds; None = the label is never assigned), `attributes` (name -> the
        labels of its values), `gates` (name of a gate -> names of its entries), `image_size` (in pixels) and `limits`.
        """
        predictor = self.labeler.predictor
        thresholds = [None if value == float("inf") else value for value in predictor.thresholds.tolist()]
        pairs = zip(predictor.names, thresholds, strict=True)
        return {
            "labels": [{"name": name, "threshold": threshold} for name, threshold in pairs],
            "attributes": {item.name: [predictor.names[k] for k in item.present] for item in predictor.tree.attributes},
            "gates": self.labeler.gate_entries,
            "image_size": predictor.run.preprocess.image_size,
            "limits": asdict(self.limits),
        }

    def check(self, options: RequestOptions) -> None:
        """Raise HTTPException if the model does not support the options: no gates, or fewer labels than `top_k`."""
        if options.gates and not self.labeler.gate_entries:
            raise HTTPException(422, "the model has no gates")
        try:
            self.labeler.predictor.check_top_k(options.top_k)
            self.labeler.predictor.check_gates(options.gates)
        except UserError as error:
            raise HTTPException(422, str(error)) from error

    @contextlib.asynccontextmanager
    async def admit(self) -> AsyncIterator[Callable[[int], None]]:
        """Admit a request: limit its time, and reserve places for its images while the context is active.

        The context yields a function `arrived`. Call it with the number of images when the whole request has arrived.
        The function releases the places of an earlier call, and reserves one place per image. A request that is still
        arriving has no place, so that slow clients do not keep other clients out.

        Raises:
          HTTPException: the server is not ready or stops, all places are reserved, or the time limit is exceeded.
        """
        if self.state != READY:
            raise HTTPException(503, f"the server is {self.state}", {"Retry-After": "5"})
        seconds = self.limits.seconds
        late = HTTPException(408, f"the request did not arrive within {seconds:g} s", {"Connection": "close"})
        reserved = 0

        def arrived(images: int) -> None:
            nonlocal late, reserved
            late = HTTPException(504, f"there is no result after {seconds:g} s")
            require_places(images - reserved)
            self.active += images - reserved
            reserved = images

        def require_places(count: int) -> None:
            if self.active + count > self.limits.queue:
                raise HTTPException(429, "the server is busy", {"Retry-After": "1"})

        try:
            require_places(1)
            async with asyncio.timeout(seconds):
                yield arrived
        except TimeoutError as error:
            raise late from error
        except asyncio.CancelledError as error:  # the server waits no longer for its requests
            raise HTTPException(503, "the server is stopping") from error
        finally:
            self.active -= reserved

    async def results(self, images: RequestImages, options: RequestOptions) -> list[Result]:
        """Label images, and return one dict per image that can be written as JSON.

        Keys: `image` (the name), `labels` (the assigned labels), `scores` (label -> probability), `attributes`
        (attribute -> value) if the model has some and, depending on the options, `gates` and `attention`. For an
        unreadable image: `image` and `error`. For an image with several frames also `note`.
        """
        decoded = await self._decode_all(images)
        readable = [image.pixels for image in decoded if not isinstance(image, BadImage)]
        self.metrics.images.labels("unreadable").inc(len(decoded) - len(readable))
        outputs = iter(await self._batcher.submit(readable, EXPLAINED if options.attention else LABELED))
        self.metrics.images.labels("labeled").inc(len(readable))
        return [
            {"image": name, "error": str(image)}
            if isinstance(image, BadImage)
            else self._result(name, image, next(outputs), options)
            for (name, _), image in zip(images, decoded, strict=True)
        ]

    async def _decode_all(self, images: RequestImages) -> list[_Decoded | BadImage]:
        """Decode the images of a request.

        The more time its decoded images took, the longer its remaining images wait behind images of other requests.
        """
        clock, few = asyncio.get_running_loop().time, asyncio.Semaphore(_READERS)
        due = clock()

        async def decode(name: str, content: bytes | BadImage) -> _Decoded | BadImage:
            nonlocal due
            async with few, self._turns(due):
                started = clock()
                image = await self._decode(name, content)
                due += _PENALTY * (clock() - started)
                return image

        return await asyncio.gather(*(decode(*image) for image in images))

    async def _decode(self, name: str, content: bytes | BadImage) -> _Decoded | BadImage:
        if isinstance(content, BadImage):
            return content
        try:
            image = _Decoded(*await asyncio.wrap_future(self.readers.submit(content, name)))
        except BadImage as error:
            return error
        except WorkerLost as error:
            return BadImage(f"cannot read {name} as an image: {error}; store it again")
        if image.has_frames:
            status(f"{name}: {_FIRST_FRAME}")
        return image

    def _result(self, name: str, image: _Decoded, output: Prediction, options: RequestOptions) -> Result:
        predictor = self.labeler.predictor
        result = predictor.result(name, output.logits, options.top_k)
        answer = {"image": name, "labels": list(result.labels), "scores": result.scores}
        if result.attributes:
            answer["attributes"] = result.attributes
        if image.has_frames:
            answer["note"] = _FIRST_FRAME
        if options.gates:
            answer["gates"] = {
                gate: weights_by_label(predictor.names, predictor.output.join(weights.T).T)
                for gate, weights in output.gates.items()
            }
        if options.attention:
            answer["attention"] = self._attention(image.pixels, output)
        return answer

    def _attention(self, image: np.ndarray, output: Prediction) -> dict[str, Any]:
        """Return the attention maps for `image`, the model's input u8[H,W,3], as a dict that can be written as JSON.

        Keys: `image` (a data URL of a JPEG file), `grid` (rows and columns of patches) and `maps`: kind of attention ->
        the names of the queries, and their weights over the patches.
        """
        jpeg = base64.b64encode(thumbnail(image, MOST_SIDE)).decode()
        predictor = self.labeler.predictor
        prompts, kept = list_prompts(predictor.run.config), predictor.output.kept
        names = [predictor.names[source] for source in predictor.output.sources[kept]]
        maps = {}
        for kind, weights in output.attention.items():
            weights = weights[kept] if kind == LABELS else weights
            rounded = np.round(np.float64(weights), _DIGITS).tolist()
            maps[kind] = {"queries": query_names(kind, len(weights), names, prompts), "weights": rounded}
        return {"image": f"data:image/jpeg;base64,{jpeg}", "grid": output.grid, "maps": maps}
