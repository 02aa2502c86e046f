"""Downloads from a local server that cuts off, changes its mind and refuses, onto a disk that may be full."""

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
    """What the server does with one request. cut: close after so many bytes. wait: for this before the last half."""

    status: int = 200
    cut: int | None = None
    ranges: bool = True
    heed_if_range: bool = True
    validators: bool = True
    length: bool = True
    headers: tuple = ()
    wait: threading.Event | None = None


class Site(ThreadingHTTPServer):
    """A server of one content; `script` holds the answers to the next GETs, before the usual ones."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.script, self.requests, self.hub_status, self.hub_error = CONTENT, [], [], 200, ""

    def address(self, path: str = "model.safetensors", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}/{path}"

    def handle_error(self, request, client_address):
        """Say nothing about clients that have gone away."""

    @property
    def ranges(self) -> list[str | None]:
        """The Range header of every GET."""
        return [headers["Range"] for method, _, headers in self.requests if method == "GET"]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        """Answer as the Hugging Face hub does for a large file."""
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
    """The pauses that were asked for; none is made. No proxy and no setting of the outside counts here."""
    asked = []
    monkeypatch.setattr(download, "pause", asked.append)
    monkeypatch.setattr(web, "CHUNK", CHUNK)
    for name in ("MLMOE_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return asked


@pytest.fixture
def target(tmp_path) -> Path:
    """A place in a cache folder that is not there yet."""
    return tmp_path / "cache" / "vit" / "model.safetensors"


def names(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


def assert_complete(target: Path, content: bytes = CONTENT):
    assert target.read_bytes() == content
    assert names(target) == [target.name, f"{target.name}.sha256"]
    assert Path(f"{target}.sha256").read_text() == f"{sha256(content)}  {target.name}\n"


def leave_part(site: Site, target: Path, cut: int = 30_000):
    """Break a download off for good after `cut` bytes."""
    script, site.script = site.script, [Answer(cut=cut), *[Answer(503)] * 9]
    with pytest.raises(Unreachable):
        fetch(site.address(), target)
    assert names(target) == [f"{target.name}.part", f"{target.name}.part.json"]
    assert Path(f"{target}.part").read_bytes() == site.content[:cut]
    site.script = script
    site.requests.clear()


# --------------------------------------------------------------------------------------------------------- it arrives
def test_a_whole_file_arrives_and_is_pinned(site, target, pauses):
    assert fetch(site.address(), target) == target
    assert_complete(target)
    assert pauses == []
    assert fetch(site.address(), target) == target
    assert len(site.requests) == 1


def test_given_sha256_and_size_are_met(site, target):
    fetch(site.address(), target, sha256=sha256(CONTENT).upper(), size=len(CONTENT))
    assert_complete(target)


def test_a_cut_download_goes_on_where_it_stopped(site, target, pauses):
    site.script = [Answer(cut=30_000), Answer(cut=1000)]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-", "bytes=31000-"]
    # A chunk arrived before the first pause, too little before the second.
    assert pauses == [download.PAUSES[0], download.PAUSES[1]]


def test_tries_are_counted_anew_while_the_download_moves(site, target, pauses):
    site.script = [Answer(cut=CHUNK)] * 5
    fetch(site.address(), target)
    assert_complete(target)
    assert pauses == [download.PAUSES[0]] * 5


def test_a_later_call_goes_on_where_an_earlier_one_stopped(site, target):
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


def test_a_server_without_ranges_is_asked_again_from_the_start(site, target):
    site.script = [Answer(cut=30_000), Answer(ranges=False)]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-"]


def test_a_server_that_does_not_say_what_changes_is_asked_again_from_the_start(site, target):
    site.script = [Answer(cut=30_000, validators=False)]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, None]


def test_the_time_of_change_serves_where_there_is_no_strong_etag(site, target):
    when = email.utils.formatdate(0, usegmt=True)
    weak = (("Last-Modified", when), ("ETag", 'W/"x"'))
    site.script = [Answer(cut=30_000, validators=False, headers=weak)]
    site.script += [Answer(heed_if_range=False, validators=False, headers=weak)]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-"]
    assert site.requests[1][2]["If-Range"] == when


@pytest.mark.parametrize("heed_if_range", [True, False])
def test_a_file_that_changed_meanwhile_is_taken_from_the_start(site, target, heed_if_range):
    leave_part(site, target)
    site.content = OTHER
    site.script = [Answer(heed_if_range=heed_if_range)]
    fetch(site.address(), target)
    assert_complete(target, OTHER)
    assert site.ranges == (["bytes=30000-"] if heed_if_range else ["bytes=30000-", None])


def test_a_file_that_became_shorter_is_taken_from_the_start(site, target):
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


def test_failures_that_pass_are_waited_for(site, target, pauses):
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


def test_a_server_that_falls_silent_is_asked_again(site, target, monkeypatch):
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


# ------------------------------------------------------------------------------------------------------- what is shown
def test_lines_where_there_is_no_terminal(site, target, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    site.script = [Answer(cut=30_000)]
    fetch(site.address(), target)
    out, lines = capsys.readouterr()
    assert out == ""
    assert f"downloading {site.address()} (0.1 MB) to {target}\n" in lines
    assert f"downloading {site.address()} (0.1 MB) to {target} from 0.0 MB on\n" in lines
    assert "model.safetensors 0.1 MB of 0.1 MB, " in lines
    assert "MB/s, 0:00:00 left" in lines
    assert "trying again in 1 s" in lines
    assert f"downloaded {target} (0.1 MB, sha256 " in lines


def test_a_bar_on_a_terminal(site, target, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch(site.address(), target)
    assert "model.safetensors:   0%|" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- it does not arrive
@pytest.mark.parametrize("status", [401, 403, 404, 410, 418])
def test_a_refusal_is_told_at_once(site, target, refusal, pauses, status):
    site.script = [Answer(status)]
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert f"the server answers {status}" in text
    assert_helps(text, site.address(), target)
    assert names(target) == []
    assert pauses == []


def assert_helps(text: str, address: str, target: Path):
    """The sentence names the file, the folder, the address and what to do."""
    assert text.startswith(f"{target.name} is not in {target.parent} and could not be fetched from {address}, because ")
    assert text.endswith(f"; put a copy of the file at {target}")


def test_a_server_that_stays_broken_is_given_up(site, target, refusal, pauses):
    site.script = [Answer(500)] * 9
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert "because the server answers 500, and trying again did not help; put" in text
    assert pauses == list(download.PAUSES)


def test_a_download_that_always_breaks_off_is_given_up_and_kept(site, target, refusal):
    site.script = [Answer(cut=30_000), *[Answer(cut=0)] * 9]
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert "the connection broke off at 0.0 MB of 0.1 MB, and trying again did not help (a later start goes on" in text
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


def test_offline_by_request(site, target, refusal, monkeypatch):
    monkeypatch.setenv("MLMOE_OFFLINE", "1")
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert "because MLMOE_OFFLINE forbids the network" in text
    assert_helps(text, site.address(), target)
    assert site.requests == []
    assert not target.parent.exists()
    monkeypatch.setenv("MLMOE_OFFLINE", "0")
    fetch(site.address(), target)
    monkeypatch.setenv("MLMOE_OFFLINE", "1")
    assert fetch(site.address(), target) == target


@pytest.mark.parametrize("address", ["http://weights.example/m", "file:///etc/passwd", "this package; a script"])
def test_only_https(target, refusal, address):
    assert f"'{address}' is no https address" in refusal(fetch, address, target, error=Unreachable)


def test_a_redirect_does_not_leave_https(site, target, refusal):
    site.script = [Answer(302, headers=(("Location", "http://weights.example/m"),))]
    assert "'http://weights.example/m' is no https address" in refusal(fetch, site.address(), target)


def test_a_web_page_is_not_taken_for_a_file(site, target, refusal):
    site.script = [Answer(headers=(("Content-Type", "text/html; charset=utf-8"),))]
    assert "is a web page" in refusal(fetch, site.address(), target, error=Unreachable)
    assert names(target) == []


def test_a_length_is_needed_from_somewhere(site, target, refusal):
    site.script = [Answer(length=False), Answer(length=False, cut=1000), Answer(length=False)]
    assert "does not say how long the file is" in refusal(fetch, site.address(), target, error=Unreachable)
    fetch(site.address(), target, size=len(CONTENT))
    assert_complete(target)
    assert site.ranges == [None, None, "bytes=1000-"]


# ---------------------------------------------------------------------------------------------------- the wrong bytes
def test_a_wrong_length_is_refused_beforehand(site, target, refusal):
    text = refusal(fetch, site.address(), target, size=1234)
    assert text.startswith(f"{site.address()} has 51,200 bytes and not the 1,234 that are expected")
    assert names(target) == []


@pytest.mark.parametrize("broken", [False, True])
def test_a_wrong_sha256_is_deleted(site, target, refusal, broken):
    site.script = [Answer(cut=30_000)] if broken else []
    text = refusal(fetch, site.address(), target, sha256=sha256(OTHER))
    assert site.address() in text
    assert f"{sha256(CONTENT)[:12]}… instead of the {sha256(OTHER)[:12]}… that was given; start again, or put" in text
    assert names(target) == []


def test_the_first_download_is_pinned_for_the_next(site, target, refusal):
    fetch(site.address(), target)
    target.unlink()
    site.content = OTHER
    text = refusal(fetch, site.address(), target)
    assert f"of the first download; start again, or delete {target}.sha256 if the new file is right, or put" in text
    assert names(target) == [f"{target.name}.sha256"]
    Path(f"{target}.sha256").unlink()
    fetch(site.address(), target)
    assert_complete(target, OTHER)


def test_a_file_that_is_there_is_checked(site, target, refusal):
    fetch(site.address(), target)
    check_pinned(target)
    check_pinned(target, sha256=sha256(CONTENT))
    assert "delete it so that it is downloaded again" in refusal(check_pinned, target, sha256=sha256(OTHER))
    target.write_bytes(OTHER)
    for function, arguments in ((check_pinned, (target,)), (fetch, (site.address(), target))):
        text = refusal(function, *arguments)
        assert text.startswith(f"{target} is damaged or has been replaced, as its sha256 is {sha256(OTHER)[:12]}…")
        assert text.endswith(f"or {target}.sha256 if this file is meant to be another one")
    assert target.read_bytes() == OTHER
    Path(f"{target}.sha256").unlink()
    check_pinned(target)


# ----------------------------------------------------------------------------------------------------------- the disk
def test_too_little_room_is_told_beforehand(site, target, refusal, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: type("Usage", (), {"total": 1, "free": 20_000})())
    text = refusal(fetch, site.address(), target)
    assert text.startswith(f"there is no room for model.safetensors: it needs 0.1 MB and {target.parent} has 0.0 MB")
    assert names(target) == []


def test_a_part_counts_towards_the_room(site, target, monkeypatch):
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
        f"the disk became full while {target} was downloaded, and what had arrived was deleted; free"
    )
    assert names(target) == []


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end(site, target, refusal, monkeypatch, function):
    def fail(*_):
        raise OSError(download.errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(download.os, function, fail)
        assert f"cannot write {target}: Input/output error; name" in refusal(fetch, site.address(), target)
    assert not target.exists()
    fetch(site.address(), target)
    assert_complete(target)
    assert len(site.requests) == 1


def test_a_folder_that_cannot_be_made(site, target, refusal):
    target.parents[1].write_text("a file")
    assert f"cannot write {target}: " in refusal(fetch, site.address(), target)


# ------------------------------------------------------------------------------------------- interrupted, and together
def test_an_interruption_leaves_a_part_to_go_on_with(site, target, monkeypatch):
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
    go_on, results = threading.Event(), []
    site.script = [Answer(wait=go_on)]
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
    go_on.set()
    for thread in threads:
        thread.join()
    assert results == [target, target]
    assert_complete(target)
    assert len(site.requests) == 1


def test_another_goes_on_where_a_killed_process_stopped(site, target):
    """While a second process has the download, this one waits; it is killed, and this one finishes its part."""
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
    """The site as a mirror of the hub; the library keeps its habit of asking for other things to itself."""
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
    # The commit is fixed, and the token is not shown to the host that the hub redirects to.
    assert asked == [
        ("HEAD", f"/{HUB_PATH}", None, "Bearer hf_secret"),
        ("GET", fixed, None, "Bearer hf_secret"),
        ("GET", "/cdn", None, None),
        ("HEAD", f"/{HUB_PATH}", None, "Bearer hf_secret"),
        ("GET", fixed, "bytes=30000-", "Bearer hf_secret"),
        ("GET", "/cdn", "bytes=30000-", None),
    ]


def test_a_hub_file_that_changed_meanwhile_is_taken_from_the_start(site, hub, target):
    site.script = [Answer(cut=30_000), *[Answer(404)]]
    with pytest.raises(Unreachable):
        fetch(hub, target)
    assert names(target) == [f"{target.name}.part", f"{target.name}.part.json"]
    site.content = OTHER
    fetch(hub, target)
    assert_complete(target, OTHER)
    assert site.ranges[-1] is None


def test_damage_on_the_way_from_the_hub(site, hub, target, refusal, monkeypatch):
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


def test_another_file_on_the_hub_is_refused_beforehand(site, hub, target, refusal):
    text = refusal(fetch, hub, target, sha256=sha256(OTHER))
    assert f"what it publishes has the sha256 {sha256(CONTENT)[:12]}… instead of the" in text
    assert site.ranges == []
    assert names(target) == []


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (
            403,
            "GatedRepo",
            "its licence must be accepted at https://huggingface.co/org/model, and then HF_TOKEN be set",
        ),
        (401, "RepoNotFound", "the hub has no repository org/model, or does not show it without HF_TOKEN"),
        (404, "EntryNotFound", "the server answers 404 (there is no such file)"),
        (404, "RevisionNotFound", "the server answers 404 (there is no such file)"),
        (503, "", "the server answers 503, and trying again did not help"),
    ],
)
def test_what_the_hub_refuses(site, hub, target, refusal, status, code, expected):
    site.hub_status, site.hub_error = status, code
    text = refusal(fetch, hub, target, error=Unreachable)
    assert expected in text
    assert_helps(text, hub, target)
    assert names(target) == []


def test_the_hub_is_not_asked_when_it_is_switched_off(hub, target, refusal, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids the network" in refusal(fetch, hub, target, error=Unreachable)


def test_unreachable_is_an_error_that_users_are_shown():
    assert issubclass(Unreachable, UserError)
