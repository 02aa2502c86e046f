"""Downloads from a local server that closes connections, changes the file and refuses, and from a local hub."""

import email.utils
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import hub_site
from helpers.file_site import (
    CONTENT,
    OTHER,
    Answer,
    assert_complete,
    assert_helps,
    leave_part,
    names,
    sha256,
)
from huggingface_hub import constants

from mlmoe_jax.errors import DiskError
from mlmoe_jax.models.backbones.catalog import CATALOG
from mlmoe_jax.pretrained import download
from mlmoe_jax.pretrained.download import Unreachable, fetch
from mlmoe_jax.pretrained.weights import find_weights

pytestmark = pytest.mark.usefixtures("pauses")


# ------------------------------------------------------------------------------------------------------------ success
def test_a_whole_file_is_downloaded_and_pinned(site, target, pauses):
    assert fetch(site.address(), target) == target
    assert_complete(target)
    assert pauses == []
    assert fetch(site.address(), target) == target
    assert len(site.requests) == 1


def test_a_cut_download_resumes_where_it_stopped(site, target, pauses):
    site.script = [Answer(cut=30_000), Answer(cut=1000)]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-", "bytes=31000-"]
    assert pauses == list(download.PAUSES[:2])


@pytest.mark.parametrize("lacks", ["ranges", "validators"])
def test_a_server_without_ranges_or_validators_restarts_the_download(site, target, lacks):
    site.script = [Answer(cut=30_000, validators=lacks != "validators"), Answer(ranges=lacks != "ranges")]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-" if lacks == "ranges" else None]


def test_the_modification_time_replaces_a_missing_strong_etag(site, target):
    when = email.utils.formatdate(0, usegmt=True)
    weak = (("Last-Modified", when), ("ETag", 'W/"x"'))
    site.script = [Answer(cut=30_000, validators=False, headers=weak)]
    site.script += [Answer(heed_if_range=False, validators=False, headers=weak)]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-"]
    assert site.requests[1]["If-Range"] == when


@pytest.mark.parametrize("changed", ["If-Range is heeded", "If-Range is ignored", "the file is shorter"])
def test_a_file_that_changed_meanwhile_is_downloaded_from_the_start(site, target, changed):
    leave_part(site, target)
    site.content = OTHER[:1000] if "shorter" in changed else OTHER
    site.script = [Answer(416) if "shorter" in changed else Answer(heed_if_range="heeded" in changed)]
    fetch(site.address(), target)
    assert_complete(target, site.content)
    assert site.ranges == (["bytes=30000-"] if "heeded" in changed else ["bytes=30000-", None])


@pytest.mark.parametrize("version", [None, "", '"of another file"'])
def test_a_part_of_unknown_origin_is_not_used(site, target, version):
    target.parent.mkdir(parents=True)
    Path(f"{target}.part").write_bytes(OTHER[:1000])
    if version is not None:
        Path(f"{target}.part.version").write_text(version)
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == ["bytes=1000-" if version else None]


def test_a_part_is_not_written_through_a_link(site, target, precious, refusal):
    target.parent.mkdir(parents=True)
    Path(f"{target}.part").symlink_to(precious)
    fetch(site.address(), target)
    assert_complete(target)


def test_temporary_failures_are_retried_after_a_pause(site, target, pauses):
    site.script = [Answer(503), Answer(429)]
    fetch(site.address(), target)
    assert_complete(target)
    assert pauses == list(download.PAUSES[:2])


def test_a_server_that_stops_responding_is_retried(site, target, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    site.script = [Answer(wait=threading.Event())]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, f"bytes={len(CONTENT) // 2}-"]


# ------------------------------------------------------------------------------------------------------------ progress
def test_lines_are_shown_without_a_terminal(site, target, capsys):
    site.script = [Answer(cut=30_000)]
    fetch(site.address(), target)
    out, lines = capsys.readouterr()
    assert out == ""
    assert lines.count(f"downloading {site.address()} to {target} from 0.0 MB of 0.1 MB\n") == 2
    assert "retrying in 1 s" in lines
    assert f"downloaded {target} (0.1 MB, sha256 " in lines


# -------------------------------------------------------------------------------------- interruption, several processes
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


def test_the_first_digits_of_a_sha256_are_compared_and_the_whole_is_pinned(site, target, refusal):
    assert "instead of 00000000" in refusal(fetch, site.address(), target, sha256="0" * 8)
    assert not target.exists()
    fetch(site.address(), target, sha256=sha256(CONTENT)[:8])
    assert_complete(target)
    target.write_bytes(b"another file")
    for given in (sha256(CONTENT)[:8], ""):
        assert f"instead of {sha256(CONTENT)[:12]}" in refusal(fetch, site.address(), target, sha256=given)


def test_the_catalog_compares_the_digits_in_the_names_of_pytorch_files():
    assert CATALOG["resnet101"].sha256 == "5d3b4d8f"
    assert CATALOG["vit_b16_in1k"].sha256 == "80ecf9dd"
    assert CATALOG["vit_b16_mae"].sha256 == ""  # no digits in its name
    installed = find_weights("efficientnet_lite0")
    assert sha256(installed.read_bytes()).startswith(CATALOG["efficientnet_lite0"].sha256)


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
    assert "because the server responds with 500; put" in text
    assert pauses == list(download.PAUSES)


