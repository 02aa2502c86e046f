"""The features of a corpus in parts, against those of a data set."""

from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest
from helpers.color_model import color
from helpers.refusals import CUT, Refusal, contents, damaged, each, run_command
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.apps.tools import feature_parts
from mlmoe_jax.apps.tools.feature_parts import write_feature_part
from mlmoe_jax.config import default_config
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.inference.feature_extractor import FeatureExtractor
from mlmoe_jax.main import main
from mlmoe_jax.runtime.progress import Progress

MODEL = ("--config=linear_probe:dataset=digits", "--config.model.backbone.weights=none", "--config.eval.batch_size=4")
TABLE = ("name=csv", "root=photos", "train_split=train", "val_split=train", "test_splits=", "bad_images=skip")
BAD = 5  # the row of an image that cannot be read


def write_photos(at: Path) -> Path:
    (at / "photos").mkdir()
    for row in range(11):
        Image.fromarray(color(20 * row, 110)).resize((20, 30)).save(at / f"photos/{row:02d}.png")
    (at / f"photos/{BAD:02d}.png").write_text("not an image")
    (at / "photos/train.csv").write_text("image,labels\n" + "".join(f"{row:02d}.png,a\n" for row in range(11)))
    return at


def write(*flags: str, output: str = "features/") -> int:
    return main(["features", *MODEL, "--images=photos", "--part-size=6", f"--output={output}", *flags])


@pytest.fixture
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_photos(tmp_path)


def rows_of(folder: Path) -> pyarrow.Table:
    return pyarrow.dataset.dataset(str(folder), format="parquet").to_table()


def test_parts_have_the_features_of_a_data_set_and_are_completed(at, capsys):
    assert run_command("features", *MODEL, *(f"--config.data.{key}" for key in TABLE), "--output=single") == 0
    assert write() == 0
    assert "10 of 11 images read" in capsys.readouterr().out
    table, whole = rows_of(at / "features"), contents(at / "features")
    assert table.column_names == ["image", "features", "error"]
    assert str(table.schema.field("features").type) == "fixed_size_list<element: float>[128]"
    assert table["image"].to_pylist() == [f"photos/{row:02d}.png" for row in range(11)]
    assert [error is None for error in table["error"].to_pylist()].index(False) == BAD
    rows, expected = table["features"].to_pylist(), np.load(at / "single/train.cls.npy")
    assert rows[BAD] is None
    assert np.isnan(expected[BAD]).all()
    rows[BAD] = expected[BAD]
    np.testing.assert_array_equal(np.array(rows, np.float32), expected)
    (at / "features/part-00000.parquet").unlink()
    assert write("--worker=2/2") == 0
    assert contents(at / "features") == whole
    assert "5 of 6 images read" in capsys.readouterr().out


class Halves:
    """An extractor with two features of an image: its mean color, and the mean colors of its left and right half."""

    def __init__(self):
        self.config = ConfigDict({"data": default_config().data})
        self.config.data.update(image_size=4, bad_images="skip", workers=0)

    def kinds(self):
        return {"cls": ((3,), "float32"), "patches": ((1, 2, 3), "float32")}

    def compute(self, loader, progress):
        for batch in progress.waiting(loader):
            real = batch["id"] >= 0
            halves = batch["image"].reshape(-1, 4, 2, 2, 3).mean((1, 3), np.float32)
            outputs = {"cls": halves.mean(1), "patches": halves[:, None], "id": batch["id"], "mask": batch["mask"]}
            yield {name: values[real] for name, values in outputs.items()}


def test_patches_are_written_in_the_order_of_rows_in_small_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_parts, "GROUP_BYTES", 2 * 9 * 4)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8)
    rows, progress = [*range(5), -1], Progress("features", 3, 2)
    computed = FeatureExtractor.row_features(Halves(), ArrayImages(pixels), rows, batch_size=2, progress=progress)
    write_feature_part(Halves().kinds(), tmp_path / "part-00000.parquet", (result for _, result in computed))
    table = rows_of(tmp_path)
    halves = pixels.reshape(5, 4, 2, 2, 3).mean((1, 3), np.float32)
    np.testing.assert_array_equal(table["patches"].to_pylist(), halves.reshape(5, 6))
    np.testing.assert_array_equal(table["features"].to_pylist(), halves.mean(1))
    groups = pyarrow.parquet.ParquetFile(tmp_path / "part-00000.parquet").metadata
    assert [groups.row_group(group).num_rows for group in range(groups.num_row_groups)] == [2, 2, 1]


# ------------------------------------------------------------------------------------------------------------ refusals
def written(at: Path) -> Path:
    write_photos(at)
    assert write() == 0
    return at


def again(*flags: str, output: str = "features/") -> int:
    return run_command("features", *MODEL, "--images=photos", "--part-size=6", f"--output={output}", *flags)


def refused(name, *says, flags=(), make=write_photos, output="features/"):
    return Refusal(name, make, lambda at: again(*flags, output=output), *says)


def without_images(at: Path) -> int:
    return run_command("features", *MODEL, "--output=features", "--worker=1/2")


@each(
    [
        refused("a file", "features of --images are parts in a folder; give --output=FOLDER/", output="features.npy"),
        Refusal("no images", None, without_images, "are for the parts of --images; give images"),
        refused("prompts", "needs a backbone without", flags=["--config.model.prompts.kind=deep"]),
        refused("other weights", "has parts with another value of backbone", flags=["--config.seed=1"], make=written),
        damaged("a part", written, "features/part-00000.parquet", CUT, lambda at: again(), "is damaged"),
    ]
)
def test_refusals_of_features(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case.check(tmp_path)
