"""Accepted corrections of labels: what they change, for every source."""

import pytest
from helpers.tables import data_settings, listed, opened, settings, write, write_images

from mlmoe_jax.data.sources.corrections import read_answers
from mlmoe_jax.data.sources.named_files import resolve_path
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.usage import unused_input
from mlmoe_jax.runtime import files

HEADING = "image,label,given,suggested,score,accept\n"
TABLE = "image,labels\na.png,dog\nb.png,cat;dog\nsub/c.png,\n"


@pytest.fixture
def corrected(tmp_path):
    """Return a function that opens the training split of a table with the rows of a CSV as corrections."""
    write(tmp_path, "train.csv", TABLE)

    def read(rows: str, heading: str = HEADING, **keys):
        (tmp_path / "fixed.csv").write_text(heading + rows)
        return opened("csv", tmp_path, corrections="fixed.csv", **keys)

    return read


def test_accepted_rows_change_labels_and_no_others(corrected):
    accepted = "a.png,cat,0,1,0.1,yes\nb.png,dog,1,0,0.2, X \nsub/c.png,dog,0,,0.3,1\n"
    rejected = "b.png,cat,1,0,0.4,\na.png,dog,1,0,0.5,No\n"
    assert listed(corrected(accepted + rejected)) == ["a.png: cat, dog", "b.png: cat", "sub/c.png: ?dog"]


def test_rows_without_an_answer_are_counted(corrected):
    split = corrected("a.png,cat,0,1,0.1,yes\nb.png,cat,0,1,0.1,no\na.png,dog,1,0,0.1,\n")
    [sentence] = unused_input(split.usage)
    assert sentence.endswith("fixed.csv: 1 of 3 rows is not used: 1 without an answer in the column accept (line 4)")


def test_only_four_columns_are_read_in_any_order_and_names_that_are_gone_may_stay(corrected):
    rows = "y,note,1.0,cat,a.png\n,,0,bird,a.png\n,,0,cat,gone.png\n"
    split = corrected(rows, "\ufeffaccept,why,suggested,label,image\r\n")
    assert listed(split) == ["a.png: cat, dog", "b.png: cat, dog", "sub/c.png:"]


def test_held_out_images_are_corrected_and_drawn_by_the_corrected_labels(corrected, tmp_path):
    keys = {"val_fraction": 0.34, "corrections": str(tmp_path / "fixed.csv")}  # an absolute path
    whole = corrected("sub/c.png,cat,0,1,0.1,yes\na.png,cat,0,1,0.1,yes\n")
    parts = [listed(opened("csv", tmp_path, name, **keys)) for name in ("train", "val")]
    assert all(parts)
    assert sorted([*parts[0], *parts[1]]) == listed(whole) == ["a.png: cat, dog", "b.png: cat, dog", "sub/c.png: cat"]


def test_only_the_training_split_is_corrected(corrected, tmp_path):
    write(tmp_path, "test.csv", "image,labels\na.png,dog\n")
    corrected("a.png,cat,0,1,0.1,yes\n")
    test = opened("csv", tmp_path, "test", ("cat", "dog"), corrections="fixed.csv")
    assert listed(test) == ["a.png: dog"]


@pytest.mark.parametrize("source", ["folders", "synthetic"])
def test_every_source_is_corrected(source, tmp_path):
    write_images(tmp_path, ("train/cat/a.png", "train/dog/b.png"))
    data = data_settings(source, tmp_path, labels=20)
    before = open_split(data, "train")
    data.corrections, code = str(tmp_path / "fixed.csv"), 1 - before.labels[:][0, 0] ** 2
    (tmp_path / "fixed.csv").write_text(f"{HEADING}{before.ids[0]},{before.classes[0]},,{code},,yes\n")
    after = open_split(data, "train")
    assert after.labels[:][0, 0] == code
    assert (after.labels[:] != before.labels).sum() == 1


def test_a_file_may_be_below_the_data_set_absolute_or_in_an_object_store(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for root, name, place in (
        ("~/photos", "audit/s.csv", "/home/me/photos/audit/s.csv"),
        ("photos", "~/s.csv", "/home/me/s.csv"),
        ("gs://bucket/set", "s.csv", "gs://bucket/set/s.csv"),
        ("gs://bucket/set", "gs://other/s.csv", "gs://other/s.csv"),
    ):
        assert resolve_path(settings(root), name) == place
    stored = {"gs://other/s.csv": f"{HEADING}a.png,cat,0,1,0.1,yes\n".encode()}
    monkeypatch.setattr(files, "_read_remote", lambda path, most: stored[path])
    assert [(row.line, row.key, yes) for row, yes in read_answers("gs://other/s.csv")] == [
        (2, ("a.png", "cat", 1), True)
    ]
