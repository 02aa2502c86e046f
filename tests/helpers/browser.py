"""A headless Chromium, driven through its debugging pipe: its log, its network requests, and the page it shows."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Chromium reads commands from file 3 and writes answers to file 4, which may be in use when it is started.
_START = """
import fcntl, os, sys
files = [fcntl.fcntl(int(file), fcntl.F_DUPFD, 10) for file in sys.argv[1:3]]
os.dup2(files[0], 3), os.dup2(files[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """Return the path of a Chromium, or None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `problems`: errors, exceptions, violations of the page's policy. `requests`: all addresses asked for."""

    def __init__(self, executable: str, *, limit: float = 60.0):
        self.limit, self.problems, self.requests = limit, [], []
        self._number, self._pending = 0, b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run")
        quiet = ("--disable-component-update", "--disable-background-networking", "--disable-extensions")
        profile = f"--user-data-dir={self._profile.name}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, (commands, answers)), executable, *flags, *quiet, profile],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data, sent = json.dumps(message).encode() + b"\0", 0
        while sent < len(data):
            sent += os.write(self._out, data[sent:])
        number, until = self._number, time.monotonic() + self.limit
        while True:
            answer = self._receive(until)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, page: Path | str) -> None:
        """Load a file, or an address, and wait until it says that it is drawn."""
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        until = time.monotonic() + self.limit
        while not self.run("document.documentElement?.dataset.ready === 'true'"):
            assert time.monotonic() < until, f"the page is not drawn after {self.limit} s; problems: {self.problems}"
            time.sleep(0.05)

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

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium does not answer within {self.limit} s"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has ended"
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(details["exceptionDetails"].get("exception", details["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.problems.append([argument.get("value") for argument in details["args"]])
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.problems.append(details["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
