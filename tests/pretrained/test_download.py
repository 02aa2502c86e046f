"""Downloads from a local server that closes connections, changes the file and refuses, onto a disk that may be full."""

import email.utils
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlmoe_jax.errors import UserError
from mlmoe_jax.pretrained import download, web
from mlmoe_jax.pretrained.download import Unreachable, check_pinned, fetch
from mlmoe_jax.runtime import progress

CHUNK = 10_000
CONTENT = bytes(range(256)) * 200
OTHER = CONTENT[::-1]
COMMIT = "c" * 40
HUB_PATH = "org/model/resolve/main/sub/model.safetensors"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Answer:
    """The response to one request. cut: close after this many bytes. wait: event to await before the last half."""

    status: int = 200
    cut: int | None = None
    ranges: bool = True
    heed_if_range: bool = True
    validators: bool = True
    length: bool = True
    headers: tuple = ()
    wait: threading.Event | None = None


class Site(ThreadingHTTPServer):
    """A server of one file; `script` holds the responses to the next GETs, after which come default ones."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.script, self.requests, self.hub_status, self.hub_error = CONTENT, [], [], 200, ""

    def address(self, path: str = "model.safetensors", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}/{path}"

    def handle_error(self, request, client_address):
        """Print nothing about clients that have disconnected."""

    @property
    def ranges(self) -> list[str | None]:
        """The Range header of every GET."""
        return [headers["Range"] for method, _, headers in self.requests if method == "GET"]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        """Respond like the Hugging Face hub for a large file."""
        self.server.requests.append(("HEAD", self.path, self.headers))
        self.send_response(self.server.hub_status)
        for name, value in {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Etag": f'"{sha256(self.server.content)}"',
            "X-Linked-Size": str(len(self.server.content)),
            "ETag": '"pointer"',
            "Content-Length": "7",
            "X-Error-Code": self.server.hub_error,
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self):
        site, content = self.server, self.server.content
        site.requests.append(("GET", self.path, self.headers))
        if "/resolve/" in self.path:
            self.send_response(302)
            self.send_header("Location", site.address("cdn", host="localhost"))
            self.end_headers()
            return
        answer = site.script.pop(0) if site.script else Answer()
        tag, first, status = f'"{sha256(content)[:8]}"', 0, answer.status
        known = (None, tag) if answer.heed_if_range else (None, tag, self.headers["If-Range"])
        if status == 200 and answer.ranges and self.headers["Range"] and self.headers["If-Range"] in known:
            first, status = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")), 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        if answer.length:
            self.send_header("Content-Length", str(len(content) - first))
        if answer.validators:
            self.send_header("ETag", tag)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        body = content[first:][: answer.cut]
        half = len(body) // 2
        self.wfile.write(body[:half])
        if answer.wait:
            answer.wait.wait(5)
        self.wfile.write(body[half:])


@pytest.fixture
def site():
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The requested pauses, none of which is made; environment variables for proxies and tokens are removed."""
    asked = []
    monkeypatch.setattr(download, "pause", asked.append)
    monkeypatch.setattr(web, "CHUNK", CHUNK)
    for name in ("MLMOE_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return asked


@pytest.fixture
def target(tmp_path) -> Path:
    """A path in a cache folder that does not exist yet."""
    return tmp_path / "cache" / "vit" / "model.safetensors"


def names(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


def assert_complete(target: Path, content: bytes = CONTENT):
    assert target.read_bytes() == content
    assert names(target) == [target.name, f"{target.name}.sha256"]
    assert Path(f"{target}.sha256").read_text() == f"{sha256(content)}  {target.name}\n"


def leave_part(site: Site, target: Path, cut: int = 30_000):
    """Let a download fail for good after `cut` bytes."""
    script, site.script = site.script, [Answer(cut=cut), *[Answer(503)] * 9]
    with pytest.raises(Unreachable):
        fetch(site.address(), target)
    assert names(target) == [f"{target.name}.part", f"{target.name}.part.json"]
    assert Path(f"{target}.part").read_bytes() == site.content[:cut]
    site.script = script
    site.requests.clear()


# ------------------------------------------------------------------------------------------------------------ success
def test_a_whole_file_is_downloaded_and_pinned(site, target, pauses):
    assert fetch(site.address(), target) == target
    assert_complete(target)
    assert pauses == []
    assert fetch(site.address(), target) == target
    assert len(site.requests) == 1


def test_a_file_with_the_given_sha256_and_size_is_accepted(site, target):
    fetch(site.address(), target, sha256=sha256(CONTENT).upper(), size=len(CONTENT))
    assert_complete(target)


def test_a_cut_download_resumes_where_it_stopped(site, target, pauses):
    site.script = [Answer(cut=30_000), Answer(cut=1000)]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-", "bytes=31000-"]
    # A chunk arrived before the first pause, less than one before the second.
    assert pauses == [download.PAUSES[0], download.PAUSES[1]]


def test_progress_resets_the_number_of_retries(site, target, pauses):
    site.script = [Answer(cut=CHUNK)] * 5
    fetch(site.address(), target)
    assert_complete(target)
    assert pauses == [download.PAUSES[0]] * 5


def test_a_later_call_resumes_where_an_earlier_one_stopped(site, target):
    leave_part(site, target)
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == ["bytes=30000-"]


def test_a_complete_part_is_only_moved(site, target):
    leave_part(site, target)
    Path(f"{target}.part").write_bytes(CONTENT)
    fetch(site.address(), target)
    assert_complete(target)
    assert site.requests == []


def test_a_server_without_ranges_restarts_the_download(site, target):
    site.script = [Answer(cut=30_000), Answer(ranges=False)]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-"]


def test_a_server_without_validators_restarts_the_download(site, target):
    site.script = [Answer(cut=30_000, validators=False)]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, None]


def test_the_modification_time_replaces_a_missing_strong_etag(site, target):
    when = email.utils.formatdate(0, usegmt=True)
    weak = (("Last-Modified", when), ("ETag", 'W/"x"'))
    site.script = [Answer(cut=30_000, validators=False, headers=weak)]
    site.script += [Answer(heed_if_range=False, validators=False, headers=weak)]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-"]
    assert site.requests[1][2]["If-Range"] == when


@pytest.mark.parametrize("heed_if_range", [True, False])
def test_a_file_that_changed_meanwhile_is_downloaded_from_the_start(site, target, heed_if_range):
    leave_part(site, target)
    site.content = OTHER
    site.script = [Answer(heed_if_range=heed_if_range)]
    fetch(site.address(), target)
    assert_complete(target, OTHER)
    assert site.ranges == (["bytes=30000-"] if heed_if_range else ["bytes=30000-", None])


def test_a_file_that_became_shorter_is_downloaded_from_the_start(site, target):
    leave_part(site, target)
    site.content = OTHER[:1000]
    site.script = [Answer(416)]
    fetch(site.address(), target)
    assert_complete(target, OTHER[:1000])


@pytest.mark.parametrize("notes", ["", "{", "[]", '{"address": 1}', json.dumps({"address": "https://else.where/x"})])
def test_a_part_of_unknown_origin_is_not_used(site, target, notes):
    target.parent.mkdir(parents=True)
    Path(f"{target}.part").write_bytes(OTHER[:1000])
    Path(f"{target}.part.json").write_text(notes)
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None]


