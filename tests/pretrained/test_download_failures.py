"""Downloads that fail: refusals, wrong content, and a full disk."""

import os
import socket
from pathlib import Path

import pytest
from helpers.file_site import CONTENT, OTHER, Answer, assert_complete, assert_helps, names, sha256

from mlmoe_jax.errors import NoRoom
from mlmoe_jax.pretrained import download
from mlmoe_jax.pretrained.download import Unreachable, check_pinned, fetch

pytestmark = pytest.mark.usefixtures("pauses")


# ------------------------------------------------------------------------------------------------------------ failure
@pytest.mark.parametrize("status", [401, 403, 404, 410, 418])
def test_a_refusal_is_reported_at_once(site, target, refusal, pauses, status):
    site.script = [Answer(status)]
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert f"the server responds with {status}" in text
    assert_helps(text, site.address(), target)
    assert names(target) == []
    assert pauses == []


def test_a_server_that_stays_broken_is_abandoned(site, target, refusal, pauses):
    site.script = [Answer(500)] * 9
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert "because the server responds with 500, and retrying did not help; put" in text
    assert pauses == list(download.PAUSES)


def test_a_download_that_always_fails_is_abandoned_and_its_part_kept(site, target, refusal):
    site.script = [Answer(cut=30_000), *[Answer(cut=0)] * 9]
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert "the connection was lost after 0.0 MB of 0.1 MB, and retrying did not help" in text
    assert_helps(text, site.address(), target)
    assert names(target) == [f"{target.name}.part", f"{target.name}.part.json"]


def test_a_closed_port(site, target, refusal, pauses):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/model.safetensors"
        text = refusal(fetch, address, target, error=Unreachable)
    assert "127.0.0.1 cannot be reached (Connection refused)" in text
    assert_helps(text, address, target)
    assert pauses == list(download.PAUSES)
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


def test_a_web_page_is_refused(site, target, refusal):
    site.script = [Answer(headers=(("Content-Type", "text/html; charset=utf-8"),))]
    assert "is a web page" in refusal(fetch, site.address(), target, error=Unreachable)
    assert names(target) == []


def test_a_file_of_unknown_length_is_refused(site, target, refusal):
    site.script = [Answer(length=False), Answer(length=False)]
    assert "does not give the length of the file" in refusal(fetch, site.address(), target, error=Unreachable)
    fetch(site.address(), target, sha256=sha256(CONTENT))
    assert_complete(target)
    assert site.ranges == [None, None]


# -------------------------------------------------------------------------------------------------------- wrong content
@pytest.mark.parametrize("broken", [False, True])
def test_a_wrong_sha256_is_deleted(site, target, refusal, broken):
    site.script = [Answer(cut=30_000)] if broken else []
    text = refusal(fetch, site.address(), target, sha256=sha256(OTHER))
    assert site.address() in text
    assert f"has the sha256 {sha256(CONTENT)[:12]}… instead of {sha256(OTHER)[:12]}…; start again, put" in text
    assert names(target) == []


def test_a_second_download_must_match_the_pinned_first(site, target, refusal):
    fetch(site.address(), target)
    target.unlink()
    site.content = OTHER
    text = refusal(fetch, site.address(), target)
    assert f"or delete {target}.sha256 if the new file is right" in text
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
def test_a_full_disk(site, target, refusal, monkeypatch):
    """The part is written to /dev/full, so that the operating system itself reports the full disk."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    part, write = Path(f"{target}.part"), Path.write_bytes

    def on_full_disk(path, content):
        written = write(path, content)
        part.unlink()
        part.symlink_to("/dev/full")
        return written

    monkeypatch.setattr(Path, "write_bytes", on_full_disk)
    assert f"cannot write {target}: No space left" in refusal(fetch, site.address(), target, error=NoRoom)
    assert not part.is_symlink(), "the space is free again"


def test_a_folder_that_cannot_be_made(site, target, refusal):
    target.parents[1].write_text("a file")
    assert f"cannot make the folder {target.parent}: " in refusal(fetch, site.address(), target)
