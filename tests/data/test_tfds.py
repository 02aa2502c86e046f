import io
import json
import pickle
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from helpers.tables import data_settings
from PIL import Image

from mlmoe_jax.data.sources.open import open_split

NAMES = ["cat", "cow", "dog"]
# per image: the present classes, and the difficult ones
IMAGES = {
    "train": [([0, 2], []), ([], []), ([1], [2]), ([], [0]), ([2], []), ([0], [])],
    "test": [([1], []), ([2], [])],
}


def open_tfds(root, name, split, **keys):
    return open_split(data_settings(f"tfds:{name}", root, **keys), split)


def image_file(width: int, image_format="JPEG") -> io.BytesIO:
    file = io.BytesIO()
    Image.new("RGB", (width, 8), (9 * width, 0, 0)).save(file, image_format)
    file.seek(0)
    return file


def voc_like(row, present, difficult) -> tuple[dict, dict]:
    """Return the features and an example of a data set like VOC."""
    one = tfds.features.ClassLabel(names=NAMES)
    features = {
        "image": tfds.features.Image(),
        "image/filename": tfds.features.Text(),
        "labels": tfds.features.Sequence(one),
        "labels_no_difficult": tfds.features.Sequence(one),
        "objects": tfds.features.Sequence({"label": one, "is_difficult": np.bool_}),
    }
    example = {
        "image": image_file(10 + row),
        "image/filename": f"{row:03d}.jpg",
        "labels": [*present, *difficult],
        "labels_no_difficult": present,
        "objects": [{"label": k, "is_difficult": k in difficult} for k in (*present, *difficult)],
    }
    return features, example


def coco_like(row, present, difficult) -> tuple[dict, dict]:
    one = tfds.features.ClassLabel(names=NAMES)
    features = {
        "panoptic": tfds.features.Text(),
        "image": tfds.features.Image(),
        "image/id": np.int64,
        "objects": tfds.features.Sequence({"area": np.int64, "label": one}),
    }
    objects = [{"area": 5, "label": k} for k in (*present, *present)]
    return features, {"panoptic": "", "image": image_file(10 + row), "image/id": 7 * row, "objects": objects}


def single(row, present, difficult) -> tuple[dict, dict]:
    features = {
        "id": tfds.features.Text(),
        "image": tfds.features.Image(encoding_format="png"),
        "label": tfds.features.ClassLabel(num_classes=3),
    }
    label = present[0] if present else -1
    return features, {"id": "all the same", "image": image_file(10 + row, "PNG"), "label": label}


def builder_class(name: str, make, number: str, config: str):
    """Return a TFDS builder class whose examples come from `make`."""

    def info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(make(0, [0], [])[0]))

    def split_generators(self, manager):
        return {split: self._generate_examples(split) for split in IMAGES}

    def generate(self, split):
        for row, (present, difficult) in enumerate(IMAGES[split]):
            yield row, make(row, present, difficult)[1]

    fields = {
        "__module__": "__main__",  # for which TFDS does not look for a metadata folder
        "VERSION": tfds.core.Version(number),
        "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config)] if config else [],
        "_info": info,
        "_split_generators": split_generators,
        "_generate_examples": generate,
    }
    return type(name, (tfds.core.GeneratorBasedBuilder,), fields, skip_registration=True)


def prepare(root, name, make, number="1.0.0", config="") -> None:
    builder = builder_class(name, make, number, config)(data_dir=root, file_format="array_record")
    builder.download_and_prepare()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("tfds")
    prepare(root, "PetsVoc", voc_like, "1.0.0", "small")
    prepare(root, "PetsCoco", coco_like)
    prepare(root, "PetsSingle", single)
    return root


@pytest.fixture
def copied(prepared, tmp_path):
    """A copy of the root for a test that changes it."""
    return shutil.copytree(prepared, tmp_path / "copied")


def by_width(split) -> dict[int, list[int]]:
    return {image.shape[1]: labels.tolist() for image, labels in zip(split.images, split.labels, strict=True)}


