"""Downloads from a local server that closes connections, changes the file and refuses, and from a local hub."""

import contextlib
import email.utils
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import file_site, hub_site
from helpers.file_site import CHUNK, CONTENT, OTHER, Answer, sha256

from mlmoe_jax.errors import DiskError
from mlmoe_jax.models.backbones.catalog import CATALOG
from mlmoe_jax.models.published import PublishedFile, on_hub
from mlmoe_jax.pretrained.locate import backbone_file, locate
from mlmoe_jax.runtime import http


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The requested pauses, which are skipped; environment variables for proxies and tokens are removed."""
    asked = []
    monkeypatch.setattr(http, "pause", asked.append)
    monkeypatch.setattr(http, "READ_BYTES", CHUNK)
    for name in ("MLMOE_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return asked


@pytest.fixture
def site():
    with file_site.running() as running:
        yield running


@pytest.fixture
def target(tmp_path, monkeypatch) -> Path:
    """A path in a cache folder that does not exist yet."""
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "model" / NAME


NAME = "sub/model.safetensors"
ON_HUB = "https://huggingface.co/org/model/resolve/main/"


def fetch(address: str, target: Path, sha256: str = "") -> Path:
    """Locate the file of an address, whose place in the cache is `target`."""
    if address.startswith(ON_HUB):
        return locate(on_hub("org/model", "MIT", address.removeprefix(ON_HUB)))
    return locate(PublishedFile(f"model/{NAME}", "MIT", address, sha256=sha256))


@pytest.fixture
def hub(monkeypatch):
    with hub_site.running(monkeypatch) as running:
        running.repositories["org/model"] = {"main": {NAME: CONTENT, "other": b"x"}}
        yield running


def beside(target: Path, end: str) -> Path:
    return target.with_name(target.name + end)


def left(target: Path) -> list[str]:
    """Return the ends of the names of all files of a download."""
    return sorted(path.name.removeprefix(target.name) for path in target.parent.iterdir() if path.name != ".lock")


def assert_complete(target: Path, content: bytes = CONTENT):
    assert target.read_bytes() == content
    assert left(target) == ["", ".sha256"]
    assert beside(target, ".sha256").read_text() == f"{sha256(content)}  {target.name}\n"


def unreachable(refusal, address: str, target: Path) -> str:
    """Return why a file cannot be downloaded, from the sentence that also says what helps."""
    text = refusal(fetch, address, target)
    if address.startswith(ON_HUB):
        target = target.parents[1] / address.removeprefix(ON_HUB)
    start = f"{target.name} is not in {target.parent} and cannot be downloaded from {address}, because "
    end = f"; put a copy of the file at {target}"
    assert text.startswith(start)
    assert text.endswith(end)
    return text.removeprefix(start).removesuffix(end)


# ------------------------------------------------------------------------------------------------------------ success
def test_a_whole_file_is_downloaded_once_and_pinned(site, target, pauses):
    for _ in range(2):
        assert fetch(site.address, target) == target
        assert_complete(target)
    assert (pauses, len(site.requests)) == ([], 1)


TAG = f'"{sha256(CONTENT)[:8]}"'
DATE = email.utils.formatdate(0, usegmt=True)
WEAK = {"Last-Modified": DATE, "ETag": 'W/"x"'}


@pytest.mark.parametrize(
    ("script", "ranges"),
    [
        ([Answer(cut=30_000), Answer(cut=1000)], [None, "bytes=30000-", "bytes=31000-"]),
        ([Answer(503), Answer(429)], [None] * 3),
        ([Answer(stalls=True)], [None, f"bytes={len(CONTENT) // 2}-"]),
        ([Answer(cut=30_000), Answer(heeds=())], [None, "bytes=30000-"]),
        ([Answer(cut=30_000, headers={})], [None, None]),
        # the modification time in place of a strong ETag
        ([Answer(cut=30_000, headers=WEAK), Answer(heeds=("Range",), headers=WEAK)], [None, "bytes=30000-"]),
    ],
    ids=["cut", "temporary", "stalls", "no ranges", "no version", "no strong ETag"],
)
def test_a_download_goes_on_after_a_pause_where_it_stopped(site, target, pauses, monkeypatch, script, ranges):
    monkeypatch.setattr(http, "TIMEOUT", 0.2)
    site.script, version = list(script), DATE if script[0].headers else TAG
    fetch(site.address, target)
    assert_complete(target)
    assert site.ranges == ranges
    assert [headers["If-Range"] for headers in site.requests] == [asked and version for asked in ranges]
    assert pauses == list(http.PAUSES[: len(script)][: len(ranges) - 1])


@pytest.mark.parametrize(
    ("version", "content", "answer", "ranges"),
    [
        # the file has changed
        (TAG, OTHER, Answer(), ["bytes=30000-"]),
        (TAG, OTHER, Answer(heeds=("Range",)), ["bytes=30000-", None]),
        (TAG, OTHER[:1000], Answer(416), ["bytes=30000-", None]),
        # the response begins elsewhere
        (TAG, CONTENT, Answer(headers={"ETag": TAG, "Content-Range": "bytes 0-51199/51200"}), ["bytes=30000-", None]),
        # the part has no version, or that of another file
        (None, OTHER, Answer(), [None]),
        ("", OTHER, Answer(), [None]),
        ('"of another file"', OTHER, Answer(), ["bytes=30000-"]),
    ],
)
def test_a_part_of_another_file_is_not_used(site, target, version, content, answer, ranges):
    target.parent.mkdir(parents=True)
    beside(target, ".part").write_bytes(CONTENT[:30_000])
    if version is not None:
        beside(target, ".part.version").write_text(version)
    site.content, site.script = content, [answer]
    fetch(site.address, target)
    assert_complete(target, content)
    assert site.ranges == ranges


def test_a_part_is_not_written_through_a_link(site, target, precious):
    target.parent.mkdir(parents=True)
    beside(target, ".part").symlink_to(precious)
    fetch(site.address, target)
    assert_complete(target)


def test_a_file_on_the_hub_is_downloaded_at_its_commit_and_pinned(hub, target):
    fetch(ON_HUB + NAME, target)
    assert_complete(target)
    commit = hub.commit_of("org/model", "main")
    resolved = {path for _, path, _ in hub.requests if "/resolve/" in path}
    assert resolved == {f"/org/model/resolve/{commit}/{NAME}"}


def test_lines_are_shown_without_a_terminal(site, target, capsys):
    site.script = [Answer(cut=30_000)]
    fetch(site.address, target)
    out, lines = capsys.readouterr()
    assert out == ""
    assert lines.count(f"downloading {site.address} from 0.0 MB of 0.1 MB\n") == 2
    assert "retrying in 1 s" in lines
    assert f"downloaded {target} (0.1 MB, sha256 " in lines


def test_another_process_resumes_the_download_of_a_killed_one(site, target):
    """This process waits while another one downloads; that one is killed, and this one completes its part."""
    site.script = [Answer(stalls=True)]
    code = "import sys; from mlmoe_jax.models.published import PublishedFile; "
    code += "from mlmoe_jax.pretrained.locate import locate; locate(PublishedFile(sys.argv[2], 'MIT', sys.argv[1]))"
    part = beside(target, ".part")
    with subprocess.Popen([sys.executable, "-c", code, site.address, f"model/{NAME}"]) as other:
        while not (part.exists() and part.stat().st_size == len(CONTENT) // 2):
            assert other.poll() is None
            time.sleep(0.02)
        thread = threading.Thread(target=fetch, args=(site.address, target))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        assert len(site.requests) == 1
        other.kill()
    thread.join(5)
    assert_complete(target)
    assert site.ranges == [None, f"bytes={len(CONTENT) // 2}-"]


# ------------------------------------------------------------------------------------------------------------ failure
ELSEWHERE = "http://weights.example/m"


@pytest.mark.parametrize(
    ("script", "reason", "files", "tries"),
    [
        *(([Answer(status)], f"the server responds with {status}", [], 1) for status in (401, 403, 404, 410, 418)),
        ([Answer(500)] * 9, "the server responds with 500", [], 4),
        (
            [Answer(cut=30_000), *[Answer(cut=0)] * 9],
            "the connection was lost, and 0.0 MB are missing",
            [".part", ".part.version"],
            4,
        ),
        ([Answer(headers={"Content-Type": "text/html; charset=utf-8"})], "the response is a web page", [], 1),
        (
            [Answer(302, headers={"Location": ELSEWHERE})],
            "it redirects to http://weights.example, which is not an https address",
            [],
            1,
        ),
    ],
)
def test_a_server_that_refuses_or_stays_broken_is_abandoned(
    site, target, refusal, pauses, script, reason, files, tries
):
    site.script = list(script)
    assert unreachable(refusal, site.address, target).startswith(reason)
    assert left(target) == files
    assert (len(site.requests), pauses) == (tries, list(http.PAUSES[: tries - 1]))


@pytest.mark.parametrize(
    ("address", "fail", "reason"),
    [
        *(
            (address, {}, f"'{address}' is not an https address")
            for address in (ELSEWHERE, "file:///etc/m", "a script")
        ),
        ("https://weights.example/m", {}, "weights.example cannot be reached (Name or service not known)"),
        (ON_HUB + NAME, {"/resolve/": (403,)}, "the hub refuses org/model with the status 403; set HF_TOKEN"),
        (ON_HUB + NAME, {"/api/": (503,)}, "the hub responds with 503"),
        (ON_HUB + "m", {}, "the model org/model has no file m"),
        (
            ON_HUB + NAME,
            {"/resolve/": (403, "GatedRepo")},
            "access to org/model has to be requested at https://huggingface.co/org/model; then set",
        ),
    ],
)
def test_why_a_file_cannot_be_downloaded(hub, target, refusal, monkeypatch, address, fail, reason):
    def no_network(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    hub.fail = fail
    assert unreachable(refusal, address, target).startswith(reason)
    assert not target.exists()


def test_offline_mode(site, target, refusal, monkeypatch):
    monkeypatch.setenv("MLMOE_OFFLINE", "1")
    assert unreachable(refusal, site.address, target) == "MLMOE_OFFLINE is set"
    assert site.requests == []
    assert not target.parent.exists()
    monkeypatch.setenv("MLMOE_OFFLINE", "0")
    fetch(site.address, target)
    monkeypatch.setenv("MLMOE_OFFLINE", "1")
    assert fetch(site.address, target) == target


def test_an_answer_is_read_whole_from_one_server_or_not_at_all(site, refusal):
    assert http.read_url(site.address, len(CONTENT)) == CONTENT
    assert "it has more than 51,199 bytes" in refusal(http.read_url, site.address, len(CONTENT) - 1)
    asked = len(site.requests)
    text = refusal(http.read_url, site.address, len(CONTENT), server="http://127.0.0.1:1")
    assert text == f"'{site.address}' is not on the server http://127.0.0.1:1"
    assert len(site.requests) == asked
    site.script = [Answer(cut=1000)]
    assert "the connection was lost" in refusal(http.read_url, site.address, len(CONTENT))


@pytest.mark.parametrize("part", ["head", "body"])
def test_an_answer_that_drips_has_a_deadline(part):
    with dripping(part) as address:
        started = time.monotonic()
        with pytest.raises(http.NoAnswer, match=r"takes more than 0\.5 s"):
            http.read_url(address, 1000, timeout=5, most_seconds=0.5)
        assert time.monotonic() - started < 4


@contextlib.contextmanager
def dripping(part: str):
    """Give the address of a server whose answer arrives a byte at a time, without an end."""

    def answer():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(10_000)
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + (b"X: " if part == "head" else b"Content-Length: 900\r\n\r\n"))
            while not stopped.wait(0.05):
                connection.sendall(b"x")

    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"
        stopped.set()
        thread.join()


# -------------------------------------------------------------------------------------------------------- wrong content
def test_a_sha256_is_compared_by_its_first_digits_and_its_file_counts_more(site, target, refusal):
    given, pin = sha256(CONTENT)[:8], beside(target, ".sha256")
    text = refusal(fetch, site.address, target, sha256="0" * 8)
    assert f"as its sha256 is {sha256(CONTENT)[:12]}… instead of 00000000…; delete it" in text
    assert f"or {pin} if the replacement is intended" in text
    assert not target.exists()
    fetch(site.address, target, sha256=given)
    assert_complete(target)
    fetch(site.address, target, sha256=sha256(OTHER))

    target.write_bytes(OTHER)
    for known in (given, ""):
        text = refusal(fetch, site.address, target, sha256=known)
        assert text.startswith(f"{target} is damaged or has been replaced, as its sha256 is {sha256(OTHER)[:12]}…")
        assert f"instead of {sha256(CONTENT)[:12]}" in text
    assert target.read_bytes() == OTHER

    target.unlink()
    site.content = OTHER
    refusal(fetch, site.address, target)
    assert not target.exists()
    pin.unlink()
    fetch(site.address, target)
    assert_complete(target, OTHER)
    pin.unlink()
    fetch(site.address, target)


def test_the_catalog_compares_the_digits_in_the_names_of_pytorch_files():
    assert CATALOG["resnet101"].weights.sha256 == "5d3b4d8f"
    installed = backbone_file("efficientnet_lite0")
    assert sha256(installed.read_bytes()).startswith(CATALOG["efficientnet_lite0"].weights.sha256)


# ----------------------------------------------------------------------------------------------------------- the disk
def test_a_full_disk(site, target, refusal):
    """The operating system itself reports that a file may not grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        text = refusal(fetch, site.address, target, error=DiskError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert text.startswith(f"cannot write {target}: File too large; free disk space")
    fetch(site.address, target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-"]
