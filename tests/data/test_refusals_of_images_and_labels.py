"""Images, trees of labels, files about labels, features and splits that are refused."""

import contextlib
import errno
import functools
import json
import os
import struct
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.drawn_images import encoded
from helpers.refusals import CUT, Refusal, damaged, each
from helpers.tables import data_settings, split_of, write

from mlmoe_jax.config import default_config
from mlmoe_jax.data.decoding import BadImage, Decoding, read_image
from mlmoe_jax.data.features import FeatureTable
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.label_tree import LabelTree, read_tree
from mlmoe_jax.data.labels.graph import read_glove
from mlmoe_jax.data.labels.grouping import group_labels
from mlmoe_jax.data.labels.hidden import hide_positives
from mlmoe_jax.data.labels.space import compute_label_space
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.split import Split


# -------------------------------------------------------------------------------------------------------------- images
def in_file(data: bytes, says: str, name="x.jpg") -> Refusal:
    make, call = lambda at: write_bytes(at / name, data), lambda at: read_image(at / name)
    return Refusal(f"{name} {says}", make, call, f"cannot read {{at}}/{name} as an image: {says}", error=BadImage)


def write_bytes(path, data: bytes) -> None:
    path.write_bytes(data)


def in_bytes(case: str, data: bytes, *says: str, **decoding) -> Refusal:
    return Refusal(case, None, lambda _: read_image(data, decoding=Decoding(**decoding)), *says, error=BadImage)


def at_once(says: str, make, case: str = "") -> Refusal:
    """Bytes whose decoding would take minutes."""

    @contextlib.contextmanager
    def in_seconds(_):
        data, started = make(), time.thread_time()
        yield data
        assert time.thread_time() - started < 3

    return Refusal(case or says, in_seconds, read_image, says, error=BadImage)


def no_file(case: str, path: str, make=None, says="") -> Refusal:
    """A path with nothing to read, or with something that has no end."""
    says = f"cannot read {path} as an image: {says}"
    return Refusal(case, make, lambda at: read_image(path.format(at=at)), says, error=BadImage)


def repeat_scan(data: bytes, times: int) -> bytes:
    """Return a JPEG whose last scan is there `times` more often."""
    return data[:-2] + data[data.rfind(b"\xff\xda") : -2] * times + data[-2:]


def progressive(side: int) -> bytes:
    return encoded(np.zeros((side, side), np.uint8), "JPEG", quality=1, progressive=True)


def tiff_of_jpeg(side: int, jpeg: bytes) -> bytes:
    """Return a TIFF whose only tile is a JPEG of `side` pixels."""
    at = 8 + len(jpeg) + len(jpeg) % 2
    sizes = [(256, side), (257, side), (258, 8), (259, 7), (262, 1), (277, 1), (322, side), (323, side), (324, 8)]
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in [*sizes, (325, len(jpeg))])
    return struct.pack("<2sHI", b"II", 42, at) + jpeg.ljust(at - 8, b"\0") + struct.pack("<H", 10) + tags + bytes(4)


def tiff_of_strips(side: int, count: int, tile: int) -> bytes:
    """Return a gray TIFF with `count` strips of a row, or tiles with a side of `tile`, which all are the same bytes."""
    pixels = bytes(100_000)
    parts = [(322, tile), (323, tile), (324, None), (325, None)] if tile else [(273, None), (278, 1), (279, None)]
    tags = [(256, side), (257, side), (258, 8), (259, 1), (262, 1), (277, 1), *parts]
    at = 10 + 12 * len(tags) + 4
    entries = b""
    for tag, value in tags:
        place = at + len(pixels) + (4 * count if tag in (325, 279) else 0)
        value, number = (value, 1) if value is not None else (place, count)
        if number == 1 and value == place:
            value = at if tag in (324, 273) else len(pixels)
        entries += struct.pack("<HHII", tag, 4, number, value)
    arrays = struct.pack(f"<{count}I", *[at] * count) + struct.pack(f"<{count}I", *[len(pixels)] * count)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + pixels + arrays


def with_parts(kind: str, at: int, parts: bytes) -> bytes:
    """Return an image with more bytes after `at` bytes."""
    data = encoded(np.zeros((8, 8), np.uint8), kind)
    return data[:at] + parts + data[at:]


def segment(content: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


PROFILE = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**20 - 1)))
EMPTY = chunk(b"teSt", b"")
REPEATED = "its strips or tiles repeat the same bytes, which would take long to decode; store it again"
PARTS = "its metadata have too many parts, which would take long to read; store it without"


