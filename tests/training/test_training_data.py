"""The data of a training: its labels, and what it says about them when it starts from a run on other data."""

import pytest
from helpers.tables import write

from mlmoe_jax.config import default_config
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.image_record import warn_of_leak
from mlmoe_jax.training.initialization import Resumed, RunOrigin
from mlmoe_jax.training.training_data import open_training_data

ROWS = [
    "image,labels,split",
    "a.png,cat,train",
    "b.png,dog,train",
    "c.png,cat;dog,train",
    "d.png,cat,val",
    "e.png,cat,val",
]
LEAK = (
    "1 of the 3 images of split val are, by their names, training images of {run}, so results on them are too good: "
    "a.png"
)
ORDER = "the training images of the run in {run}, or their order, have changed since it started (3 then, "


def table(**splits: str) -> str:
    """Return the table with other splits of some images."""
    rows = (row.split(",") for row in ROWS)
    return "\n".join(",".join([name, labels, splits.get(name[0], split)]) for name, labels, split in rows)


@pytest.fixture
def started(tmp_path):
    """The config and the folder of a run that has started on the table."""
    config, folder = default_config(), RunFolder(tmp_path / "run")
    config.data.name, config.data.root, config.data.test_splits = "csv", str(tmp_path), ()
    config.data.table = "all.csv"
    write(tmp_path, "all.csv", table(), images=[row.partition(",")[0] for row in ROWS[1:]])
    with folder.writing(), open(tmp_path / "run" / "label_space.npz", "wb") as file:
        data = open_training_data(config)
        data.label_space.save(file)
        data.images.write(folder)
    return config, folder


@pytest.mark.parametrize(
    ("changed", "tree", "says"),
    [
        (table(), "", []),
        ("\n".join([ROWS[0], *ROWS[:0:-1]]), "", [f"{ORDER}3 now)"]),
        (table().replace("cat;dog", "cat"), "", ["labels have changed since the run in"]),
        (table(), "tree.yaml", ["labels have changed since the run in"]),
        (table(a="spare"), "", [f"{ORDER}2 now)"]),
        (
            table(d="train"),
            "",
            ["the training split now has 1 image that the run in {run} evaluated", f"{ORDER}4 now)"],
        ),
        (table(a="val"), "", None),
        (table(a="val", d="train"), "", None),
    ],
)
def test_a_resumed_training_reports_data_that_have_changed(started, changed, tree, says, tmp_path, caplog):
    config, folder = started
    caplog.clear()
    (tmp_path / "all.csv").write_text(changed)
    (tmp_path / "tree.yaml").write_text("implies: {cat: dog}")
    config.data.tree = tree
    if says is None:
        with pytest.raises(UserError, match=r"training images of .*: a\.png; move them back, or train in another"):
            open_training_data(config, Resumed(config, folder))
        return
    assert open_training_data(config, Resumed(config, folder)).reordered == any(ORDER in text for text in says)
    warnings = [message for message in caplog.messages if "the run in" in message]
    assert len(warnings) == len(says)
    for warning, start in zip(warnings, says, strict=True):
        assert warning.startswith(start.format(run=folder))


def test_values_per_training_image_do_not_move_to_other_images(started, tmp_path, refusal):
    config, folder = started
    config.loss.kind = "role"
    (tmp_path / "all.csv").write_text("\n".join([ROWS[0], *ROWS[:0:-1]]))
    assert "and loss.kind=role has values for each; " in refusal(open_training_data, config, Resumed(config, folder))


def test_evaluated_images_that_the_values_were_trained_on_are_named(started, tmp_path, caplog):
    """Also in a third run, which starts from a run that starts from the run of these images."""
    config, folder = started
    second = RunFolder(tmp_path / "second")
    (tmp_path / "all.csv").write_text(table(a="spare"))
    images = open_training_data(config, RunOrigin(config, folder)).images
    with second.writing():
        images.write(second)
    assert "too good" not in caplog.text
    (tmp_path / "all.csv").write_text(table(a="val"))
    for run, runs in ((folder, folder), (second, f"{second} or of a run that it started from")):
        caplog.clear()
        open_training_data(config, RunOrigin(config, run))
        warn_of_leak(run, "val", ["e.png", "a.png", "d.png"])
        assert [message for message in caplog.messages if "too good" in message] == 2 * [LEAK.format(run=runs)]
    caplog.clear()
    warn_of_leak(RunFolder(tmp_path), "val", ["a.png"])  # a shared model has no record
    warn_of_leak(folder, "val", ["d.png"])
    assert not caplog.messages


def test_a_run_that_started_with_such_images_resumes(started, tmp_path, caplog):
    config, folder = started
    (tmp_path / "all.csv").write_text(table(a="val"))
    second = RunFolder(tmp_path / "second")
    data = open_training_data(config, RunOrigin(config, folder))
    with second.writing(), open(tmp_path / "second" / "label_space.npz", "wb") as file:
        data.label_space.save(file)
        data.images.write(second)
    caplog.clear()
    open_training_data(config, Resumed(config, second))
    assert LEAK.format(run=f"{second} or of a run that it started from") in caplog.messages


def test_known_positives_imply_others(tmp_path):
    config, names = default_config(), [f"{number}.png" for number in range(20)]
    config.data.name, config.data.root, config.data.val_split, config.data.test_splits = "csv", str(tmp_path), "", ()
    config.data.known_positives, config.data.tree, config.loss.unknown = "one", "tree.yaml", "negative"
    write(tmp_path, "train.csv", "\n".join(["image,labels", *(f"{name},cat;dog" for name in names)]), images=names)
    (tmp_path / "tree.yaml").write_text("implies: {cat: dog}")
    labels = open_training_data(config).train_split.labels.tolist()
    assert sorted(map(tuple, labels)) == [(-1, 1)] * labels.count([-1, 1]) + [(1, 1)] * labels.count([1, 1])
    assert 0 < labels.count([1, 1]) < 20
