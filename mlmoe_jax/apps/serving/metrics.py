"""What `/metrics` reports, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counters of one server. waiting: returns the images that wait; taken: those that also are read or labeled."""

    def __init__(self, waiting: Callable[[], int], taken: Callable[[], int], sizes: tuple[int, ...]):
        self._registry = registry = CollectorRegistry()
        of = {"registry": registry}
        self._requests = Counter("mlmoe_requests", "Requests by path and status.", ("path", "status"), **of)
        self._seconds = Histogram("mlmoe_request_seconds", "Time per request.", ("path",), buckets=_SECONDS, **of)
        self._images = Counter("mlmoe_images", "Images by result, labeled or unreadable.", ("result",), **of)
        self._batch = Histogram("mlmoe_batch_images", "Images per batch.", buckets=sizes, **of)
        Gauge("mlmoe_queue_images", "Images that wait for a batch.", **of).set_function(waiting)
        Gauge("mlmoe_taken_images", "Images that are being read, wait or are being labeled.", **of).set_function(taken)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request. path: of a known route, so that their number is bounded."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def labeled(self, images: int) -> None:
        """Count images that were labeled."""
        self._images.labels("labeled").inc(images)

    def unreadable(self, images: int) -> None:
        """Count images that could not be read."""
        self._images.labels("unreadable").inc(images)

    def batch(self, size: int) -> None:
        """Count a batch."""
        self._batch.observe(size)

    def text(self) -> bytes:
        """Return all values."""
        return generate_latest(self._registry)
