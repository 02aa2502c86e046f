import re
import subprocess
import sys

import pytest
from helpers.paths import REPOSITORY
from helpers.tables import data_settings as settings
from helpers.tables import listed, widths, write

from mlmoe_jax.apps.tools.pack import pack
from mlmoe_jax.config import default_config
from mlmoe_jax.data.sources.catalog import DATA_SETS
from mlmoe_jax.data.sources.named_files import find_root, require_no_table
from mlmoe_jax.data.sources.open import count_labels, open_split, open_splits, original_name
from mlmoe_jax.data.sources.source import Published
from mlmoe_jax.data.split import SkippedImages
from mlmoe_jax.errors import UserError

PUBLISHED = ("voc2007", "voc2012", "coco2014", "nuswide", "vg256", "vg500", "chestxray14", "chexpert")


@pytest.fixture
def table(tmp_path):
    """A folder with 20 images in one table: image k has label a and, if k is odd, b. It is k + 1 pixels wide."""
    rows = [f"{k}.png,{'a;b' if k % 2 else 'a'}" for k in range(20)]
    write(tmp_path, "all.csv", "\n".join(["image,labels", *rows]), [f"{k}.png" for k in range(20)])
    return tmp_path


def test_a_packed_data_set_has_the_name_and_labels_of_its_source(table, monkeypatch):
    config = default_config()
    config.data = settings("csv", table, table="all.csv", val_split="", test_splits=())
    pack(config, str(table / "packed"))
    others = {name: place for name, place in DATA_SETS.entries.items() if name != "csv"}
    monkeypatch.setattr(DATA_SETS, "entries", others)  # as if it was the source of another program
    packed = settings("packed", table / "packed")
    assert (original_name(packed), count_labels(packed)) == ("csv", 2)


def test_labels_of_published_data_are_counted_without_their_files_and_of_own_images_in_their_table(table):
    labels = {"voc2012": 20, "vg256": 256, "vg500": 500, "chexpert": 14, "chestxray14": 14}
    assert {original_name(data): count_labels(data) for data in map(settings, labels)} == labels
    assert count_labels(settings("csv", table, table="all.csv")) == 2


def test_a_shared_model_has_no_table_that_an_output_could_replace(table, monkeypatch):
    """Its config has lost the folder of the data set, not the names of splits."""
    (table / "val.csv").write_text("predictions")
    monkeypatch.chdir(table)
    require_no_table("val.csv", settings("csv", ""))
    with pytest.raises(UserError, match="would replace the table"):
        require_no_table("val.csv", settings("csv", table))


def test_all_splits_have_the_classes_of_the_training_split(table):
    for name, rows in {"train": ["0.png,b", "1.png,a"], "val": ["2.png,a"]}.items():
        (table / f"{name}.csv").write_text("\n".join(["image,labels", *rows]))
    splits = open_splits(settings("csv", table), ("val", "", "train", "val"))
    assert list(splits) == ["train", "val"]
    assert splits["val"].classes == splits["train"].classes == ("a", "b")


def test_a_source_with_fixed_classes_takes_those_of_a_model_that_has_them():
    assert open_split(settings("digits_single"), "val", classes=[str(digit) for digit in range(10)]).labels[:].any()


def test_images_are_held_out_by_the_seed_of_the_split_or_that_of_the_run(table):
    data, ids = settings("csv", table, table="all.csv", val_fraction=0.25), {}
    for split_seed, seed in ((0, 3), (0, 4), (3, 0), (-1, 3)):  # -1: the seed of the run
        data.split_seed = split_seed
        ids[split_seed, seed] = open_split(data, "val", seed=seed).ids
    assert ids[0, 3] == ids[0, 4] != ids[3, 0] == ids[-1, 3]


def test_missing_images_are_left_out_on_request(table):
    (table / "3.png").unlink()
    skip = settings("csv", table, table="all.csv", bad_images="skip")
    kept, split = open_split(skip, "train", keep_missing=True), open_split(skip, "train")
    assert (len(kept), kept.missing) == (20, None)
    assert listed(split) == [image for image in listed(kept) if image != "3.png: a, b"]
    assert widths(split) == [k + 1 for k in range(20) if k != 3]
    reason = f"cannot read {table}/3.png as an image: No such file or directory"
    assert SkippedImages(split).table() == [["train", "3.png", reason]]


def test_no_other_image_is_held_out_for_a_missing_one(table):
    """The fraction is so small that only the image with the least hash is held out."""
    data = settings("csv", table, table="all.csv", bad_images="skip", val_fraction=1e-9)
    (held_out,) = open_split(data, "val").ids
    (table / held_out).unlink()
    train, val = (open_split(data, name) for name in ("train", "val"))
    assert (len(train), len(val), val.missing.split.ids) == (19, 0, [held_out])


def test_slow_libraries_are_imported_only_when_needed():
    slow = "{'sklearn', 'tensorflow_datasets', 'jax'}"
    code = f"import sys, mlmoe_jax.data.sources.open; sys.exit(bool({slow} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -------------------------------------------------------------------------------------------------- published data sets
BIRDS = Published("birds", "images and labels.txt", "https://example.org/birds", "birds")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory, without $MLMOE_DATA."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("MLMOE_DATA", raising=False)
    return tmp_path


def test_a_folder_is_looked_for_in_order(place, monkeypatch):
    for folder in ("work/data/birds", "all/birds", "own"):
        (place / folder).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(place))
    for variable, root, found in (
        (None, "", "data/birds"),
        ("", "", "data/birds"),
        (str(place / "all"), "", place / "all/birds"),
        (str(place / "all"), place / "own", place / "own"),
        (str(place / "all"), "~/own", place / "own"),
        ("~/all", "", place / "all/birds"),
    ):
        if variable is not None:
            monkeypatch.setenv("MLMOE_DATA", variable)
        assert str(BIRDS.folder(root)) == str(found)
    (place / "work" / "data" / "voc2007").mkdir()
    monkeypatch.setenv("MLMOE_DATA", "")
    assert find_root(settings("voc2007")) == "data/voc2007"
    assert find_root(settings("csv", "~/anywhere")) == f"{place}/anywhere"


def test_the_published_data_sets_say_where_they_are_explained():
    published_of = {name: found for name in DATA_SETS if (found := DATA_SETS[name].published)}
    assert tuple(published_of) == PUBLISHED
    page = (REPOSITORY / "docs" / "datasets.md").read_text()
    sections = {re.sub(r"[^a-z0-9]+", "-", title.lower()) for title in re.findall(r"^## (.+)$", page, re.MULTILINE)}
    for name, published in published_of.items():
        assert published.name == name
        assert published.section in sections
        assert published.address in page
