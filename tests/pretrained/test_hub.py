"""Addresses of models on the hub, and downloads of hostile repositories."""

import errno
import os
from pathlib import Path

import pytest
from helpers import hub_site
from helpers.tensor_files import changed
from huggingface_hub import constants

from mlmoe_jax.pretrained.hub_models import fetch_model, upload_model
from mlmoe_jax.runtime.hub import Address, parse_address
from mlmoe_jax.runtime.storage import Folder

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


def downloads(hub) -> set[str]:
    return {path for _, path, _ in hub.requests if "/resolve/" in path}


# ----------------------------------------------------------------------------------------------------------- addresses
def test_addresses():
    assert parse_address("hf:user/name") == Address("user/name", "main")
    assert str(parse_address("hf:user/my.model-1_x@refs/pr/1")) == "hf:user/my.model-1_x@refs/pr/1"
    assert str(parse_address("hf:user/name@main")) == "hf:user/name"


@pytest.mark.parametrize(
    ("start", "rest", "says"),
    [
        (
            "hf:",
            ("", "name", "a/b/c", "/b", "a/", "../b", "a/..", "a b/c", "a/b\n", "a/b--c", "-a/b", "é/b"),
            "write USER/NAME",
        ),
        ("hf:user/name@", ("", "..", "a/../b", "/a", "a b", "a//b", "a/", "-x", "?x"), "is not the name of a branch"),
    ],
)
def test_texts_that_are_no_address(refusal, start, rest, says):
    for text in rest:
        assert says in refusal(parse_address, start + text)


# ----------------------------------------------------------------------------------------------------------- downloads
def test_only_known_files_of_a_private_model_are_downloaded(hub):
    hub.private.add("user/name")  # the token is sent
    bad = {"../../evil.txt": b"x", "/etc/evil": b"x", "model.pkl": b"\x80\x04.", "sub/config.json": b"x"}
    hub.repositories["user/name"]["main"] |= bad
    folder = fetched()
    assert contents(folder) == FILES
    assert downloads(hub) == {f"/user/name/resolve/{folder.name}/{name}" for name in FILES}
    assert folder.parent.parent == Path(os.environ["MLMOE_CACHE"]) / "hub"


def test_a_new_commit_is_another_folder_and_a_known_one_is_only_read(hub, capsys, monkeypatch):
    """The cache may be on a disk that cannot be written."""
    first = fetched()
    assert f"downloading hf:user/name@{first.name} to {first}\n" in capsys.readouterr().err
    hub.requests.clear()

    def fail(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", fail)
        patch.setattr(Folder, "write_text", fail)
        assert fetched() == first
    assert capsys.readouterr().err == ""
    assert not downloads(hub)
    hub.repositories["user/name"]["main"]["config.json"] = b"[]"
    second = fetched()
    assert (contents(first)["config.json"], contents(second)["config.json"]) == (b"{}", b"[]")
    assert fetched(f"hf:user/name@{second.name}") == second


LIE = "has another size or sha256 than on the hub"
OTHER_CONTENT = {"lfs": {"sha256": "0" * 64, "size": 7, "pointerSize": 100}}


@pytest.mark.parametrize(
    ("files", "lies", "address", "says"),
    [
        ({"config.json": b" " * 101}, {}, "user/name", "has a config.json of 0.0 MB, above 0.0 MB"),
        ({}, {"config.json": {"size": 1}}, "user/name", LIE),
        ({}, {"adapter.safetensors": OTHER_CONTENT}, "user/name", LIE),
        ({"adapter.safetensors": None}, {}, "user/name", "that mlmoe_jax has shared: it has no adapter.safetensors"),
        ({}, {}, "user/none", "the hub has no model user/none, or it is private"),
        ({}, {}, "user/name@v9", "has no revision 'v9'"),
        ({}, {"": {"sha": "../../evil"}}, "user/name", "in a form that is not understood"),
    ],
)
def test_other_models_are_refused(hub, refusal, files, lies, address, says):
    hub.repositories["user/name"]["main"], hub.lies = changed(FILES, files), lies
    assert says in refusal(fetched, f"hf:{address}")
    assert (says == LIE) == bool(downloads(hub))


@pytest.mark.parametrize("reason", ["MLMOE_OFFLINE is set", "offline mode is enabled)"])
def test_offline_the_copy_of_a_complete_download_is_used_and_told(hub, refusal, monkeypatch, capsys, reason):
    folder = fetched()
    hub.repositories["user/name"]["interrupted"] = {**FILES, "config.json": b"[]"}
    hub.fail["adapter.safetensors"] = (404,)
    refusal(fetched, "hf:user/name@interrupted")
    if "MLMOE" in reason:
        monkeypatch.setenv("MLMOE_OFFLINE", "1")
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    capsys.readouterr()
    assert fetched() == folder
    assert f"{reason}; hf:user/name is the commit {folder.name[:12]}" in capsys.readouterr().err
    for revision in ("v2", "interrupted"):
        assert f"{reason}; try again" in refusal(fetched, f"hf:user/name@{revision}")


def test_a_hub_that_does_not_answer(refusal, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", hub_site.TOKEN)
    monkeypatch.delenv("MLMOE_OFFLINE")
    assert "because the hub cannot be reached" in refusal(fetched)
    text = refusal(upload_model, tmp_path, Address("user/name"), [], private=False)
    assert "cannot be uploaded, because the hub cannot be reached" in text
    assert hub_site.TOKEN not in text
