"""WebDataset as a data set: the examples of shards, labels in every field, splits, and what is counted or refused."""

import json

import pytest
from helpers.parquet_files import png
from helpers.refusals import Refusal, each
from helpers.tables import data_settings, opened
from helpers.tars import write_tar

from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.sources.own_layout import find_layout
from mlmoe_jax.data.usage import unused_input


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path_factory.mktemp("cache")))


def example(stem, suffix="json", label=None, **further):
    """Return the members of an example with an image."""
    labels = {} if further and label is None else {"labels": label}
    content = json.dumps(labels | further) if suffix.lower() == "json" else label
    return [(f"{stem}.png", png()), (f"{stem}.{suffix}", content)]


def shard(at, *examples, name="train.tar", classes=""):
    if classes:
        (at / "names.txt").write_text(classes)
    return write_tar(at / name, [member for members in examples for member in members]).parent


def of(root, split="train", **keys):
    return opened("webdataset", root, split, **keys)


def labels_of(split):
    """Return the names of the positive labels of each image."""
    return {
        name: [split.classes[k] for k in range(len(split.classes)) if codes[k] == POSITIVE]
        for name, codes in zip(split.ids, split.labels, strict=True)
    }


def sentences(split) -> str:
    return "\n".join(unused_input(split.usage))


@pytest.mark.parametrize(
    ("suffix", "label", "keys"),
    [
        ("json", ["sea", "sand"], {}),
        ("json", {"sea": 1, "sand": 1, "sun": 0}, {}),
        ("json", "sea;sand", {}),
        ("json", [1, 0], {"classes": "names.txt"}),  # in pytorch-image-models, a list of class indices
        ("json", [1, 1, 0], {"classes": "names.txt"}),  # and a multi-hot vector
        ("labels", "sea, sand\n", {}),
        ("JSON", ["sea", "sand"], {}),
        ("txt", "sea\nsand", {"label_column": "txt"}),
        ("meta.txt", "sea,sand", {"label_column": "meta.txt"}),
    ],
)
def test_forms_of_labels(tmp_path, suffix, label, keys):
    root = shard(tmp_path, example("a", suffix, label), classes="sand\nsea\nsun\n")
    split = of(root, **keys)
    assert {name: sorted(found) for name, found in labels_of(split).items()} == {"train.tar#a.png": ["sand", "sea"]}
    assert split.images.encoded(0) == png()


def test_one_class_per_image_as_imagenet_wds(tmp_path):
    """timm/imagenet-1k-wds: jpg, cls and json, of which cls is the label; the card of a shard is beside it."""
    members = [m for k in range(3) for m in [*example(f"n0_{k}", "cls", str(k % 2)), (f"n0_{k}.json", '{"w": 1}')]]
    (write_tar(tmp_path / "imagenet1k-train-0000.tar", members).parent / "_info.json").write_text("{}")
    (tmp_path / "names.txt").write_text("tench\nray\n")
    split = of(tmp_path, classes="names.txt")
    assert [label for (label,) in labels_of(split).values()] == ["tench", "ray", "tench"]
    assert "has its labels in cls" in sentences(split)
    assert "has 1 column that no key of the config names: w" in sentences(split)
    named = shard(tmp_path / "named", example("a", "cls", "tench\n"))
    assert labels_of(of(named)) == {"train.tar#a.png": ["tench"]}


def test_a_key_per_class(tmp_path):
    """pytorch-image-models takes several keys of the JSON object, each with 0 or 1, as the labels."""
    flags = [{"sea": False, "sand": True}, {"sea": True, "sand": None}]
    members = [[(f"{k}.png", png()), (f"{k}.json", json.dumps(row))] for k, row in enumerate(flags)]
    split = of(shard(tmp_path, *members))
    assert split.classes == ("sand", "sea")
    assert split.labels[:].tolist() == [[POSITIVE, NEGATIVE], [UNKNOWN, POSITIVE]]


def test_the_columns_are_those_of_all_examples(tmp_path):
    """The first example may have no label, and a class may be rare."""
    tags = [example(f"{k:03d}", tags=["sea"] if k else []) for k in range(3)]
    assert labels_of(of(shard(tmp_path / "tags", *tags)))["train.tar#002.png"] == ["sea"]
    codes = [example(f"{k:03d}", sea=k % 2 == 0, sand=True, **{"rare": True} if k > 150 else {}) for k in range(153)]
    assert of(shard(tmp_path / "codes", *codes), label_column="").classes == ("rare", "sand", "sea")


