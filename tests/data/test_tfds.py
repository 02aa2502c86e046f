"""Data sets that TensorFlow Datasets has prepared."""

import contextlib
import functools
import io
import json
import pickle
import shutil
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from helpers.drawn_images import encoded
from helpers.refusals import CUT, EMPTY, GONE, Refusal, each
from helpers.tables import listed, opened, widths
from PIL import Image

from mlmoe_jax.data.decoding import BadImage

NAMES = ["cat", "cow", "dog"]
# per image: the present classes, and the difficult ones
IMAGES = {
    "train": [([0, 2], []), ([], []), ([1], [2]), ([], [0]), ([2], []), ([0], [])],
    "test": [([1], []), ([2], [])],
}


ONE, TEXT = tfds.features.ClassLabel(names=NAMES), tfds.features.Text()


def voc_like(row, present, difficult) -> dict:
    """Return {feature: (type, value)} of an image of a data set like VOC."""
    every = (*present, *difficult)
    return {
        "image/filename": (TEXT, f"{row:03d}.jpg"),
        "labels": (tfds.features.Sequence(ONE), every),
        "labels_no_difficult": (tfds.features.Sequence(ONE), present),
        "objects": (
            tfds.features.Sequence({"label": ONE, "is_difficult": np.bool_}),
            [{"label": k, "is_difficult": k in difficult} for k in every],
        ),
    }


def coco_like(row, present, difficult) -> dict:
    return {
        "panoptic": (TEXT, ""),
        "image/id": (np.int64, 7 * row),
        "objects": (
            tfds.features.Sequence({"area": np.int64, "label": ONE}),
            [{"area": 5, "label": k} for k in (*present, *present)],
        ),
    }


def single(row, present, difficult) -> dict:
    label = present[0] if present else -1
    return {"id": (TEXT, "all the same"), "label": (tfds.features.ClassLabel(num_classes=3), label)}


def image_file(width: int) -> io.BytesIO:
    return io.BytesIO(encoded(Image.new("RGB", (width, 8), (9 * width, 0, 0)), "JPEG"))


def prepare(root, name, make, number="1.0.0", config="") -> None:
    """Prepare a data set, whose image k of a split is k + 10 pixels wide."""

    def info(self):
        types = {feature: kind for feature, (kind, _) in make(0, [0], []).items()}
        features = tfds.features.FeaturesDict({"image": tfds.features.Image(), **types})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def generate(self, split):
        for row, labels in enumerate(IMAGES[split]):
            values = {feature: value for feature, (_, value) in make(row, *labels).items()}
            yield row, {"image": image_file(10 + row), **values}

    fields = {
        "__module__": "__main__",  # for which TFDS does not look for a metadata folder
        "VERSION": tfds.core.Version(number),
        "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config)] if config else [],
        "_info": info,
        "_split_generators": lambda self, _: {split: self._generate_examples(split) for split in IMAGES},
        "_generate_examples": generate,
    }
    builder = type(name, (tfds.core.GeneratorBasedBuilder,), fields, skip_registration=True)
    builder(data_dir=root, file_format="array_record").download_and_prepare()


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


