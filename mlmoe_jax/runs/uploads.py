"""Uploads of growing files, such as a log, to a run folder in an object store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mlmoe_jax.errors import UserError, reason_of

_logger = logging.getLogger(__name__)

UPLOAD_SECONDS = 30.0  # between the starts of two uploads during training


class Uploads:
    """Background uploads of growing files, such as logs, to an object store, by the function `write(name, content)`.

    Each file is uploaded as a whole, because an object store cannot append. The uploads that `offer` starts are at
    least UPLOAD_SECONDS apart, because an object store accepts about one write per second and object. Uploads run in a
    thread, so that training does not wait.
    """

    def __init__(self, write: Callable[[str, bytes], None]):
        self._write, self._files, self._began = write, {}, time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="uploads")
        self._running: Future | None = None

    def add(self, name: str, content: Callable[[], bytes]) -> None:
        """Add a file. `content` returns its current content, in the thread that calls `offer`, `send` or `close`."""
        self._files[name] = content

    def offer(self) -> None:
        """Start an upload of all files in the background, if it is due.

        An upload is due if UPLOAD_SECONDS have passed since the start of the previous upload, and the previous upload
        has ended. If the previous upload has failed, a warning is logged, because the new upload has all its content.
        """
        if time.monotonic() - self._began < UPLOAD_SECONDS or not (self._running is None or self._running.done()):
            return
        if self._running is not None and (error := self._running.exception()):
            _logger.warning(f"{error}; it will be tried again")
        self._start()

    def send(self) -> None:
        """Upload all files and wait until the upload has ended; UserError if it fails."""
        if self._files:
            self._start().result()

    def close(self) -> None:
        """Upload all files a last time, as `send` does, and remove them from the list of files."""
        self.send()
        self._files.clear()

    def _start(self) -> Future:
        files = {name: content() for name, content in self._files.items()}
        self._running = self._thread.submit(self._upload, files)
        self._began = time.monotonic()
        return self._running

    def _upload(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            try:
                self._write(name, content)
            except Exception as error:  # the library of each store raises its own types
                raise UserError(f"cannot upload {name}: {reason_of(error)}") from error