def test_a_download_that_always_fails_is_abandoned_and_its_part_kept(site, target, refusal):
    site.script = [Answer(cut=30_000), *[Answer(cut=0)] * 9]
    text = refusal(fetch, site.address(), target, error=Unreachable)
    assert "the connection was lost after 0.0 MB of 0.1 MB" in text
    assert_helps(text, site.address(), target)
    assert names(target) == [f"{target.name}.part", f"{target.name}.part.version"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("https://weights.example/m", "Name or service not known"),
        ("https://huggingface.co/facebook/dinov2-base/resolve/main/m", "the hub cannot be reached ("),
    ],
)
def test_no_network(target, refusal, monkeypatch, address, reason):
    def fail(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.delenv("MLMOE_OFFLINE", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    text = refusal(fetch, address, target, error=Unreachable)
    assert reason in text
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
def test_only_https(site, target, refusal, address):
    assert f"'{address}' is not an https address" in refusal(fetch, address, target, error=Unreachable)
    site.script = [Answer(302, headers=(("Location", "http://weights.example/m"),))]
    assert "'http://weights.example/m' is not an https address" in refusal(fetch, site.address(), target)


def test_a_web_page_is_refused(site, target, refusal):
    site.script = [Answer(headers=(("Content-Type", "text/html; charset=utf-8"),))]
    assert "is a web page" in refusal(fetch, site.address(), target, error=Unreachable)
    assert names(target) == []


# -------------------------------------------------------------------------------------------------------- wrong content
def test_a_wrong_sha256_is_refused_and_downloaded_again(site, target, refusal):
    text = refusal(fetch, site.address(), target, sha256=sha256(OTHER))
    assert f"sha256 is {sha256(CONTENT)[:12]}… instead of {sha256(OTHER)[:12]}…; delete it" in text
    assert not target.exists()
    site.content = OTHER
    fetch(site.address(), target, sha256=sha256(OTHER))
    assert_complete(target, OTHER)


def test_a_second_download_must_match_the_pinned_first(site, target, refusal):
    fetch(site.address(), target)
    target.unlink()
    site.content = OTHER
    assert f"or {target}.sha256 if the replacement is intended" in refusal(fetch, site.address(), target)
    assert not target.exists()
    Path(f"{target}.sha256").unlink()
    fetch(site.address(), target)
    assert_complete(target, OTHER)


def test_an_existing_file_is_checked(site, target, refusal):
    fetch(site.address(), target)
    fetch(site.address(), target, sha256=sha256(OTHER))  # the pin counts
    target.write_bytes(OTHER)
    text = refusal(fetch, site.address(), target)
    assert text.startswith(f"{target} is damaged or has been replaced, as its sha256 is {sha256(OTHER)[:12]}…")
    assert target.read_bytes() == OTHER
    Path(f"{target}.sha256").unlink()
    fetch(site.address(), target)


# ----------------------------------------------------------------------------------------------------------- the disk
def test_a_full_disk(site, target, refusal):
    """The operating system itself reports that a file may not grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        text = refusal(fetch, site.address(), target, error=DiskError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert text.startswith(f"cannot write {target}: File too large; free disk space")
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, "bytes=30000-"]


def test_a_folder_that_cannot_be_made(site, target, refusal):
    target.parents[1].write_text("a file")
    assert f"cannot make the folder {target.parent}: " in refusal(fetch, site.address(), target)


# ------------------------------------------------------------------------------------------------------------- the hub
NAME = "sub/model.safetensors"
ADDRESS = f"https://huggingface.co/org/model/resolve/main/{NAME}"


@pytest.fixture
def hub(monkeypatch):
    with hub_site.running(monkeypatch) as running:
        running.repositories["org/model"] = {"main": {NAME: CONTENT, "other": b"x"}}
        yield running


def test_a_file_on_the_hub_is_downloaded_at_its_commit_and_pinned(hub, target):
    fetch(ADDRESS, target)
    assert_complete(target)
    commit = hub.commit_of("org/model", "main")
    resolved = {path for _, path, _ in hub.requests if "/resolve/" in path}
    assert resolved == {f"/org/model/resolve/{commit}/{NAME}"}


def test_content_damaged_on_the_way_from_the_hub_is_refused(hub, target, refusal, monkeypatch):
    monkeypatch.setattr(hub_site, "sha256", lambda content: "0" * 64)
    assert f"the {NAME} of hf:org/model has another size or sha256 than on the hub" in refusal(fetch, ADDRESS, target)
    assert not target.exists()


@pytest.mark.parametrize(
    ("part", "status", "reason"),
    [
        ("/resolve/", 403, "the hub refuses hf:org/model with the status 403; set HF_TOKEN"),
        ("/api/", 503, "the hub responds with 503"),
        ("", 404, "the model org/model has no file m"),
    ],
)
def test_refusals_of_the_hub(hub, target, refusal, part, status, reason):
    address = ADDRESS
    if part:
        hub.fail[part] = status
    else:
        address = "https://huggingface.co/org/model/resolve/main/m"
    text = refusal(fetch, address, target, error=Unreachable)
    assert reason in text
    assert_helps(text, address, target)
    assert not target.exists()


def test_access_that_has_to_be_requested(hub, target, refusal, monkeypatch):
    refuse = hub_site._Handler.refuse
    monkeypatch.setattr(hub_site._Handler, "refuse", lambda handler, status, _="": refuse(handler, status, "GatedRepo"))
    hub.fail["/resolve/"] = 403
    text = refusal(fetch, ADDRESS, target, error=Unreachable)
    assert "access to hf:org/model has to be requested at https://huggingface.co/org/model; then set" in text


def test_the_offline_mode_of_the_hub_is_respected(hub, target, refusal, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline mode is enabled" in refusal(fetch, ADDRESS, target, error=Unreachable)