# ------------------------------------------------------------------------------------------------------------- labels
def test_voc_with_its_difficult_labels(prepared):
    split = open_tfds(prepared, "pets_voc/small", "train", keep_empty=True)
    assert split.name == "train"
    assert split.classes == tuple(NAMES)
    assert split.labels.dtype == np.int8
    assert split.images.encoded(0).startswith(b"\xff\xd8")
    copy = pickle.loads(pickle.dumps(split.images))
    assert [image.shape[1] for image in copy] == [image.shape[1] for image in split.images]
    assert by_width(split) == {10: [1, 0, 1], 11: [0, 0, 0], 12: [0, 1, 2], 13: [2, 0, 0], 14: [0, 0, 1], 15: [1, 0, 0]}
    for identifier, image in zip(split.ids, split.images, strict=True):
        assert identifier == f"{image.shape[1] - 10:03d}.jpg"


def test_images_without_a_positive_label_are_dropped_unless_kept(prepared):
    split = open_tfds(prepared, "pets_voc", "train")
    assert len(split) == 4
    assert sorted(by_width(split)) == [10, 12, 14, 15]
    split = open_tfds(prepared, "pets_voc", "train", difficult_train="positive")
    assert sorted(by_width(split)) == [10, 12, 13, 14, 15]
    assert split.name == "train"


def test_labels_of_objects(prepared):
    split = open_tfds(prepared, "pets_coco", "train")
    assert by_width(split) == {10: [1, 0, 1], 12: [0, 1, 0], 14: [0, 0, 1], 15: [1, 0, 0]}
    assert sorted(split.ids) == ["0", "14", "28", "35"]


def test_one_label_per_image(prepared):
    split = open_tfds(prepared, "pets_single", "train", keep_empty=True)
    assert split.classes == ("0", "1", "2")
    assert by_width(split)[11] == [-1, -1, -1]
    assert by_width(split)[12] == [0, 1, 0]
    assert split.ids == [f"train/{row:08d}" for row in range(6)]  # ids that are not unique are not used


def test_parts_of_a_split(prepared, refusal):
    whole = open_tfds(prepared, "pets_coco", "train", keep_empty=True)
    half = open_tfds(prepared, "pets_coco", "train[:50%]", keep_empty=True)
    assert half.name == "train[:50%]"
    assert half.ids == whole.ids[:3]
    assert len(open_tfds(prepared, "pets_coco", "train+test", keep_empty=True)) == 8
    empty = whole.ids.index("7")
    sentence = refusal(open_tfds, prepared, "pets_coco", f"train[{empty}:{empty + 1}]")
    assert sentence.startswith(f"no image of split train[{empty}:{empty + 1}] of tfds:pets_coco has a positive label; ")


# ------------------------------------------------------------------------------------------------------------- images
def test_an_image_that_cannot_be_read_is_named(prepared, refusal, monkeypatch):
    images = open_tfds(prepared, "pets_voc", "test").images
    monkeypatch.setattr(type(images), "encoded", lambda self, row: b"")
    assert refusal(images.read, 1) == "cannot read image 1 of tfds:pets_voc split test as an image: it is empty"


def test_without_tensorflow(prepared):
    code = (
        "import sys; from mlmoe_jax.config import default_config\n"
        "from mlmoe_jax.data.sources.open import open_split\n"
        f"data = default_config().data; data.name, data.root = 'tfds:pets_coco', {str(prepared)!r}\n"
        "open_split(data, 'test').images[0]\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ----------------------------------------------------------------------------------------------------------- location
def test_names_versions_and_folders(copied, monkeypatch):
    prepare(copied, "PetsCoco", coco_like, "1.10.0")
    prepare(copied, "PetsCoco", coco_like, "1.9.0")
    (copied / "pets_coco" / "1.9.0" / "features.json").write_text("{")
    assert len(open_tfds(copied, "pets_coco", "test")) == 2  # not 1.9.0
    assert len(open_tfds(copied, "pets_coco:1.0.0", "test")) == 2
    assert len(open_tfds(copied / "pets_coco" / "1.0.0", "pets_coco", "test")) == 2
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(copied))
    assert len(open_tfds("", "pets_voc/small:1.0.0", "test")) == 2


