"""Downloads that succeed, from a local server that closes connections and changes the file."""

import email.utils
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.file_site import (
    CONTENT,
    OTHER,
    Answer,
    assert_complete,
    leave_part,
    sha256,
)

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.catalog import CATALOG
from mlmoe_jax.pretrained import download
from mlmoe_jax.pretrained.download import check_pinned, fetch
from mlmoe_jax.pretrained.weights import find_weights
from mlmoe_jax.runtime import progress

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
    # A chunk arrived before the first pause, less than one before the second.
    assert pauses == [download.PAUSES[0], download.PAUSES[1]]


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


def test_temporary_failures_are_retried_after_a_pause(site, target, pauses):
    waits = [Answer(429, headers=(("Retry-After", seconds),)) for seconds in ("7", "9999")]
    site.script = [Answer(503), *waits]
    fetch(site.address(), target)
    assert_complete(target)
    assert pauses == [download.PAUSES[0], 7.0, download.LONGEST_PAUSE]


def test_a_server_that_stops_responding_is_retried(site, target, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    site.script = [Answer(wait=threading.Event())]
    fetch(site.address(), target)
    assert_complete(target)
    assert site.ranges == [None, f"bytes={len(CONTENT) // 2}-"]


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


# -------------------------------------------------------------------------------------- interruption, several processes
def test_two_threads_download_once(site, target):
    proceed, results = threading.Event(), []
    site.script = [Answer(wait=proceed)]
    threads = [threading.Thread(target=lambda: results.append(fetch(site.address(), target))) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(0.1)
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


def test_the_first_digits_of_a_sha256_are_compared_and_the_whole_is_pinned(site, target):
    with pytest.raises(UserError, match="does not provide the expected"):
        fetch(site.address(), target, sha256="0" * 8)
    assert not target.exists()
    fetch(site.address(), target, sha256=sha256(CONTENT)[:8])
    assert_complete(target)
    target.write_bytes(b"another file")
    for given in (sha256(CONTENT)[:8], ""):
        with pytest.raises(UserError, match=f"instead of {sha256(CONTENT)[:12]}"):
            check_pinned(target, sha256=given)


def test_the_catalog_compares_the_digits_in_the_names_of_pytorch_files():
    assert CATALOG["resnet101"].sha256 == "5d3b4d8f"
    assert CATALOG["vit_b16_in1k"].sha256 == "80ecf9dd"
    assert CATALOG["vit_b16_mae"].sha256 == ""  # no digits in its name
    installed = find_weights("efficientnet_lite0")
    assert sha256(installed.read_bytes()).startswith(CATALOG["efficientnet_lite0"].sha256)