def test_members_of_an_example_need_not_be_side_by_side(tmp_path):
    """webdataset/webdataset#140 and #11: tar without --sort=name; the folder is a part of the stem."""
    images = [(f"{folder}/{k}.png", png()) for folder in "xy" for k in range(2)]
    labels = [(f"{folder}/{k}.json", json.dumps({"labels": [f"{folder}{k}"]})) for folder in "xy" for k in range(2)]
    write_tar(tmp_path / "train.tar", [*images, *reversed(labels)])
    assert labels_of(of(tmp_path)) == {f"train.tar#{f}/{k}.png": [f"{f}{k}"] for f in "xy" for k in range(2)}


def test_splits_groups_and_classes(tmp_path):
    """Names and folders of shards tell the split; an earlier shard of a writer may be empty."""
    shard(tmp_path, name="train/000.tar")
    shard(tmp_path, example("a", label=["sea"], patient=7), example("b", label=["sand"]), name="train/001.tar")
    shard(tmp_path, example("a", label=["sea"], patient="7"), name="data/cc-validation-00.tar")
    shard(tmp_path, example("a", label=["sky"]), name="other/000.tar")
    splits = open_splits(
        data_settings("webdataset", tmp_path, group_column="patient", test_splits=()), ["train", "val"]
    )
    assert splits["train"].ids == ["train/001.tar#a.png", "train/001.tar#b.png"]
    assert splits["train"].groups == ["7", ""]
    assert splits["train"].classes == ("sand", "sea")
    assert splits["val"].ids == ["data/cc-validation-00.tar#a.png"]
    assert splits["val"].labels[:].tolist() == [[0, 1]]
    assert "1 file without a split in their names" in sentences(splits["train"])


def test_without_splits_all_shards_are_the_training_split(tmp_path):
    for k in range(3):
        shard(tmp_path, example("a", label=[f"c{k}"]), name=f"{k:05}.tar")
    assert len(of(tmp_path)) == 3
    assert of(tmp_path / "00001.tar").ids == ["00001.tar#a.png"]
    held_out = of(tmp_path, "val", val_fraction=0.3, split_seed=0)
    assert 0 < len(held_out) < 3


def test_every_member_is_counted(tmp_path):
    members = [
        *example("a", label=["sea"]),
        ("b.png", png()),
        *example("c", label=None),
        ("d.json", '{"labels": ["sea"]}'),
        ("a.npy", b"x"),
        ("._a.png", b"x"),
        ("a.txt", "a sentence, with a comma"),
    ]
    write_tar(tmp_path / "00000.tar", members)
    (tmp_path / "00000.parquet").write_bytes(b"of img2dataset, which is no Parquet here")
    (tmp_path / "00000_stats.json").write_text("{}")
    assert find_layout(str(tmp_path)) == {"name": "webdataset"}
    split = of(tmp_path)
    assert split.ids == ["00000.tar#a.png"]
    (usage,) = split.usage
    assert {reason: part.count for reason, part in usage.left_out.items()} == {
        "beside the tar files": 2,
        "in no image format": 1,
        "hidden or of the system": 1,
        "without labels": 2,
        "without an image": 1,
    }
    assert usage.given == 8
    assert "has 1 column that no key of the config names: txt" in sentences(split)


def test_one_field_of_several_images_is_chosen(tmp_path):
    """webdataset/webdataset#20: a left and a right image; huggingface/datasets#7055: a varying number of images."""
    members = [("a.left.png", png(1)), ("a.right.png", png(2)), ("b.left.png", png(3))]
    labels = [(f"{stem}.json", '{"labels": ["sea"]}') for stem in "ab"]
    write_tar(tmp_path / "train.tar", [*members, *labels])
    split = of(tmp_path, image_column="right.png")
    assert split.ids == ["train.tar#a.right.png"]
    assert split.images.encoded(0) == png(2)
    assert "2 not of the field right.png" in sentences(split)
    assert f"1 without an image ({tmp_path}/train.tar#b.left.png)" in sentences(split)


