"""Downloads from a mirror of the Hugging Face hub."""

import pytest
from helpers.file_site import (
    COMMIT,
    CONTENT,
    HUB_PATH,
    OTHER,
    Answer,
    Handler,
    assert_complete,
    assert_helps,
    names,
    sha256,
)
from huggingface_hub import constants

from mlmoe_jax.pretrained.download import Unreachable, fetch

pytestmark = pytest.mark.usefixtures("pauses")


# ------------------------------------------------------------------------------------------------------------- the hub
def test_a_hub_file_is_checked_against_the_published_checksum(site, hub, target):
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


def test_content_damaged_on_the_way_from_the_hub_is_refused(site, hub, target, refusal, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", damaged(Handler.do_GET))
    text = refusal(fetch, hub, target)
    assert f"instead of {sha256(CONTENT)[:12]}…; start again, put the right file at" in text
    assert names(target) == []


def damaged(answer):
    def do_get(handler):
        published, handler.server.content = handler.server.content, OTHER
        answer(handler)
        handler.server.content = published

    return do_get


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "GatedRepo", "access to hf:org/model has to be requested at https://huggingface.co/org/model; then set"),
        (401, "RepoNotFound", "the hub has no model org/model, or it is private: check the name, or set HF_TOKEN"),
        (404, "EntryNotFound", "the hub refuses hf:org/model with the status 404"),
        (404, "RevisionNotFound", "the model org/model has no revision 'main'"),
        (503, "", "the hub responds with 503, and retrying did not help"),
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
