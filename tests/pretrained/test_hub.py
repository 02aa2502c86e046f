"""Addresses of models on the hub, and downloads of hostile repositories."""

import errno
import os
from pathlib import Path

import pytest
from helpers import hub_site
from huggingface_hub import constants

from mlmoe_jax.pretrained.hub import Address, fetch_model, parse_address, upload_model

MOST = {"config.json": 100, "adapter.safetensors": 1000}
FILES = {"config.json": b"{}", "adapter.safetensors": b"tensors"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    with hub_site.running(monkeypatch) as running:
        running.repositories["user/name"] = {"main": dict(FILES)}
        yield running


def fetched(address: str = "hf:user/name") -> Path:
    return fetch_model(parse_address(address), MOST, ["adapter.safetensors"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_addresses():
    assert parse_address("hf:user/name") == Address("user/name", "main")
    assert str(parse_address("hf:user/my.model-1_x@refs/pr/1")) == "hf:user/my.model-1_x@refs/pr/1"
    assert str(parse_address("hf:user/name@main")) == "hf:user/name"


@pytest.mark.parametrize(
    "text", ["", "name", "a/b/c", "/b", "a/", "../b", "a/..", "a b/c", "a/b\n", "a/b--c", "-a/b", "é/b"]
)
def test_names_that_are_not_user_name(text, refusal):
    assert "write USER/NAME" in refusal(parse_address, f"hf:{text}")


@pytest.mark.parametrize("revision", ["", "..", "a/../b", "/a", "a b", "a//b", "a/", "-x", "?x"])
def test_revisions_that_cannot_be_one(revision, refusal):
    assert "is not the name of a branch" in refusal(parse_address, f"hf:user/name@{revision}")


def test_only_known_files_are_downloaded(hub):
    bad = {"../../evil.txt": b"x", "/etc/evil": b"x", "model.pkl": b"\x80\x04.", "sub/config.json": b"x"}
    hub.repositories["user/name"]["main"] |= bad
    folder = fetched()
    assert contents(folder) == FILES
    asked = {path for method, path, _ in hub.requests if "/resolve/" in path}
    assert asked == {f"/user/name/resolve/{folder.name}/{name}" for name in FILES}
    assert folder.parent.parent == Path(os.environ["MLMOE_CACHE"]) / "hub"


def test_a_new_commit_is_another_folder_and_a_known_one_is_not_downloaded_again(hub, capsys):
    first = fetched()
    assert f"downloading hf:user/name, commit {first.name[:12]}, to {first}\n" in capsys.readouterr().err
    hub.requests.clear()
    assert fetched() == first
    assert capsys.readouterr().err == ""
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]
    hub.repositories["user/name"]["main"]["config.json"] = b"[]"
    second = fetched()
    assert (contents(first)["config.json"], contents(second)["config.json"]) == (b"{}", b"[]")
    assert fetched(f"hf:user/name@{second.name}") == second


def test_a_complete_copy_is_only_read(hub, monkeypatch):
    """The cache may be on a disk that cannot be written."""
    first = fetched()

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert fetched() == first


def test_large_files_are_refused_before_they_are_downloaded(hub, refusal):
    hub.repositories["user/name"]["main"]["config.json"] = b" " * 101
    assert "has a config.json of 0.0 MB, above 0.0 MB" in refusal(fetched)
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


def test_a_file_of_another_size_or_content_than_announced_is_refused(hub, refusal, monkeypatch):
    hub.lies["config.json"] = 1
    assert "has another size or sha256 than on the hub" in refusal(fetched)
    hub.lies.clear()
    monkeypatch.setattr(hub_site, "sha256", lambda content: "0" * 64)
    assert "has another size or sha256 than on the hub" in refusal(fetched)


def test_a_repository_without_our_files_is_refused(hub, refusal):
    del hub.repositories["user/name"]["main"]["adapter.safetensors"]
    assert refusal(fetched) == "hf:user/name is not a model that mlmoe_jax has shared: it has no adapter.safetensors"


def test_unknown_and_private_repositories(hub, refusal, monkeypatch):
    assert "the hub has no model user/none, or it is private" in refusal(fetched, "hf:user/none")
    assert "has no revision 'v9'" in refusal(fetched, "hf:user/name@v9")
    hub.private.add("user/name")
    assert contents(fetched()) == FILES
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    assert "or it is private: check the name, or set HF_TOKEN" in refusal(fetched)


def test_an_answer_that_is_not_understood_is_refused(hub, refusal, monkeypatch):
    monkeypatch.setattr(hub_site.Hub, "commit_of", lambda *_: "../../evil")
    assert "in a form that is not understood" in refusal(fetched)


@pytest.mark.parametrize("reason", ["MLMOE_OFFLINE is set", "offline mode is enabled)"])
def test_offline_the_copy_of_an_earlier_download_is_used_and_told(hub, refusal, monkeypatch, capsys, reason):
    folder = fetched()
    if "MLMOE" in reason:
        monkeypatch.setenv("MLMOE_OFFLINE", "1")
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    capsys.readouterr()
    assert fetched() == folder
    assert f"{reason}; hf:user/name is the commit {folder.name[:12]}" in capsys.readouterr().err
    assert f"{reason}; try again" in refusal(fetched, "hf:user/name@v2")


def test_a_hub_that_does_not_answer(hub, refusal, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "because the hub cannot be reached" in refusal(fetched)
    text = refusal(upload_model, tmp_path, Address("user/name"), [], private=False)
    assert "cannot be uploaded, because the hub cannot be reached" in text
    assert hub_site.TOKEN not in text


def test_an_interrupted_download_counts_as_none_when_offline(hub, refusal, monkeypatch):
    hub.fail["adapter.safetensors"] = 404
    refusal(fetched)
    monkeypatch.setenv("MLMOE_OFFLINE", "1")
    assert "MLMOE_OFFLINE is set" in refusal(fetched)