def empty_png(side: int) -> bytes:
    """Return a PNG with transparency of which only the header is there. The whole file would have 559 kB."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13)
    return start + header + struct.pack(">I", zlib.crc32(header)) + b"\0\0\0\0IDAT"


RANDOM = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
CUT_SHORT = "as an image: it is damaged or cut short ("
TOO_MANY = "it has more than 125,000,000 pixels; store it smaller"
IMAGES = [
    in_file(b"", "it is empty"),
    in_file(b"not an image at all", "its content is none of JPEG, PNG, WEBP"),
    in_file(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "its content is none of", name="vector.jpg"),
    in_file(
        b"\0\0\0\x24ftypheic\0\0\0\0mif1heic",
        "it is HEIC, the format of phones; install pillow-heif (the extra heif), or convert it to JPEG",
    ),
    *(
        in_file(encoded(array, "TIFF"), f"its pixels are {array.dtype} without a known white; store it")
        for array in (np.ones((2, 2), np.float32), np.full((2, 2), 70_000, np.int32))
    ),
    in_bytes("bytes", b"123", "cannot read 3 bytes as an image: its content is none"),
    no_file("no file", "{at}/none.jpg", says="No such file or directory"),
    no_file("pipe", "{at}/x.jpg", lambda at: os.mkfifo(at / "x.jpg")),
    *(
        in_bytes(f"half {kind}", CUT(encoded(RANDOM, kind)), CUT_SHORT)
        for kind in ("JPEG", "PNG", "GIF", "TIFF", "BMP", "PPM", "WEBP", "JPEG2000")
    ),
    in_bytes("no pixels, read leniently", encoded(RANDOM, "JPEG")[:20], "as an image: ", truncated="read"),
    in_bytes("half PNG, read leniently", encoded(RANDOM)[:900], CUT_SHORT, truncated="read"),
    in_bytes("nothing, read leniently", b"", "it is empty", truncated="read"),
    *(
        in_bytes(
            f"{bits} bits",
            encoded(np.array([[2**bits]], np.uint16)),
            f"its brightest value, {2**bits:,}, needs more than the {bits} bits of data.gray_bits",
            gray_bits=bits,
        )
        for bits in (8, 10, 12)
    ),
    # above our limit, above the limit of Pillow itself, and with the memory that transparency needs
    *(in_bytes(f"PPM of {side}", f"P6 {side} {side} 255\n".encode(), TOO_MANY) for side in (12_500, 20_000)),
    in_bytes("large transparent PNG", empty_png(12_000), TOO_MANY),
    at_once("more than 20 scans", lambda: repeat_scan(progressive(7000), 2000)),
    at_once("more than 250 scans", lambda: repeat_scan(progressive(2000), 600)),
    at_once("more than 500 scans", lambda: repeat_scan(progressive(8), 600)),
    at_once("it is damaged", lambda: tiff_of_jpeg(2000, repeat_scan(progressive(2000), 80))),
    at_once(PARTS, lambda: with_parts("JPEG", 2, segment(b"Exif\0\0") * 200_000), "small segments"),
    at_once(PARTS, lambda: with_parts("JPEG", 2, segment(b"Exif\0\0" + bytes(65_000)) * 1_000), "large segments"),
    at_once(PARTS, lambda: with_parts("GIF", 13, b"!\xfe" + (b"\xff" + bytes(255)) * 20_000 + b"\0"), "comments"),
    *(at_once(PARTS, lambda at=at: with_parts("PNG", at, PROFILE * 700), f"profiles {at}") for at in (33, -12)),
    *(at_once(PARTS, lambda at=at: with_parts("PNG", at, EMPTY * 400_000), f"chunks {at}") for at in (33, -12)),
    *(at_once(REPEATED, lambda tile=tile: tiff_of_strips(1000, 900, tile), f"tiles {tile}") for tile in (0, 16)),
    at_once("it has more than 125,000,000 pixels", lambda: tiff_of_strips(16, 1, 26_000)),
    at_once("more than 100 comments", lambda: b"P3 8 8 255\n" + b"#\n" * 500_000 + b"0 " * 192),
]

# -------------------------------------------------------------------------------------------------------------- trees
NAMES = ("animal", "cat", "day", "dog", "night", "no", "poodle")


def of_file(file: str, call, *rows) -> list[Refusal]:
    """Texts of a file, called with its path, and what is said beside the path."""
    return [
        Refusal(
            f"{file} {text}"[:80],
            functools.partial(put, file, text),
            lambda at: call(at / file),
            f"{{at}}/{file}",
            *says,
        )
        for text, *says in rows
    ]


def put(file: str, text: str, at) -> None:
    (at / file).write_text(text)


# A mapping that would have 10^40 characters as text.
REPEATED = "".join(f"- &{k + 1} {{{', '.join(f'{j}: *{k}' for j in range(10))}}}\n" for k in range(40))
TREES = of_file(
    "tree.yaml",
    lambda path: read_tree(path, NAMES),
    ("implies: {dgo: animal}", "names 'dgo', which is not one of the 7 labels; correct it, or add it"),
    ("implies:\n  dog: plant", "names 'plant', which is not one of the 7 labels; correct it, or add it"),
    (
        "implies: {dog: animal, animal: cat, cat: dog}",
        "dog implies animal implies cat implies dog, which is a cycle",
    ),
    ("implies: {dog: dog}", "dog implies dog, which is a cycle"),
    ("implies: {dog: animal}\nexclusive: [[animal, dog]]", "animal and dog are exclusive, but dog implies animal"),
    ("implies: {dog: [day, night]}\nexclusive: [[day, night]]", "but dog implies day and night"),
    ("exclusive: [[day, day]]", "day, day are not two or more different labels"),
    ("exclusive: [day, night]", "the exclusive labels day are not two or more different labels"),
    ("exclusive: [[day, [night]]]", "is damaged"),
    ("implies:\n  dog: animal\n  cat: animal\n  dog: no", "line 4 gives 'dog' again; give it once, with a list"),
    ("exclusive: [[day, night]]\nexclusive: [[cat, dog]]", "line 2 gives 'exclusive' again"),
    ("implies: {poodle: {dog: animal}}", "is damaged: a value is no label or list of labels; write such as"),
    ("exclusive: [{day: cat, night: dog}]", "is no label or list of labels"),
    (f"exclusive:\n- &0 {{x: y}}\n{REPEATED}", "is no label or list of labels"),
    ("implies: {dog: }", "names '', which is not one of the 7 labels"),
    ("exclude: [[day, night]]", "has exclude, which is neither implies nor exclusive; write such as"),
    ("implies: [dog, animal]", "tree.yaml has another form; write such as"),
    ("exclusive: " + "[" * 100_000, "is damaged"),
    ("exclusive:\n- &a [" + "dog, " * 1000 + "]\n" + "- *a\n" * 1000, "names more than 1,000,000 labels"),
    ("- dog", "has dog, which is neither implies nor exclusive; write such as"),
    ("", "tree.yaml has no labels"),
    ("exclusive: []", "tree.yaml has no labels"),
    ("implies: {dog: animal", "is damaged"),
    ("\0", "is not UTF-8"),
    ("implies: " + "[" * 1100, "is damaged"),
    ("#" * 2**22 + "\n", "tree.yaml: it has more than 4,194,304 bytes"),
)
STORED = {"implies": [[6, 3], [3, 0]], "exclusive": [], "attributes": []}  # a poodle is a dog, which is an animal


def of_stored(says: str, error: type[Exception] = ValueError, **changed) -> Refusal:
    """A tree in JSON, as a run keeps it."""
    text = json.dumps(STORED | changed)
    return Refusal(f"{changed}", None, lambda _: LabelTree.load(text, NAMES), says, error=error)


TREES += [
    of_stored("other labels than its 7 names", implies=[[11, 8], [8, 5]]),
    *(of_stored("other labels than its 7 names", exclusive=[[0, label]]) for label in (-1, 1.0, "1", None)),
    of_stored("but poodle implies dog", exclusive=[[3, 6]]),
    of_stored("not enough values to unpack", implies=[[1]]),
    of_stored("'optional'", KeyError, attributes=[{"name": "color", "labels": [0, 1]}]),
]

# ------------------------------------------------------------------------------------------------------------- labels
PIXELS = np.zeros((3, 4, 4, 3), np.uint8)
SPLIT = split_of("012", [1] * 4)


def of_groups(text: str, *says: str, groups="{at}/groups.json", data="digits", count=2) -> Refusal:
    """A file of groups of labels, or published ones."""

    def call(at):
        prompts = SimpleNamespace(groups=groups.format(at=at), num_groups=count)
        model = SimpleNamespace(prompts=prompts, head=SimpleNamespace(kind="linear"))
        compute_label_space(SPLIT, data, model, seed=0, grouped=True)

    return Refusal(f"{text} {says[0]}", lambda at: write(at, "groups.json", text, ()), call, *says)


def of_count(count: int) -> Refusal:
    """Five labels in this many groups."""
    group = lambda _: group_labels(np.ones((5, 5)), np.ones(5), num_groups=count, tau=2, side="co", seed=0)  # noqa: E731
    return Refusal(f"{count}", None, group, f"into {count} groups; set model.prompts.num_groups to 1 … 5")


LABELS = [
    of_groups("", "no 2 label groups of digits are published; set model.prompts.groups=computed", groups="published"),
    of_groups("", "no 99 label groups of voc2007 are published", groups="published", data="voc2007", count=99),
    of_groups(
        "", "model.prompts.groups is 'none', which is neither computed, nor published, nor a file", groups="none"
    ),
    *(
        of_groups(text, "{at}/groups.json is damaged: ")
        for text in ("{", "[0, 1]", '{"co": [0, 1, 1, 0]}', '{"co": 1, "dc": 2}', '{"co": ["x"], "dc": []}')
    ),
    of_groups(
        '{"co": [0, 1, 1], "dc": [0, 1, 1, 0]}',
        "the co groups from {at}/groups.json are 3 numbers from 0 to 1, but the data has 4 labels and model.prompts.",
    ),
    of_groups(
        '{"co": [0, 1, 1, 0], "dc": [0, 1, 2, 0]}', "the dc groups from {at}/groups.json are 4 numbers from 0 to 2"
    ),
    of_groups('{"co": [0, -1, 1, 0], "dc": [0, 1, 1, 0]}', "4 numbers from -1 to 1"),
    of_groups('{"co": [], "dc": [0, 1, 1, 0]}', "0 numbers from 0 to 0"),
    *map(of_count, (-1, 0, 6)),
    *of_file(
        "list.txt",
        lambda path: hide_positives(SPLIT, data_settings("csv", known_positives=str(path))),
        ("1,0\n0,1\n", "no line for 1 of the 3 images of split train, the first is 2"),
        ("0,4\n1,0\n2,0\n", "list.txt"),
        ("0,x\n1,0\n2,0\n", "list.txt"),
    ),
    Refusal(
        "no list",
        None,
        lambda at: hide_positives(SPLIT, data_settings("csv", known_positives=f"{at}/no.txt")),
        "/no.txt",
    ),
    *of_file(
        "words.txt",
        lambda path: read_glove(path, ["zebra", "gnu"]),
        *((text, "has no word of the labels zebra, gnu; ") for text in ("", "zebra\n", "PK\x03\x04 \0\0\n")),
        ("zebra 1 2\n", "has no word of the labels gnu; "),
        ("zebra 1 two 3\n", "is damaged: "),
        ("the 1 2\nzebra 1 nan\n", "is damaged: it has a number that is not finite"),
    ),
]


# ------------------------------------------------------------------------------------------------- features and splits
def make_features(at, stored="float32") -> FeatureTable:
    table = FeatureTable(at / "table", 3, {"cls": ((3,), "float32")}, stored)
    table.write(0, {"cls": np.ones((3, 3), np.float32)}, np.ones(3, bool))
    return table


@contextlib.contextmanager
def without_descriptors(at):
    def full(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.MonkeyPatch.context() as patch:
        table = make_features(at)
        patch.setattr(np, "load", full)
        yield table


def of_split(case: str, says: str, **changes) -> Refusal:
    """A split of which one field has another size."""
    fields = {
        "classes": tuple("abc"),
        "labels": np.zeros((3, 3), np.int8),
        "ids": [*"xyz"],
        "images": ArrayImages(PIXELS),
    }
    return Refusal(case, None, lambda _: Split("s", **fields | changes), says, error=ValueError)


def load(processes: int) -> dict:
    augment = default_config().augment
    return next(build_loader(data_settings("made"), SPLIT, batch_size=8, augment=augment, process=(0, processes)))


OTHERS = [
    damaged(
        "cut features",
        make_features,
        "table/00000.cls.npy",
        lambda content: content[:-20],
        lambda table: table[0],
        "{at}/table/00000.cls.npy of the cache, which may be deleted, is damaged: ",
    ),
    Refusal(
        "no descriptor for features",
        without_descriptors,
        lambda table: table[0],
        "cannot read {at}/table/00000.read.npy",
        ": Too many open files",
    ),
    Refusal(
        "features beyond float16",
        lambda at: make_features(at, "float16"),
        lambda table: table.write(0, {"cls": np.full((3, 3), 1e5, np.float32)}, np.ones(3, bool)),
        "not finite in float16",
    ),
    of_split(
        "images",
        "split s: [3, 2] ids, images and groups, 3 classes and labels of shape (3, 3) do not fit together",
        images=ArrayImages(PIXELS[:2]),
    ),
    of_split("labels", "do not fit together", labels=np.zeros((3, 2), np.int8)),
    of_split("groups", "do not fit together", groups=["p"]),
    Refusal(
        "a batch of three processes",
        None,
        lambda _: load(3),
        "a global batch of 8 does not split over 3 processes",
        error=ValueError,
    ),
]


@each([*IMAGES, *TREES, *LABELS, *OTHERS])
def test_refusals(case, tmp_path):
    case.check(tmp_path)
