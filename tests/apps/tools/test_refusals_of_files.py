"""Lists of images, outputs, and packed data sets that the tools refuse."""

import contextlib
import io
import itertools
import json
import os
from types import SimpleNamespace

import pytest
from etils.epath import testing as epath_testing
from helpers.packing import config_of, write_packed, write_voc
from helpers.refusals import CUT, EMPTY, GONE, Refusal, damaged, each
from helpers.tables import SPREADSHEET, lines, settings, write

from mlmoe_jax.apps.tools import path_list
from mlmoe_jax.apps.tools.feature_files import require_no_classes
from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.apps.tools.label_files import write_labels
from mlmoe_jax.apps.tools.pack import pack
from mlmoe_jax.apps.tools.predict_files import choose_target
from mlmoe_jax.apps.tools.result_rows import ResultRows
from mlmoe_jax.apps.tools.shards import ShardWriter, write_shards
from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.data.sources.named_files import require_no_table
from mlmoe_jax.data.sources.packed import open_packed, verify
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.inputs import MixedImages
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.storage import Folder, OutputTarget


# --------------------------------------------------------------------------------------------------- images to label
@contextlib.contextmanager
def among_photos(at, stdin):
    """Be in a folder with photographs and lists, which may have 60 bytes."""
    (at / "photos/folder.jpg").mkdir(parents=True)
    (at / "photos/b.jpg").write_bytes(b"-")
    (at / "photos/circle").symlink_to(at)
    (at / "empty.txt").write_text("\n \n")
    (at / "utf16.txt").write_text("photos/b.jpg\n", encoding="utf-16")
    (at / "list.xlsx").write_bytes(SPREADSHEET)
    (at / "long.txt").write_text("1" * 61)
    os.mkfifo(at / "pipe")
    with contextlib.chdir(at), pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_list, "MOST_LIST", 60)
        patch.setattr(path_list, "LONGEST_LINE", 60)
        patch.setattr(path_list.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        yield


def of_images(item, *says, stdin=b"\n"):
    """An item of --images after one that names an image."""
    name = f"images {item[:20]!r} {len(stdin)}"
    return Refusal(name, lambda at: among_photos(at, stdin), lambda at: find_images(["photos/b.jpg", item]), *says)


OF_IMAGES = [
    of_images("photos/missing.jpg", "--images=photos/missing.jpg contains no images; give image files, folders with"),
    of_images("photos/*.gif", "--images=photos/*.gif contains no images"),
    of_images("photos/folder.jpg", "--images=photos/folder.jpg contains no images"),
    of_images("photos/f*", "1 for being a folder (photos/folder.jpg)"),
    of_images("@missing.txt", "cannot read the list @missing.txt: No such file"),
    of_images("@photos", "cannot read the list @photos: Is a directory"),
    of_images("@utf16.txt", "the list @utf16.txt is not UTF-8; save it as UTF-8, in Excel as CSV UTF-8"),
    of_images("@list.xlsx", "the list @list.xlsx is a spreadsheet or another archive, not text; save its table as CSV"),
    of_images("@empty.txt", "--images=@empty.txt contains no images"),
    of_images("@long.txt", "cannot read the list @long.txt: a line has more than 60 bytes"),
    of_images("-", "--images=- contains no images"),
    of_images("-", "it has more than 60 bytes", stdin=b"1" * 61),
    of_images("", "--images= contains no images"),
    of_images("~nosuchuser/x", "contains no images"),
    of_images("x" * 5000, "contains no images"),
    of_images("a\0b", "contains no images"),
    of_images("@/dev/zero", "cannot read the list @/dev/zero: "),
    of_images("@pipe", "cannot read the list @pipe: it is not a regular file"),
    of_images("@a\0b", "cannot read the list @a"),
    of_images("@nosuchstore://x", "cannot read the list @nosuchstore://x"),
    Refusal(
        "a pipe among images",
        lambda at: os.mkfifo(at / "pipe.jpg"),
        lambda at: MixedImages([str(at / "pipe.jpg")]).read(0),
        "it is not a regular file",
        error=BadImage,
    ),
]


# -------------------------------------------------------------------------------------------------------------- outputs
def of_output(output, says, **options):
    """An --output of predictions."""

    def choose(at):
        path = output if output in (None, "-") else str(at / output)
        return choose_target(path, RunFolder(at / "run"), **options)

    return Refusal(f"predictions in {output} {options}", lambda at: (at / "folder.csv").mkdir(), choose, says)


def write_rows(kind):
    """Write rows of a label `error`, which only a CSV cannot hold."""
    return lambda at: ResultRows(("red", "error")).write(OutputTarget(None, kind), ())


def of_labels(name, form, output, *says):
    """The labels of a VOC folder in a format of a labeling tool."""

    def make(at):
        write_voc(at)
        (at / "VOCval").touch()

    return Refusal(
        name,
        make,
        lambda at: write_labels(config_of(at, val_split="val"), form, output.replace("{at}", str(at))),
        *says,
    )


def of_names(name, form, images, says, label="x"):
    """Names of images and a label that a format cannot hold."""

    def call(at):
        config = config_of(at, "jsonl", table="all.jsonl", val_split="", bad_images="skip")
        write_labels(config, form, str(at / f"out{FORMATS[form].suffix}"))

    rows = lines(*({"image": image, "labels": [label]} for image in images))
    return Refusal(name, lambda at: write(at, "all.jsonl", rows, ()), call, says)


ROWS_OF_FILES = "should be a .csv or .jsonl file in a folder that exists, or - for standard output"
SYNTHETIC = {"name": "synthetic", "labels": 16, "train_split": "val", "val_split": ""}
EXPORT = {"name": "label_studio", "table": "tasks.json", "val_split": ""}
TASKS = """[{"data": {"image": "a.png"}, "annotations": [{"result": [
    {"type": "choices", "from_name": "labels", "value": {"choices": ["sea"]}}]}]}]"""
OF_OUTPUTS = [
    of_output("p.txt", f"--output={{at}}/p.txt {ROWS_OF_FILES}"),
    of_output("none/p.csv", f"--output={{at}}/none/p.csv {ROWS_OF_FILES}"),
    of_output("folder.csv", f"--output={{at}}/folder.csv {ROWS_OF_FILES}"),
    of_output("p.csv", "--gates needs JSON lines", gates=True),
    of_output(None, "--format=cvat needs --output=FILE.xml", form="cvat"),
    of_output("a.json", "should end in .xml for --format=cvat", form="cvat"),
    Refusal(
        "a label with the name of a column",
        write_rows("jsonl"),
        write_rows("csv"),
        "another column of the CSV (image, labels, error, red, error)",
    ),
    of_labels("two splits in one file", "cvat", "{at}/a.xml", "there are the splits train and val; write {split} in -"),
    *(
        Refusal(
            f"the table of split {split}",
            lambda at, split=split: write(at, f"{split}.csv", "image,labels\na.png,x\n", ()),
            lambda at, split=split: require_no_table(at / f"{split}.csv", settings(at)),
            f"{split}.csv would replace the table of the data set",
        )
        for split in ("train", "val", "test")
    ),
    Refusal(
        "classes of a labeling tool in place of those of features",
        lambda at: (at / "classes.txt").write_text("dog\ncat\n") and Folder(at),
        lambda folder: require_no_classes(folder, ("dog", "cat")) or require_no_classes(folder, ("cat", "dog")),
        "has a classes.txt of other classes, which would be replaced",
    ),
    Refusal(
        "an export in place of the table",
        lambda at: write(at, "tasks.json", TASKS, ["a.png"]),
        lambda at: write_labels(config_of(at, **EXPORT), "label_studio", f"{at}/tasks.json"),
        "tasks.json would replace the table of the data set",
    ),
    of_labels("no folder", "cvat", "{at}/no/{split}.xml", "cannot write {at}/no/train.xml"),
    of_labels("a file as folder", "sidecar", "{at}/VOC{split}", "VOCval is a file"),
    of_names("one stem", "sidecar", ("a.png", "a.jpg"), "would name a.png and a.jpg alike"),
    of_names("one stem in a folder", "fiftyone", ("a.png", "./a.jpg"), "would name a.png and a.jpg alike"),
    of_names("a comma", "wd_tagger", ("a.png",), "cannot hold the label 'x,y'", label="x,y"),
    of_names("a control character", "cvat", ("a\x01.png",), "XML cannot name the image 'a\\x01.png'"),
    Refusal(
        "images in memory",
        None,
        lambda at: write_labels(config_of(**SYNTHETIC), "cvat", str(at / "a.xml")),
        "the images of synthetic are not files",
    ),
]


# -------------------------------------------------------------------------------------------------------------- packing
def of_packing(case, make, *says, output="out", **keys):
    """A VOC folder that is packed with these keys after `make`."""

    def make_both(at):
        write_voc(at / "voc")
        make(at)

    return Refusal(case, make_both, lambda at: pack(config_of(at / "voc", **keys), at / output), *says)


def write_out(at):
    pack(config_of(at / "voc"), at / "out")


def rename(at):
    """Pack the images, and then rename all."""
    write_out(at)
    folder = at / "voc/VOC2012"
    for image in (folder / "JPEGImages").iterdir():
        image.rename(image.with_name(f"x{image.name}"))
    for labels in (folder / "ImageSets/Main").iterdir():
        labels.write_text("\n".join(f"x{line}" for line in labels.read_text().splitlines()))


def write_photo(at):
    (at / "out").mkdir()
    (at / "out" / "holiday.jpg").write_bytes(b"mine")


class Exits(ShardWriter):
    """A writer whose process ends."""

    def __call__(self, number):
        os._exit(1)


OF_PACKING = [
    of_packing("another size", write_out, "with pack.short_side=0 instead of 9; set another --output", short_side=9),
    of_packing(
        "other decoding",
        write_out,
        "data.truncated=refuse instead of read, data.exif=apply in",
        exif="ignore",
        truncated="read",
    ),
    of_packing("another data set", write_out, "with data.name=voc2012 instead of synthetic", **SYNTHETIC),
    of_packing("other images", rename, "packed with other images, such as JPEGImages/t0.jpg"),
    of_packing("a folder of the user", write_photo, "contains other files, such as holiday.jpg"),
    of_packing("a file of the user", write_photo, "cannot make", output="out/holiday.jpg"),
    Refusal(
        "a worker that ends",
        None,
        lambda at: [*write_shards(Exits(""), [1, 1], 2)],
        "a packing process was killed, perhaps because memory ran out; lower --config.data.workers and repeat",
    ),
]


@each([*OF_IMAGES, *OF_OUTPUTS, *OF_PACKING])
def test_refusals_of_files(case, tmp_path):
    case.check(tmp_path)


# --------------------------------------------------------------------------------------------------------------- damage
def flipped(content):
    """Flip a bit of the second JPEG image of a shard."""
    at = content.index(b"\xff\xd8", content.index(b"\xff\xd8") + 2) + 300
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def open_train(at):
    assert len(open_packed(at, "val")) == 2
    return open_packed(at, "train")


def read(row):
    """Read an image of a damaged shard, after one of another shard."""

    def read_both(at):
        images = open_train(at).images
        assert images.read(6).ndim == 3
        images.read(row)

    return read_both


def verify_all(at):
    """Raise the only sentence of `verify` as an error."""
    (sentence,) = filter(None, verify(at))
    raise UserError(sentence)


def with_entry(key, value, part=2):
    """Change the entry of the labels (part 0) or of a shard in the manifest."""

    def alter(content):
        manifest = json.loads(content)
        train = manifest["splits"]["train"]
        [train["labels"], *train["shards"]][part][key] = value
        return json.dumps(manifest).encode()

    return alter


def of_packed(name, file, how, call, *says, **options):
    return damaged(name, write_packed, file, how, call, *says, **options)


def not_installed(*_, **__):
    raise ImportError("Please install gcsfs to access Google Storage")


SHARD = "train-00001-*.arrayrecord"
CHANGED = " has changed since it was packed (its sha256 differs); copy it again, or delete it and repeat"
HOSTILE = [
    *(("file", name) for name in ("../../../escaped.txt", "/etc/passwd", "..", "a\0b", None)),
    *(("sha256", digest) for digest in ("0" * 63, "../" * 21 + "a", "0" * 64 + "\n", None)),
    ("bytes", "9"),
]
DAMAGE = [
    Refusal("no manifest", None, open_train, "cannot read {at}/manifest.json: "),
    Refusal("another split", write_packed, lambda at: open_packed(at, "nope"), "no split 'nope'; it has train, val"),
    Refusal(
        "no package for an object store",
        lambda at: epath_testing.mock_epath(stat=not_installed),
        lambda at: open_packed("gs://bucket/packed", "train"),
        "cannot read gs://bucket/packed/manifest.json: Please install gcsfs to access Google Storage",
    ),
    *(
        of_packed(f"manifest {number}", "manifest.json", how, open_train, "manifest.json is damaged")
        for number, how in enumerate([EMPTY, CUT, "[]", '{"source": "csv"}'])
    ),
    *(
        of_packed(f"{key} {value!r}", "manifest.json", with_entry(key, value), call, "manifest.json is damaged: ")
        for (key, value), call in zip(HOSTILE, itertools.cycle([open_train, verify_all]))
    ),
    of_packed("file of labels", "manifest.json", with_entry("file", "..", 0), open_train, "manifest.json is damaged: "),
    of_packed("labels", "train.npz", CUT, open_train, "train.npz has changed since it was packed"),
    of_packed("a shard, verified", SHARD, flipped, verify_all, CHANGED),
    of_packed(
        "an image",
        SHARD,
        flipped,
        read(4),
        "cannot read JPEGImages/t4.jpg in {at}/train-00001-",
        ".arrayrecord as an image: the shard is damaged",
        error=BadImage,
    ),
    of_packed("a missing shard, verified", SHARD, GONE, verify_all, ".arrayrecord is missing; copy it again"),
    of_packed(
        "a missing shard", SHARD, GONE, read(3), ".arrayrecord is missing or damaged: it has 0 images instead of 3"
    ),
    of_packed("a cut shard", SHARD, CUT, read(3), "{at}/train-00001-"),
]


@each(DAMAGE)
def test_damage_of_packed_data(case, tmp_path):
    case.check(tmp_path)