def test_configurations(copied, refusal):
    prepare(copied, "PetsVoc", voc_like, config="large")  # becomes the default one
    assert len(open_tfds(copied, "pets_voc", "test")) == 2
    shutil.rmtree(copied / "pets_voc" / ".config")
    assert "or has several configurations of which data.name should name one" in refusal(
        open_tfds, copied, "pets_voc", "test"
    )
    assert len(open_tfds(copied, "pets_voc/small", "test")) == 2


@pytest.mark.parametrize("name", ["coco/2014", "pets_voc/none", "pets_coco:2.0.0"])
def test_a_data_set_that_is_not_prepared(prepared, refusal, name):
    (prepared / "coco" / "2014" / "incomplete.ABC_1.0.0").mkdir(parents=True, exist_ok=True)
    sentence = refusal(open_tfds, prepared, name, "train")
    assert sentence.startswith(f"tfds:{name} is not prepared in {prepared}, or ")
    assert f"run 'tfds build {name} --file_format=array_record' and copy" in sentence


def test_another_data_set_and_another_format(copied, refusal):
    folder = copied / "pets_coco" / "1.0.0"
    for name in ("pets_voc", "pets_coco/large", "pets_coco:2.0.0"):
        assert refusal(open_tfds, folder, name, "train") == (
            f"{folder} holds tfds:pets_coco/1.0.0 and not tfds:{name}; correct data.root or data.name"
        )
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    assert refusal(open_tfds, copied, "pets_coco", "train") == (
        f"{folder} is stored as tfrecord, which only TensorFlow reads; on a machine with TensorFlow run 'tfds build "
        "pets_coco --file_format=array_record' in another folder"
    )


# ----------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize("split", ["val", "train[:", "train[:50]", "", "test[0:0]", "train[5:2]"])
def test_an_unknown_split(prepared, refusal, split):
    sentence = refusal(open_tfds, prepared, "pets_coco", split)
    assert sentence == (
        f"tfds:pets_coco has no split '{split}'; it has train, test, and parts of these such as train[:50%]"
    )


def test_features_without_images_or_labels(prepared, refusal, monkeypatch):
    monkeypatch.setattr("mlmoe_jax.data.sources.tfds.LABEL_FEATURES", ("label", "caption"))
    assert refusal(open_tfds, prepared, "pets_coco", "train") == (
        "tfds:pets_coco has no labels under label, caption among its features image, image/id, objects, panoptic; "
        "write its images and labels as files with a CSV and use data.name=csv"
    )
    monkeypatch.setattr("mlmoe_jax.data.sources.tfds._is_image", lambda feature: False)
    assert "tfds:pets_coco has no image among its features " in refusal(open_tfds, prepared, "pets_coco", "train")


def test_damaged_data_sets(copied, refusal):
    folder = copied / "pets_coco" / "1.0.0"
    shard = next(folder.glob("*-test.array_record-*"))
    whole = shard.read_bytes()
    for content in (whole[: len(whole) // 2], b"", None):
        shard.unlink() if content is None else shard.write_bytes(content)
        sentence = refusal(open_tfds, copied, "pets_coco", "test")
        assert re.match("(cannot read )?tfds:pets_coco split test( is damaged)?: ", sentence)
    (folder / "features.json").write_text("{")
    assert refusal(open_tfds, copied, "pets_coco", "test").startswith(f"tfds:pets_coco in {copied} is damaged: ")


def test_the_extra_is_named(tmp_path, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    monkeypatch.delitem(sys.modules, "mlmoe_jax.data.sources.tfds", raising=False)
    assert 'run pip install -e ".[tfds]"' in refusal(open_tfds, tmp_path, "voc/2007", "train")
