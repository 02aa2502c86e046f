import numpy as np
import pytest
from helpers.tables import data_settings
from PIL import Image

from mlmoe_jax.data.sources.nuswide import CONCEPTS
from mlmoe_jax.data.sources.open import open_split

FILES = {
    "Train": ["actor/0001_1.jpg", "actor/0002_2.jpg", "zoo/0003_3.jpg"],
    "Test": ["zoo/0004_4.jpg"],
}
LABELS = {"Train": [["sky", "clouds"], [], ["zebra"]], "Test": [["airport"]]}


def open_nuswide(root, split, **keys):
    return open_split(data_settings("nuswide", root, **keys), split)


def row_of(names) -> list[int]:
    return [int(name in names) for name in CONCEPTS]


def write_merged(folder, split) -> None:
    # as published: every field is followed by a blank
    lines = ["".join(f"{mark} " for mark in row_of(names)) for names in LABELS[split]]
    (folder / "Groundtruth" / f"Labels_{split}.txt").write_text("\n".join(lines) + "\n")


def write_one_each(folder, split) -> None:
    place = folder / "Groundtruth" / "TrainTestLabels"
    place.mkdir(exist_ok=True)
    for k, name in enumerate(CONCEPTS):
        marks = [f"{row_of(names)[k]}\n" for names in LABELS[split]]
        (place / f"Labels_{name}_{split}.txt").write_text("".join(marks))


@pytest.fixture(params=[write_merged, write_one_each])
def nuswide(tmp_path, request):
    folder = tmp_path / "nus"
    for name in ("ImageList", "Groundtruth", "Flickr/actor", "Flickr/zoo"):
        (folder / name).mkdir(parents=True)
    for split, files in FILES.items():
        lines = [file.replace("/", "\\") for file in files]
        (folder / "ImageList" / f"{split}Imagelist.txt").write_text("\r\n".join(lines) + "\r\n")
        request.param(folder, split)
        for number, file in enumerate(files):
            Image.new("RGB", (8 + number, 8)).save(folder / "Flickr" / file)
    return folder


def test_labels_order_and_images(nuswide):
    assert len(CONCEPTS) == 81
    assert list(CONCEPTS) == sorted(CONCEPTS)
    split = open_nuswide(nuswide, "train")
    assert split.name == "train"
    assert split.classes == CONCEPTS
    assert split.ids == ["Flickr/actor/0001_1.jpg", "Flickr/zoo/0003_3.jpg"]
    assert split.labels.dtype == np.int8
    assert [[CONCEPTS[k] for k in np.flatnonzero(row)] for row in split.labels] == [["clouds", "sky"], ["zebra"]]
    assert [image.shape[1] for image in split.images] == [8, 10]
    assert open_nuswide(str(nuswide), "test").labels[0, 0] == 1


def test_images_without_labels_are_dropped_unless_kept(nuswide):
    kept = open_nuswide(nuswide, "train", keep_empty=True)
    assert [file.removeprefix("Flickr/") for file in kept.ids] == FILES["Train"]
    assert not kept.labels[1].any()


def test_the_merged_file_takes_precedence(nuswide):
    write_one_each(nuswide, "Train")
    write_merged(nuswide, "Train")
    (nuswide / "Groundtruth" / "TrainTestLabels" / "Labels_sky_Train.txt").write_text("0\n0\n0\n")
    assert open_nuswide(nuswide, "train").labels[0, CONCEPTS.index("sky")] == 1


def path_of_labels(nuswide):
    merged = nuswide / "Groundtruth" / "Labels_Train.txt"
    return merged if merged.is_file() else nuswide / "Groundtruth" / "TrainTestLabels" / "Labels_sky_Train.txt"


@pytest.mark.parametrize("wrong", ["", "0 0 2", "sky", "10"])
def test_malformed_labels_are_named(nuswide, refusal, wrong):
    path = path_of_labels(nuswide)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], wrong]))
    sentence = refusal(open_nuswide, nuswide, "train")
    labels = path if path.name == "Labels_Train.txt" else path.parent
    assert f"{labels} for the images of {nuswide}/ImageList/TrainImagelist.txt is damaged: " in sentence


def test_missing_label_files(nuswide, refusal):
    path_of_labels(nuswide).unlink()
    assert f"cannot read {nuswide}/Groundtruth/TrainTestLabels/Labels_" in refusal(open_nuswide, nuswide, "train")
