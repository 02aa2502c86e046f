"""The data of a training: its labels, and what it says about them when it resumes."""

import pytest
from helpers.tables import write

from mlmoe_jax.config import default_config
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training.training_data import open_training_data

TABLE = "image,labels\na.png,cat\nb.png,dog\nsub/c.png,cat;dog\n"


@pytest.mark.parametrize(
    ("table", "tree", "says"),
    [
        (TABLE, "", ""),
        (TABLE.replace("c.png,cat;dog", "c.png,cat"), "", "labels have changed since the run in"),
        (TABLE, "tree.yaml", "labels have changed since the run in"),
        (TABLE.replace("a.png,cat\n", ""), "", "started with 3 training images and now has 2"),
    ],
)
def test_a_resumed_training_reports_data_that_have_changed(table, tree, says, tmp_path, caplog):
    config, folder = default_config(), RunFolder(tmp_path / "run")
    config.data.name, config.data.root, config.data.val_split, config.data.test_splits = "csv", str(tmp_path), "", ()
    write(tmp_path, "train.csv", TABLE)
    with folder.writing(), open(tmp_path / "run" / "label_space.npz", "wb") as file:
        open_training_data(config).label_space.save(file)
    assert "since the run" not in caplog.text
    (tmp_path / "train.csv").write_text(table)
    (tmp_path / "tree.yaml").write_text("implies: {cat: dog}")
    config.data.tree = tree
    open_training_data(config, folder)
    warnings = [message for message in caplog.messages if "the run in" in message]
    assert len(warnings) == bool(says)
    assert says in "".join(warnings)


def test_known_positives_imply_others(tmp_path):
    config, names = default_config(), [f"{number}.png" for number in range(20)]
    config.data.name, config.data.root, config.data.val_split, config.data.test_splits = "csv", str(tmp_path), "", ()
    config.data.known_positives, config.data.tree, config.loss.unknown = "one", "tree.yaml", "negative"
    write(tmp_path, "train.csv", "\n".join(["image,labels", *(f"{name},cat;dog" for name in names)]), images=names)
    (tmp_path / "tree.yaml").write_text("implies: {cat: dog}")
    labels = open_training_data(config).train_split.labels.tolist()
    assert sorted(map(tuple, labels)) == [(-1, 1)] * labels.count([-1, 1]) + [(1, 1)] * labels.count([1, 1])
    assert 0 < labels.count([1, 1]) < 20