def test_a_part_that_is_too_long_is_not_used(site, target):
    leave_part(site, target)
    Path(f"{target}.part").write_bytes(CONTENT + b"x")
    fetch(site.address(), target)
    assert_complete(target)


def test_temporary_failures_are_retried_after_a_pause(site, target, pauses):
    soon = email.utils.formatdate(time.time() + 60, usegmt=True)
    site.script = [
        Answer(503),
        Answer(429, headers=(("Retry-After", "7"),)),
        Answer(503, headers=(("Retry-After", soon),)),
        Answer(429, headers=(("Retry-After", "9999"),)),
    ]
    fetch(site.address(), target)
    assert_complete(target)
    assert pauses[:2] == [download.PAUSES[0], 7.0]
    assert 50 < pauses[2] <= 60
    assert pauses[3:] == [download.LONGEST_PAUSE]


def test_a_server_that_stops_responding_is_retried(site, target, monkeypatch):
    monkeypatch.setattr(web, "TIMEOUT", 0.2)
    site.script = [Answer(wait=threading.Event())]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, f"bytes={len(CONTENT) // 2}-"]


def test_a_proxy_is_used(site, target, monkeypatch):
    monkeypatch.setenv("http_proxy", site.address(""))
    monkeypatch.setenv("no_proxy", "")
    fetch("http://localhost:1/model.safetensors", target)
    assert_complete(target)
    assert site.requests[0][1] == "http://localhost:1/model.safetensors"


