"""Data sets on the hub: what is downloaded, what is read without network, and what is refused."""

import pytest
from helpers import hub_site
from helpers.parquet_files import IMAGE, class_label, content, images, png, sequence
from helpers.tables import data_settings
from huggingface_hub import constants

from mlmoe_jax.config import load_config
from mlmoe_jax.data.containers.catalog import open_images
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.runtime.hub import Address, parse_data_address

ADDRESS = "hf://datasets/ada/sea"
FEATURES = {"image": IMAGE, "labels": sequence(class_label("sky", "sea", "sand"))}
REPOSITORY = "datasets/ada/sea"


def shard(count: int, start: int = 0) -> bytes:
    return content({"image": images(count, start), "labels": [[k % 3] for k in range(count)]}, FEATURES)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub_site.running(monkeypatch) as running:
        files = {f"data/{split}-00000-of-00001.parquet": shard(4) for split in ("train", "test", "extra")}
        running.repositories[REPOSITORY] = {"main": {"README.md": b"# Sea\n", "LICENSE": b"free", **files}}
        yield running


def downloads(hub) -> set[str]:
    return {path.partition("/resolve/")[2].partition("/")[2] for _, path, _ in hub.requests if "/resolve/" in path}


def opened(root=ADDRESS, names=("train", "test"), **keys):
    return open_splits(data_settings("parquet", root, **{"val_split": "", **keys}), names)


def go_offline(hub, monkeypatch, how: str) -> None:
    hub.requests.clear()
    if how == "library":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "package":
        monkeypatch.setenv("MLMOE_OFFLINE", "1")
    else:
        hub.fail["api"] = hub.fail["resolve"] = (503, "")


def test_addresses():
    assert parse_data_address(ADDRESS) == (Address("ada/sea", "main", "dataset"), "")
    address, inside = parse_data_address(f"{ADDRESS}@refs/convert/parquet/small/train/")
    assert (address.revision, inside) == ("refs/convert/parquet", "small/train")
    assert str(address) == f"{ADDRESS}@refs/convert/parquet"
    assert parse_data_address(f"{ADDRESS}@v2/data")[0].revision == "v2"


@pytest.mark.parametrize("text", ["", "sea", "ada/", "/sea", "../x/y", "ada/sea@", "ada/sea@../x", "a b/c"])
def test_texts_that_are_no_address(refusal, text):
    refusal(parse_data_address, f"hf://datasets/{text}")


@pytest.mark.parametrize("how", ["library", "package", "down"])
def test_only_files_of_used_splits_are_downloaded_and_read_again_without_network(hub, monkeypatch, how):
    splits = opened()
    assert splits["train"].classes == ("sky", "sea", "sand")
    assert downloads(hub) == {f"data/{split}-00000-of-00001.parquet" for split in ("train", "test")} | {"README.md"}
    assert splits["train"].images.name(1) == f"{ADDRESS}/data/train-00000-of-00001.parquet#1"
    go_offline(hub, monkeypatch, how)
    again = opened()
    assert not downloads(hub)
    assert again["train"].fingerprint == splits["train"].fingerprint
    assert again["test"].images.encoded(3) == png(3)


def test_without_network_other_files_are_missing(hub, monkeypatch, refusal):
    opened(names=["train"], test_splits=())
    go_offline(hub, monkeypatch, "package")
    text = refusal(opened)
    assert text.startswith(f"{ADDRESS}@{hub.commit_of(REPOSITORY, 'main')} cannot be downloaded")
    assert "hf download ada/sea --repo-type=dataset" in text
    assert "cannot be downloaded, because MLMOE_OFFLINE is set" in refusal(opened, f"{ADDRESS}@v2")


def test_a_revision_and_a_folder(hub):
    main = hub.repositories[REPOSITORY]["main"]
    hub.repositories[REPOSITORY]["refs/convert/parquet"] = {"default/train/0000.parquet": shard(7)}
    main["more/train.parquet"] = shard(2)
    assert len(opened(f"{ADDRESS}@refs/convert/parquet", ["train"], test_splits=())["train"]) == 7
    assert len(opened(f"{ADDRESS}/more", ["train"], test_splits=())["train"]) == 2
    assert len(open_images(f"{ADDRESS}/more/train.parquet", Usage("", ""))) == 2


def test_a_configuration(hub, refusal):
    card = "---\nconfigs:\n- config_name: a\n  data_files:\n  - split: train\n    path: data/train-*\n"
    card += "- config_name: b\n  data_files:\n  - split: train\n    path: [data/test-*, data/extra-*]\n---\n"
    hub.repositories[REPOSITORY]["main"]["README.md"] = card.encode()
    assert "several configurations: a, b" in refusal(opened)
    assert len(opened(f"{ADDRESS}/b", ["train"], test_splits=())["train"]) == 8


@pytest.mark.parametrize(
    ("change", "address", "says"),
    [
        (lambda hub: None, "hf://datasets/ada/lake", "the hub has no dataset ada/lake, or it is private"),
        (lambda hub: None, f"{ADDRESS}@v9", "the dataset ada/sea has no revision 'v9'"),
        (
            lambda hub: hub.fail.update({"api": (403, "GatedRepo")}),
            ADDRESS,
            "access to ada/sea has to be",
        ),
        (
            lambda hub: hub.repositories.update({REPOSITORY: {"main": {"README.md": b"", "sea.py": b"import this"}}}),
            ADDRESS,
            f"has no Parquet files, but a loading script, which is not run; try {ADDRESS}@refs/convert/parquet",
        ),
        (
            lambda hub: hub.repositories.update({REPOSITORY: {"main": {"README.md": b"---\nconfigs: [\n---\n"}}}),
            ADDRESS,
            "hf://datasets/ada/sea/README.md is damaged",
        ),
        (
            lambda hub: hub.repositories.update({REPOSITORY: {"main": {"train.parquet": b"version https://git-lfs"}}}),
            ADDRESS,
            "is damaged",
        ),
        (lambda hub: hub.lies.update({"": {"sha": "../../x"}}), ADDRESS, "in a form that is not understood"),
        (
            lambda hub: hub.repositories.update(
                {REPOSITORY: {"main": {"../../train.parquet": b"", "/x.parquet": b""}}}
            ),
            ADDRESS,
            "has no Parquet files",
        ),
    ],
)
def test_refusals(hub, refusal, change, address, says):
    change(hub)
    assert says in refusal(opened, address)


def test_own_csv_takes_an_address(hub):
    config = load_config(f"own_csv:root={ADDRESS}", [])
    assert (config.data.name, config.data.root) == ("parquet", ADDRESS)


def test_a_table_of_the_hub(hub):
    files = {"labels.csv": b"image,labels\na.png,sea\n", "a.png": png(1)}
    hub.repositories[REPOSITORY] = {"main": files}
    config = load_config(f"own_csv:root={ADDRESS}", [])
    assert (config.data.name, config.data.table) == ("csv", "labels.csv")
    assert open_splits(config.data, [])["train"].images.encoded(0) == png(1)
