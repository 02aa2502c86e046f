"""The data of a training: its labels, and what it says about them when it starts from a run on other data."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from helpers.tables import settings, write
from PIL import Image

from mlmoe_jax.config import default_config, to_json
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder, read_label_space
from mlmoe_jax.runs.image_record import warn_of_change, warn_of_leak
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
    config.data = settings(str(tmp_path), table="all.csv", test_splits=())
    write(tmp_path, "all.csv", table(), images=[row.partition(",")[0] for row in ROWS[1:]])
    begin(folder, open_training_data(config))
    return config, folder


def begin(folder: RunFolder, data) -> None:
    """Write what a run on some data writes at its start."""
    write_label_space(folder, data.label_space)
    with folder.writing():
        data.images.write(folder)


def write_label_space(folder: RunFolder, space: LabelSpace) -> None:
    with folder.writing(), open(folder / "label_space.npz", "wb") as file:
        space.save(file)


REVERSED = "\n".join([ROWS[0], *ROWS[:0:-1]])
LABELS = "labels have changed since the run in"
MOVED = "training images of .*: a\\.png; move them back, or train in another"


@pytest.mark.parametrize(
    ("changed", "keys", "says"),
    [
        (table(), {}, []),
        (REVERSED, {}, [f"{ORDER}3 now)"]),
        (table().replace("cat;dog", "cat"), {}, [LABELS]),
        (table(), {"data.tree": "tree.yaml"}, [LABELS]),
        (table(a="spare"), {}, [f"{ORDER}2 now)"]),
        (
            table(d="train"),
            {},
            ["the training split now has 1 image that the run in {run} evaluated", f"{ORDER}4 now)"],
        ),
        (table(a="val"), {}, MOVED),
        (table(a="val", d="train"), {}, MOVED),
        (REVERSED, {"loss.kind": "role"}, "and loss.kind=role has values for each; "),
    ],
)
def test_a_resumed_training_reports_data_that_have_changed(started, changed, keys, says, tmp_path, caplog):
    config, folder = started
    caplog.clear()
    (tmp_path / "all.csv").write_text(changed)
    (tmp_path / "tree.yaml").write_text("implies: {cat: dog}")
    config.update_from_flattened_dict(keys)
    if isinstance(says, str):
        with pytest.raises(UserError, match=says):
            open_training_data(config, Resumed(config, folder))
        return
    assert open_training_data(config, Resumed(config, folder)).reordered == any(ORDER in text for text in says)
    warnings = [message for message in caplog.messages if "the run in" in message]
    assert len(warnings) == len(says)
    for warning, start in zip(warnings, says, strict=True):
        assert warning.startswith(start.format(run=folder))


@pytest.mark.parametrize("changed", [table(), REVERSED, table(a="spare"), table(d="spare"), ""])
def test_a_finished_training_is_refused_on_other_images(started, changed, tmp_path, refusal):
    config, folder = started
    finish(folder, config)
    if changed:
        (tmp_path / "all.csv").write_text(changed)
    else:  # other images of the same names
        Image.new("RGB", (5, 5)).save(tmp_path / "a.png")
    if changed == table():
        open_training_data(config, Resumed(config, folder))
        return
    says = refusal(open_training_data, config, Resumed(config, folder))
    assert says == (
        f"{folder} holds a finished training on other images, which were in {tmp_path}; train in another --workdir"
    )


def finish(folder: RunFolder, config) -> None:
    """Write what a run writes at its end."""
    folder.write_text("config.json", to_json(config))
    folder.write_json("results.json", {"val": {"finished": True}})


def test_images_whose_content_has_changed_are_said(started, tmp_path, caplog):
    config, folder = started
    Image.new("RGB", (5, 5)).save(tmp_path / "d.png")
    open_training_data(config, Resumed(config, folder))
    says = f"images have changed since the run in {folder} started, so it continues with other images"
    assert says in caplog.messages


def test_an_evaluation_says_that_its_images_have_changed(started, tmp_path, caplog):
    config, folder = started
    val = partial(open_split, config.data, "val")
    warn_of_change(folder, val())
    warn_of_change(RunFolder(tmp_path), val())  # a shared model has no record
    warn_of_change(folder, replace(val(), ids=["x.png", "y.png"]))  # another data set
    assert not caplog.messages
    warn_of_change(folder, replace(val(), ids=["e.png", "d.png"]))
    Image.new("RGB", (5, 5)).save(tmp_path / "d.png")
    warn_of_change(folder, val())
    end = f" than when {folder} was trained, so results on it are not comparable"
    assert caplog.messages == [
        f"split val has other images, or another order of them,{end}",
        f"split val has other content in 1 of 2 images that were compared{end}",
    ]


def test_twins_of_training_images_in_other_splits_are_said_for_own_images(tmp_path, caplog):
    config = default_config()
    config.data = settings(str(tmp_path), test_splits=("test",), val_split="")
    colors = np.random.default_rng(0).integers(0, 255, (24, 6, 8, 3), np.uint8)
    for split in ("train", "test"):
        images = [f"{split}{k}.png" for k in range(24)]
        write(tmp_path, f"{split}.csv", "image,labels\n" + "".join(f"{image},x\n" for image in images), ())
        for image, pixels in zip(images, colors, strict=True):
            Image.fromarray(pixels).resize((200, 150), Image.Resampling.BICUBIC).save(tmp_path / image)
    open_training_data(config)
    assert "24 of the 24 images of split test are nearly equal to training images" in caplog.text
    caplog.clear()
    config.data.join_twins = False
    open_training_data(config)
    assert "nearly equal" not in caplog.text


def test_a_resumed_training_keeps_the_label_space_that_it_was_trained_with(started, refusal):
    config, folder = started
    space = read_label_space(folder)
    counted_otherwise = replace(space, positives=space.positives + 1)  # as another version of a library might
    write_label_space(folder, counted_otherwise)
    kept = open_training_data(config, Resumed(config, folder)).label_space
    np.testing.assert_array_equal(kept.positives, counted_otherwise.positives)
    write_label_space(folder, replace(space, names=space.names[::-1]))
    says = refusal(open_training_data, config, Resumed(config, folder))
    assert "other labels than the data has now" in says


def test_evaluated_images_that_the_values_were_trained_on_are_named(started, tmp_path, caplog):
    """Also in a third run, which starts from a run that starts from the run of these images, and if it resumes."""
    config, folder = started
    second = RunFolder(tmp_path / "second")
    (tmp_path / "all.csv").write_text(table(a="spare"))
    begin(second, open_training_data(config, RunOrigin(config, folder)))
    assert "too good" not in caplog.text
    (tmp_path / "all.csv").write_text(table(a="val"))
    for run, runs in ((folder, folder), (second, f"{second} or of a run that it started from")):
        caplog.clear()
        data = open_training_data(config, RunOrigin(config, run))
        warn_of_leak(run, "val", ["e.png", "a.png", "d.png"])
        assert [message for message in caplog.messages if "too good" in message] == 2 * [LEAK.format(run=runs)]
    begin(third := RunFolder(tmp_path / "third"), data)
    caplog.clear()
    open_training_data(config, Resumed(config, third))
    assert LEAK.format(run=f"{third} or of a run that it started from") in caplog.messages
    caplog.clear()
    warn_of_leak(RunFolder(tmp_path), "val", ["a.png"])  # a shared model has no record
    warn_of_leak(folder, "val", ["d.png"])
    assert not caplog.messages


def test_known_positives_imply_others(tmp_path):
    config, names = default_config(), [f"{number}.png" for number in range(20)]
    config.loss.unknown = "negative"
    config.data = settings(str(tmp_path), val_split="", test_splits=(), known_positives="one", tree="tree.yaml")
    write(tmp_path, "train.csv", "\n".join(["image,labels", *(f"{name},cat;dog" for name in names)]), images=names)
    (tmp_path / "tree.yaml").write_text("implies: {cat: dog}")
    labels = open_training_data(config).train_split.labels[:].tolist()
    assert sorted(map(tuple, labels)) == [(-1, 1)] * labels.count([-1, 1]) + [(1, 1)] * labels.count([1, 1])
    assert 0 < labels.count([1, 1]) < 20