def test_shards_in_a_store(tmp_path):
    """A store has no file to map; ranges of it are read."""
    fsspec = pytest.importorskip("fsspec")
    local = shard(tmp_path, example("a", label=["sea"]), example("b", label=["sand"]))
    store = fsspec.filesystem("memory")
    store.pipe("/shards/train-000.tar", (local / "train.tar").read_bytes())
    try:
        split = of("memory://shards")
        assert split.ids == ["train-000.tar#a.png", "train-000.tar#b.png"]
        assert split.images.name(1) == "memory://shards/train-000.tar#b.png"
        assert split.images.encoded(1) == png()
    finally:
        store.rm("/shards", recursive=True)


def caption(at):
    return shard(at, *(example(k, "txt", "a dog, on a beach") for k in "ab"))


def json_of(at, text):
    return write_tar(at / "train.tar", [("a.png", png()), ("a.json", text)]).parent


REFUSALS = [
    Refusal(name, make, lambda root, keys=keys: of(root, **keys), *says, writes=True)
    for name, make, keys, *says in (
        ("captions are no labels", caption, {}, "has no column of labels (columns: txt)"),
        (
            "images alone",
            lambda at: write_tar(at / "train.tar", [("a.png", png())]).parent,
            {},
            "has no column of labels (columns: )",
        ),
        (
            "rom1504/img2dataset#31: captions and an object without labels",
            lambda at: shard(at, [*example("a", "txt", "a dog"), ("a.json", '{"url": "x", "caption": "a dog"}')]),
            {},
            "train.tar has no column of labels",
            "name it with data.label_column",
        ),
        ("a key that is missing", lambda at: json_of(at, '{"x": 1}'), {"label_column": "tag"}, "has no column 'tag'"),
        ("a JSON text that is cut", lambda at: json_of(at, '{"labels": ["s'), {}, "train.tar#a.json is damaged"),
        ("a JSON text that is no object", lambda at: json_of(at, "[1]"), {}, "train.tar#a.json is damaged: it is no "),
        ("a list of two letters", lambda at: json_of(at, '["an", "bn"]'), {"label_column": "a"}, "is no JSON object"),
        (
            "a text in another encoding",
            lambda at: json_of(at, b'{"labels": ["\xe9"]}'),
            {},
            "train.tar#a.json is damaged",
        ),
        (
            "numbers without names",
            lambda at: shard(at, example("a", "cls", "3")),
            {},
            "train.tar#a.png",
            "data.classes",
        ),
        (
            "a number that is too large",
            lambda at: shard(at, example("a", "cls", "3"), classes="a\nb\n"),
            {"classes": "names.txt"},
            "train.tar#a.png, with the labels 3",
            "from 0 to 1",
        ),
        (
            "several images of an example",
            lambda at: write_tar(at / "train.tar", [("a.1.png", png()), ("a.2.png", png()), ("a.labels", "x")]).parent,
            {},
            "an example with several images, a.1.png and a.2.png",
            "data.image_column",
        ),
        (
            "ray-project/ray#48643, webdataset#286: a repeated name",
            lambda at: write_tar(at / "train.tar", [*example("a", label=["x"]), ("a.png", png(1))]).parent,
            {},
            "train.tar has two members a.png; rename one",
        ),
        (
            "two objects that contradict each other",
            lambda at: shard(at, [*example("a", label=["x"]), ("a.meta.json", '{"labels": ["y"]}')]),
            {},
            "train.tar#a.meta.json has another value of 'labels' than another member; correct one",
        ),
        ("nothing labeled", lambda at: shard(at, example("a")), {}, "has no labeled image (1 image without labels)"),
        ("an empty shard", shard, {}, "has no images of split train"),
        ("no shard", lambda at: at, {}, "has no tar files"),
        (
            "a split without shards",
            lambda at: shard(at, example("a", label=["x"])),
            {"split": "val"},
            "no files of split",
        ),
        (
            "a truncated shard",
            lambda at: cut(shard(at, example("a", label=["x"]))),
            {},
            "truncated from its member a.json",
        ),
    )
]


def cut(root):
    path = root / "train.tar"
    path.write_bytes(path.read_bytes()[:1700])
    return root


@each(REFUSALS)
def test_what_cannot_be_used_is_refused(case, tmp_path):
    case.check(tmp_path)
