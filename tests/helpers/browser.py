"""A headless Chromium, driven through its debugging pipe: its log, its network requests, and the page it shows.

Limits: one tab, and events are seen while the answer to a command is awaited. A test with it is skipped if no Chromium
is on the path.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import until

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
    *("--disable-component-update", "--disable-background-networking", "--disable-extensions"),
)


def find() -> str | None:
    """Return the path of a Chromium, or None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def opened(page: Path | str, width: int = 1280) -> Iterator[Browser]:
    """Give a tab that shows a page."""
    if (executable := find()) is None:
        pytest.skip(f"no browser on the path: none of {', '.join(NAMES)}")
    with Browser(executable) as tab:
        tab.look(width=width)
        tab.open(page)
        yield tab


class Browser:
    """One tab. `problems`: errors, exceptions, violations of the page's policy. `requests`: all addresses asked for."""

    def __init__(self, executable: str, *, limit: float = 60.0):
        self.limit, self.problems, self.requests = limit, [], []
        self._number, self._pending, self._session = 0, b"", None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._pipe, theirs = socket.socketpair()
        self._pipe.settimeout(limit)
        with theirs:  # Chromium reads commands from file 3 and writes answers to file 4
            files = f'exec "$@" 3<&{theirs.fileno()} 4>&{theirs.fileno()}'
            command = ["bash", "-c", files, "", executable, *FLAGS, f"--user-data-dir={self._profile.name}"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], **quiet)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        self._process.wait()
        self._pipe.close()
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._pipe.sendall(json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer.get("method"), answer.get("params", {}))
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, page: Path | str) -> None:
        """Load a file, or an address, and wait until it says that it is drawn."""
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        until(lambda: self.run("document.documentElement?.dataset.ready === 'true'"), self.limit)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def look(self, *, width: int, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the window and the preferred colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            data = self._pipe.recv(1 << 20)
            assert data, "Chromium has ended"
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, details: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(details["exceptionDetails"].get("exception", details["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.problems.append([argument.get("value") for argument in details["args"]])
        elif event == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.problems.append(details["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