# ------------------------------------------------------------------------------------------------------------- labels
# name: images with a positive label and without, sorted; the number in an id is that of the image
SPLITS = {
    "pets_voc/small": (
        ["000.jpg: cat, dog", "002.jpg: cow, ~dog", "004.jpg: dog", "005.jpg: cat"],
        ["001.jpg:", "003.jpg: ~cat"],
    ),
    "pets_coco": (["0: cat, dog", "14: cow", "28: dog", "35: cat"], ["21:", "7:"]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_labels_of_each_kind_of_features(prepared, name):
    positive, empty = SPLITS[name]
    split, kept = (opened(f"tfds:{name}", prepared, "train", keep_empty=keep) for keep in (False, True))
    assert (split.name, split.classes) == ("train", tuple(NAMES))
    assert sorted(listed(split)) == positive
    assert sorted(listed(kept)) == sorted([*positive, *empty])
    numbers = [int(image.split(".")[0]) // (7 if "coco" in name else 1) for image in kept.ids]
    assert widths(kept) == [10 + number for number in numbers]


def test_one_label_per_image(prepared):
    split = opened("tfds:pets_single", prepared, "train", keep_empty=True)
    assert split.classes == ("0", "1", "2")
    assert split.ids == [f"train/{row:08d}" for row in range(6)]  # ids that are not unique are not used
    labels = dict(zip(widths(split), split.labels[:].tolist(), strict=True))
    assert (labels[11], labels[12]) == ([-1, -1, -1], [0, 1, 0])


def test_images_are_as_stored_and_can_be_pickled(prepared):
    images = opened("tfds:pets_voc", prepared, "train", difficult_train="positive").images
    assert images.encoded(0).startswith(b"\xff\xd8")
    again = pickle.loads(pickle.dumps(images))
    assert all(again.read(row).shape == images.read(row).shape for row in range(5))
    assert len(images) == 5, "a difficult label counts"


def test_parts_of_a_split(prepared):
    whole = opened("tfds:pets_coco", prepared, "train", keep_empty=True)
    half = opened("tfds:pets_coco", prepared, "train[:50%]", keep_empty=True)
    assert half.name == "train[:50%]"
    assert half.ids == whole.ids[:3]
    assert len(opened("tfds:pets_coco", prepared, "train+test", keep_empty=True)) == 8


# ----------------------------------------------------------------------------------------------------------- location
def test_names_versions_and_folders(copied, monkeypatch):
    prepare(copied, "PetsCoco", coco_like, "1.10.0")
    prepare(copied, "PetsCoco", coco_like, "1.9.0")
    (copied / "pets_coco" / "1.9.0" / "features.json").write_text("{")
    assert len(opened("tfds:pets_coco", copied, "test")) == 2  # not 1.9.0
    assert len(opened("tfds:pets_coco:1.0.0", copied, "test")) == 2
    assert len(opened("tfds:pets_coco", copied / "pets_coco" / "1.0.0", "test")) == 2
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(copied))
    assert len(opened("tfds:pets_voc/small:1.0.0", "", "test")) == 2


def test_configurations(copied):
    prepare(copied, "PetsVoc", voc_like, config="large")  # becomes the default one
    assert len(opened("tfds:pets_voc", copied, "test")) == 2
    shutil.rmtree(copied / "pets_voc" / ".config")
    assert len(opened("tfds:pets_voc/small", copied, "test")) == 2


# ----------------------------------------------------------------------------------------------------------- refusals
COCO, MODULE = "pets_coco/1.0.0", "mlmoe_jax.data.sources.tfds"


def use(
    name: str, *says: str, split="train", root="", make=lambda at: None, patch=None, row=0, case="", **options
) -> Refusal:
    """An image of a copy of the prepared data sets, in which `make` changes something, and `patch` the program."""

    @contextlib.contextmanager
    def change(at):
        make(at)
        with pytest.MonkeyPatch.context() as patches:
            if patch:
                patch(patches)
            yield at

    def call(at):
        opened(f"tfds:{name}", at / root, split).images.read(row)

    return Refusal(f"{name} {case or split} {says[0]}"[:90], change, call, *says, **options)


def damage(at, file, how) -> None:
    (path,) = (at / COCO).glob(file)
    content = how(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)


def as_tfrecord(at) -> None:
    damage(at, "dataset_info.json", lambda text: json.dumps(json.loads(text) | {"fileFormat": "tfrecord"}).encode())


def without_tfds(patch) -> None:
    patch.setitem(sys.modules, "tensorflow_datasets", None)
    patch.delitem(sys.modules, MODULE, raising=False)


REFUSALS = [
    *(
        use(
            name,
            f"tfds:{name} is not prepared in {{at}}, or ",
            f"run 'tfds build {name} --file_format=array_record' and copy",
            make=lambda at: (at / "coco/2014/incomplete.ABC_1.0.0").mkdir(parents=True),
        )
        for name in ("coco/2014", "pets_voc/none", "pets_coco:2.0.0")
    ),
    use(
        "pets_voc",
        "or has several configurations of which data.name should name one",
        make=lambda at: [prepare(at, "PetsVoc", voc_like, config="large"), shutil.rmtree(at / "pets_voc/.config")],
    ),
    *(
        use(name, f"{{at}}/{COCO} holds tfds:{COCO} and not tfds:{name}; correct data.root or data.name", root=COCO)
        for name in ("pets_voc", "pets_coco/large", "pets_coco:2.0.0")
    ),
    use(
        "pets_coco",
        f"{{at}}/{COCO} is stored as tfrecord, which only TensorFlow reads; on a machine with TensorFlow run 'tfds "
        "build pets_coco --file_format=array_record' in another folder",
        make=as_tfrecord,
    ),
    *(
        use(
            "pets_coco",
            f"tfds:pets_coco has no split '{split}'; it has train, test, and parts of these such as train[:50%]",
            split=split,
        )
        for split in ("val", "train[:", "train[:50]", "", "test[0:0]", "train[5:2]")
    ),
    use(
        "pets_coco",
        "tfds:pets_coco has no labels under label, caption among its features image, image/id, objects, panoptic; "
        "write its images and labels as files with a CSV and use data.name=csv",
        patch=lambda patch: patch.setattr(f"{MODULE}.LABEL_FEATURES", ("label", "caption")),
    ),
    use(
        "pets_coco",
        "tfds:pets_coco has no image among its features ",
        patch=lambda patch: patch.setattr(f"{MODULE}._is_image", lambda feature: False),
    ),
    use("voc/2007", 'run pip install -e ".[tfds]"', patch=without_tfds),
    use(
        "pets_voc",
        "cannot read image 1 of tfds:pets_voc split test as an image: it is empty",
        split="test",
        row=1,
        patch=lambda patch: patch.setattr(f"{MODULE}.TfdsImages.encoded", lambda self, row: b""),
        error=BadImage,
    ),
    *(
        use(
            "pets_coco",
            "tfds:pets_coco split test",
            case=case,
            split="test",
            make=functools.partial(damage, file="*-test.array_record-*", how=how),
        )
        for case, how in (("cut", CUT), ("empty", EMPTY), ("gone", GONE))
    ),
    use(
        "pets_coco",
        "tfds:pets_coco in {at} is damaged: ",
        make=functools.partial(damage, file="features.json", how=lambda _: b"{"),
    ),
]


@each(REFUSALS)
def test_refusals(case, copied):
    case.check(copied)