# ------------------------------------------------------------------------------------------------------------ progress
def test_lines_are_shown_without_a_terminal(site, target, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    site.script = [Answer(cut=30_000)]
    fetch(site.address(), target)
    out, lines = capsys.readouterr()
    assert out == ""
    assert f"downloading {site.address()} (0.1 MB) to {target}\n" in lines
    assert f"downloading {site.address()} (0.1 MB) to {target}, resuming at 0.0 MB\n" in lines
    assert "model.safetensors 0.1 MB of 0.1 MB, " in lines
    assert "MB/s, 0:00:00 left" in lines
    assert "retrying in 1 s" in lines
    assert f"downloaded {target} (0.1 MB, sha256 " in lines


def test_a_bar_on_a_terminal(site, target, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch(site.address(), target)
    assert "model.safetensors:   0%|" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ failure
@pytest.mark.parametrize("status", [401, 403, 404, 410, 418])
def test_a_refusal_is_reported_at_once(site, target, refusal, pauses, status):
    site.script = [Answer(status)]
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert f"the server responds with {status}" in text
    assert_helps(text, site.address(), target)
    assert names(target) == []
    assert pauses == []


def assert_helps(text: str, address: str, target: Path):
    """The message has the file, the folder, the address and the remedy."""
    start = f"{target.name} is not in {target.parent} and cannot be downloaded from {address}, because "
    assert text.startswith(start)
    assert text.endswith(f"; put a copy of the file at {target}")


def test_a_server_that_stays_broken_is_given_up(site, target, refusal, pauses):
    site.script = [Answer(500)] * 9
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert "because the server responds with 500, and retrying did not help; put" in text
    assert pauses == list(download.PAUSES)


def test_a_download_that_always_fails_is_given_up_and_its_part_kept(site, target, refusal):
    site.script = [Answer(cut=30_000), *[Answer(cut=0)] * 9]
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert "the connection was lost after 0.0 MB of 0.1 MB, and retrying did not help (the next start resumes" in text
    assert_helps(text, site.address(), target)
    assert names(target) == [f"{target.name}.part", f"{target.name}.part.json"]


def test_a_closed_port(site, target, refusal, pauses):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/model.safetensors"
        text = refusal(fetch, address, target, error=Unreachable)
    assert "127.0.0.1 cannot be reached (Connection refused)" in text
    assert_helps(text, address, target)
    assert pauses == [download.PAUSES[0]]
    assert names(target) == []


@pytest.mark.parametrize(
    "address", ["https://weights.example/m", "https://huggingface.co/facebook/dinov2-base/resolve/main/m"]
)
def test_no_network(target, refusal, monkeypatch, address, hub):
    def fail(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    text = refusal(fetch, address, target, error=Unreachable)
    assert "cannot be reached (" in text
    assert "Name or service not known" in text
    assert_helps(text, address, target)


def test_offline_mode(site, target, refusal, monkeypatch):
    monkeypatch.setenv("MLMOE_OFFLINE", "1")
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert "because MLMOE_OFFLINE is set" in text
    assert_helps(text, site.address(), target)
    assert site.requests == []
    assert not target.parent.exists()
    monkeypatch.setenv("MLMOE_OFFLINE", "0")
    fetch(site.address(), target)
    monkeypatch.setenv("MLMOE_OFFLINE", "1")
    assert fetch(site.address(), target) == target


@pytest.mark.parametrize("address", ["http://weights.example/m", "file:///etc/passwd", "this package; a script"])
def test_only_https(target, refusal, address):
    assert f"'{address}' is not an https address" in refusal(fetch, address, target, error=Unreachable)


def test_a_redirect_does_not_leave_https(site, target, refusal):
    site.script = [Answer(302, headers=(("Location", "http://weights.example/m"),))]
    assert "'http://weights.example/m' is not an https address" in refusal(fetch, site.address(), target)


def test_a_web_page_is_not_taken_for_a_file(site, target, refusal):
    site.script = [Answer(headers=(("Content-Type", "text/html; charset=utf-8"),))]
    assert "is a web page" in refusal(fetch, site.address(), target, error=Unreachable)
    assert names(target) == []


def test_a_file_of_unknown_length_is_refused(site, target, refusal):
    site.script = [Answer(length=False), Answer(length=False, cut=1000), Answer(length=False)]
    assert "does not give the length of the file" in refusal(fetch, site.address(), target, error=Unreachable)
    fetch(site.address(), target, size=len(CONTENT))
    assert_complete(target)
    assert site.ranges == [None, None, "bytes=1000-"]


# -------------------------------------------------------------------------------------------------------- wrong content
def test_a_wrong_length_is_refused_before_the_download(site, target, refusal):
    text = refusal(fetch, site.address(), target, size=1234)
    assert text.startswith(f"{site.address()} has 51,200 bytes instead of the expected 1,234, so")
    assert names(target) == []


@pytest.mark.parametrize("broken", [False, True])
def test_a_wrong_sha256_is_deleted(site, target, refusal, broken):
    site.script = [Answer(cut=30_000)] if broken else []
    text = refusal(fetch, site.address(), target, sha256=sha256(OTHER))
    assert site.address() in text
    assert f"{sha256(CONTENT)[:12]}… instead of the {sha256(OTHER)[:12]}… that was given; start again, or put" in text
    assert names(target) == []


def test_a_second_download_must_match_the_pinned_first(site, target, refusal):
    fetch(site.address(), target)
    target.unlink()
    site.content = OTHER
    text = refusal(fetch, site.address(), target)
    assert f"of the first download; start again, or delete {target}.sha256 if the new file is right, or put" in text
    assert names(target) == [f"{target.name}.sha256"]
    Path(f"{target}.sha256").unlink()
    fetch(site.address(), target)
    assert_complete(target, OTHER)


def test_an_existing_file_is_checked(site, target, refusal):
    fetch(site.address(), target)
    check_pinned(target)
    check_pinned(target, sha256=sha256(CONTENT))
    assert "delete it so that it is downloaded again" in refusal(check_pinned, target, sha256=sha256(OTHER))
    target.write_bytes(OTHER)
    for function, arguments in ((check_pinned, (target,)), (fetch, (site.address(), target))):
        text = refusal(function, *arguments)
        assert text.startswith(f"{target} is damaged or has been replaced, as its sha256 is {sha256(OTHER)[:12]}…")
        assert text.endswith(f"or {target}.sha256 if the replacement is intended")
    assert target.read_bytes() == OTHER
    Path(f"{target}.sha256").unlink()
    check_pinned(target)


# ----------------------------------------------------------------------------------------------------------- the disk
def test_too_little_space_is_reported_before_the_download(site, target, refusal, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: type("Usage", (), {"total": 1, "free": 20_000})())
    text = refusal(fetch, site.address(), target)
    needed = f"it needs 0.1 MB and {target.parent} has 0.0 MB free"
    assert text.startswith(f"there is not enough space for model.safetensors: {needed}")
    assert names(target) == []


def test_an_existing_part_reduces_the_space_needed(site, target, monkeypatch):
    leave_part(site, target)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: type("Usage", (), {"total": 1, "free": 25_000})())
    fetch(site.address(), target)
    assert_complete(target)


def test_a_full_disk(site, target, refusal, monkeypatch):
    """The part is written to /dev/full, so that the operating system itself reports the full disk."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    begin = download._Part.begin

    def on_full_disk(part, **notes):
        begin(part, **notes)
        part.path.unlink()
        part.path.symlink_to("/dev/full")

    monkeypatch.setattr(download._Part, "begin", on_full_disk)
    text = refusal(fetch, site.address(), target)
    assert text.startswith(
        f"the disk became full during the download of {target}, and the partial file was deleted; free"
    )
    assert names(target) == []


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end(site, target, refusal, monkeypatch, function):
    def fail(*_):
        raise OSError(download.errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(download.os, function, fail)
        assert f"cannot write {target}: Input/output error; set" in refusal(fetch, site.address(), target)
    assert not target.exists()
    fetch(site.address(), target)
    assert_complete(target)
    assert len(site.requests) == 1


def test_a_folder_that_cannot_be_made(site, target, refusal):
    target.parents[1].write_text("a file")
    assert f"cannot write {target}: " in refusal(fetch, site.address(), target)


# -------------------------------------------------------------------------------------- interruption, several processes
def test_an_interrupted_download_can_be_resumed(site, target, monkeypatch):
    add = download.Meter.add

    def interrupted(meter, count):
        add(meter, count)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download.Meter, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(site.address(), target)
    assert names(target) == [f"{target.name}.part", f"{target.name}.part.json"]
    have = Path(f"{target}.part").stat().st_size
    assert 0 < have < len(CONTENT)
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, f"bytes={have}-"]


def test_two_threads_download_once(site, target, capsys):
    proceed, results = threading.Event(), []
    site.script = [Answer(wait=proceed)]
    threads = [threading.Thread(target=lambda: results.append(fetch(site.address(), target))) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 5
    said = ""
    while "waiting for it" not in said and time.monotonic() < deadline:
        time.sleep(0.01)
        said += capsys.readouterr().err
    assert "another process is downloading model.safetensors; waiting for it" in said
    assert not target.exists()
    proceed.set()
    for thread in threads:
        thread.join()
    assert results == [target, target]
    assert_complete(target)
    assert len(site.requests) == 1


def test_another_process_resumes_the_download_of_a_killed_one(site, target):
    """This process waits while another one downloads; that one is killed, and this one completes its part."""
    site.script = [Answer(wait=threading.Event())]
    code = "import sys; from pathlib import Path; from mlmoe_jax.pretrained.download import fetch; "
    code += "fetch(sys.argv[1], Path(sys.argv[2]))"
    part = Path(f"{target}.part")
    with subprocess.Popen([sys.executable, "-c", code, site.address(), str(target)]) as other:
        while not (part.exists() and part.stat().st_size == len(CONTENT) // 2):
            assert other.poll() is None
            time.sleep(0.02)
        thread = threading.Thread(target=fetch, args=(site.address(), target))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        assert len(site.requests) == 1
        other.kill()
    thread.join(5)
    assert_complete(target)
    assert site.ranges == [None, f"bytes={len(CONTENT) // 2}-"]


# ------------------------------------------------------------------------------------------------------------- the hub
@pytest.fixture
def hub(site, monkeypatch):
    """The site as a mirror of the hub, without the telemetry requests of the hub's library."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("HF_ENDPOINT", site.address(""))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return f"https://huggingface.co/{HUB_PATH}"


def test_a_hub_file_is_checked_against_what_the_hub_publishes(site, hub, target):
    site.script = [Answer(cut=30_000)]
    fetch(hub, target)
    assert_complete(target)
    asked = [(method, path, headers["Range"], headers["Authorization"]) for method, path, headers in site.requests]
    fixed = f"/{HUB_PATH.replace('main', COMMIT)}"
    # The commit is fixed, and the token is not sent to the host that the hub redirects to.
    assert asked == [
        ("HEAD", f"/{HUB_PATH}", None, "Bearer hf_secret"),
        ("GET", fixed, None, "Bearer hf_secret"),
        ("GET", "/cdn", None, None),
        ("HEAD", f"/{HUB_PATH}", None, "Bearer hf_secret"),
        ("GET", fixed, "bytes=30000-", "Bearer hf_secret"),
        ("GET", "/cdn", "bytes=30000-", None),
    ]


def test_a_hub_file_that_changed_meanwhile_is_downloaded_from_the_start(site, hub, target):
    site.script = [Answer(cut=30_000), *[Answer(404)]]
    with pytest.raises(Unreachable):
        fetch(hub, target)
    assert names(target) == [f"{target.name}.part", f"{target.name}.part.json"]
    site.content = OTHER
    fetch(hub, target)
    assert_complete(target, OTHER)
    assert site.ranges[-1] is None


def test_content_damaged_on_the_way_from_the_hub_is_refused(site, hub, target, refusal, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", spoilt(Handler.do_GET))
    text = refusal(fetch, hub, target)
    assert f"instead of the {sha256(CONTENT)[:12]}… that is published; start again, or put the right file at" in text
    assert names(target) == []


def spoilt(answer):
    def do_get(handler):
        published, handler.server.content = handler.server.content, OTHER
        answer(handler)
        handler.server.content = published

    return do_get


def test_another_file_on_the_hub_is_refused_before_the_download(site, hub, target, refusal):
    text = refusal(fetch, hub, target, sha256=sha256(OTHER))
    assert f"the published file has the sha256 {sha256(CONTENT)[:12]}… instead of the" in text
    assert site.ranges == []
    assert names(target) == []


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (
            403,
            "GatedRepo",
            "its licence has to be accepted at https://huggingface.co/org/model, and HF_TOKEN set",
        ),
        (401, "RepoNotFound", "the hub has no repository org/model, or does not show it without HF_TOKEN"),
        (404, "EntryNotFound", "the server responds with 404 (file not found)"),
        (404, "RevisionNotFound", "the server responds with 404 (file not found)"),
        (503, "", "the server responds with 503, and retrying did not help"),
    ],
)
def test_refusals_of_the_hub(site, hub, target, refusal, status, code, expected):
    site.hub_status, site.hub_error = status, code
    text = refusal(fetch, hub, target, error=Unreachable)
    assert expected in text
    assert_helps(text, hub, target)
    assert names(target) == []


def test_the_offline_mode_of_the_hub_is_respected(hub, target, refusal, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal(fetch, hub, target, error=Unreachable)


def test_unreachable_is_a_user_error():
    assert issubclass(Unreachable, UserError)
