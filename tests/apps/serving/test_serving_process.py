"""The server as a process: its address, its signals, and its exit codes."""

import contextlib
import errno
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.color_model import NAMES, color, expected
from helpers.color_server import PNG
from helpers.devices import environment_of
from helpers.drawn_images import encoded

PROGRAM = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, such as these tests, ignore it
from helpers.color_server import make_labeler, slowed
from mlmoe_jax.apps.serving import server
from mlmoe_jax.inference.predictor import Predictor

labeler = make_labeler(bias=float(sys.argv[2]))
Predictor.from_run = lambda *given, **options: labeler.predictor
server.Labeler = lambda predictor: slowed(labeler, 0.2)
from mlmoe_jax.main import main
sys.exit(main(["--mode=serve", "--workdir=" + sys.argv[1], "--port=0"]))
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts the server and returns its process."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    started = []

    def run(bias: float = 0.0) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(bias)]
        environment = environment_of(PYTHONPATH=os.pathsep.join(sys.path))
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen) -> str:
    for line in process.stderr:
        if found := re.search(r"ready: (http://\S+)", line):
            return found[1]
    raise AssertionError("it ended before it was ready")


def post(address: str, red: int) -> list[float]:
    request = urllib.request.Request(f"{address}/predict", encoded(color(red)), PNG)
    with urllib.request.urlopen(request, timeout=30) as answer:
        scores = json.loads(answer.read())["results"][0]["scores"]
    return [scores[name] for name in NAMES]


def assert_a_signal_ends_it_after_what_was_asked(process, address: str, number: int, code: int) -> None:
    assert post(address, 10) == pytest.approx(expected(10), rel=1e-4)
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(post, address, n) for n in range(8)]
        taken = 0.0
        while taken < 8:  # all of them are in the queue
            with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
                taken = float(re.search(r"^mlmoe_taken_images (\S+)$", answer.read().decode(), re.MULTILINE)[1])
            if any(one.done() for one in asked):
                break
        process.send_signal(number)
        for n, answer in enumerate(asked):
            assert answer.result(30) == pytest.approx(expected(n), rel=1e-4)
    _, text = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in text
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as late:
        assert late.connect_ex((host, int(port))) == errno.ECONNREFUSED


@pytest.mark.slow
def test_ctrl_c_ends_it_after_what_was_asked_is_answered(start):
    process = start()
    assert_a_signal_ends_it_after_what_was_asked(process, ready(process), signal.SIGINT, 130)


@pytest.mark.slow
def test_what_a_client_breaks_off_or_sends_too_much_of_harms_nobody_until_sigterm_ends_it(start):
    process = start()
    address = ready(process)
    host, port = address.removeprefix("http://").split(":")
    head = f"POST /predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: image/png\r\n"
    chunked = "Transfer-Encoding: chunked\r\n\r\n5\r\nab"
    for body in ("Content-Length: 100\r\n\r\nabc", chunked, "Content-Length: x\r\n\r\n"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall((head + body).encode())
    for path, size, headers, status in (
        ("/predict", 17 << 20, {}, 413),
        ("/predict?top_k=0", 10 << 20, {"Connection": "close"}, 422),
        ("/no-such-page", 10 << 20, {"Connection": "close"}, 404),
    ):
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=30)) as client:
            client.request("POST", path, bytes(size), PNG | headers)
            with client.getresponse() as answer:
                assert answer.status == status, "answered, and not cut off while it sends"
    with socket.create_connection((host, int(port))) as patient:
        patient.sendall((head + "Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n").encode())
        assert patient.recv(100).startswith(b"HTTP/1.1 413 ")
    assert_a_signal_ends_it_after_what_was_asked(process, address, signal.SIGTERM, 0)
