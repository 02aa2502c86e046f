"""The cases of fuzz.py: what is damaged, and which function of the package reads it."""

import contextlib
import io
import json
import math
import pickle
import shutil
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save

import mlmoe_jax.config as configuration
from mlmoe_jax import main as program
from mlmoe_jax.config.defaults import KEYS
from mlmoe_jax.config.flags import FLAGS
from mlmoe_jax.data.images import FORMATS, BadImage, Decoding, Images, read_image
from mlmoe_jax.data.sources import packed
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.inference.inputs import GivenImages, find_images
from mlmoe_jax.pretrained.load import read_tensors
from mlmoe_jax.runs.folder import RunFolder

Case = tuple[str, Callable[[], object]]  # a description, and the action


@dataclass(frozen=True)
class Group:
    """A kind of input. prepare: writes what all cases start from to a folder, once; draw: makes a case in a folder.

    share: its part of all cases, in which slow ones have a small one.
    """

    draw: Callable[[st.DrawFn, Path, Path], Case]
    share: float
    prepare: Callable[[Path], None] = lambda base: None


# ------------------------------------------------------------------------------------------------------- hostile values
NAMES = ("a.png", "../a.png", "/etc/passwd", "", ".", "a\0b", "\ud800.png", "\udcff.png", "x" * 5000, "a\nb", "=1+1")
TEXTS = st.one_of(st.sampled_from(NAMES), st.text(max_size=12))
NUMBERS = st.sampled_from(
    (0, 1, -1, 2, 3, 255, 2**31, -(2**31), 2**63, 10**12, 10**23, 10**400, 0.5, 1e308, -1e-320, math.inf, math.nan)
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
WHOLE = (
    b"",
    b"\xff\xfe\xfa",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"5",
    b"[]",
    b"{}",
    b"null",
    b'"x"',
    b"\0" * 4096,
    b"NaN",
)


def with_changed_value(draw: st.DrawFn, value: object) -> object:
    """Return JSON in which one value at any depth is replaced, removed or doubled."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
    changed = value.copy()
    if draw(st.integers(0, 5)) == 0:
        del changed[key]
    elif isinstance(value, list) and draw(st.integers(0, 8)) == 0:
        changed.append(value[key])
    else:
        changed[key] = with_changed_value(draw, value[key])
    return changed


def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the content of a file with damage: cut, other bytes, a part twice, or something else altogether."""
    how = draw(st.integers(0, 9))
    if how == 0:
        return draw(st.sampled_from(WHOLE))
    if how == 1:
        return draw(st.binary(max_size=200))
    if how == 2 or not content:
        return content[: draw(st.integers(0, len(content)))]
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(changed)))
        piece = draw(
            st.one_of(
                st.binary(min_size=1, max_size=8), st.sampled_from((b"\0", b"\xff\xff\xff\xff", b"[" * 99, b'"', b"\n"))
            )
        )
        changed[at : at + draw(st.integers(0, 8))] = piece
    return bytes(changed)


def damaged_json(draw: st.DrawFn, content: bytes) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return damaged(draw, content)
    try:
        return json.dumps(with_changed_value(draw, json.loads(content))).encode()
    except ValueError:  # an integer of more digits than Python writes
        return damaged(draw, content)


def damaged_csv(draw: st.DrawFn, content: bytes) -> bytes:
    rows = [line.split(",") for line in content.decode().splitlines()]
    if draw(st.integers(0, 3)) == 0 or not rows:
        return damaged(draw, content)
    row = draw(st.sampled_from(rows))
    row[draw(st.integers(0, len(row) - 1))] = str(draw(st.one_of(NUMBERS.filter(lambda n: n != 10**400), TEXTS)))
    return "\n".join(",".join(row) for row in rows).encode(errors="surrogatepass")


def array(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    kind = draw(st.sampled_from(("f2", "f4", "f8", "i1", "i8", "u8", "?", "U3", "S3", "c8", "M8[s]", "V2")))
    value = draw(st.sampled_from((0, 1, -1, 200)))
    if kind == "V2":
        return np.zeros(shape, "V2")
    with np.errstate(all="ignore"):
        filled = np.full(shape, value).astype(kind)
    return filled * np.array(math.nan, kind) if kind[0] == "f" and draw(st.booleans()) else filled


SHAPES = (
    "(1000000000000,)",
    "(10**23,)",
    "(" * 3000,
    "(-1,)",
    "(2, 3",
    "(0, 1000000000000)",
    "()",
    "(True,)",
    "('a',)",
)
KINDS = ("'<f4'", "'|O'", "'<U999999999'", "'<U0'", "[('a', '<f4')]", "'<f4'" * 900, "'nonsense'", "'|V1000000000'")


def member(draw: st.DrawFn) -> bytes:
    """Return an .npy file whose header is drawn."""
    text = (
        f"{{'descr': {draw(st.sampled_from(KINDS))}, 'fortran_order': {draw(st.sampled_from(('False', 'True', '3')))}, "
    )
    text += f"'shape': {draw(st.sampled_from(SHAPES))}, }}"
    version = draw(st.sampled_from((b"\1\0", b"\2\0", b"\3\0", b"\7\0")))
    length = min(65_535, len(text) + draw(st.sampled_from((0, 0, 0, 9, 60_000))))
    size = struct.pack("<H" if version == b"\1\0" else "<I", length)
    return b"\x93NUMPY" + version + size + text.encode() + b"\0" * draw(st.sampled_from((0, 4, 100)))


def damaged_npz(draw: st.DrawFn, content: bytes) -> bytes:
    how = draw(st.integers(0, 5))
    if how == 0:
        return damaged(draw, content)
    with np.load(io.BytesIO(content)) as stored:
        arrays = dict(stored)
    name = draw(st.sampled_from(sorted(arrays)))
    buffer = io.BytesIO()
    if how <= 3:
        changed = arrays[name]
        choice = draw(st.integers(0, 4))
        if choice == 0:
            del arrays[name]
        elif choice == 1 and changed.ndim:
            arrays[name] = changed[: draw(st.integers(0, 3))]
        elif choice == 2:
            arrays[name] = changed[None]
        else:
            arrays[name] = array(draw)
        np.savez_compressed(buffer, **arrays)
        return buffer.getvalue()
    with zipfile.ZipFile(
        buffer, "w", draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)))
    ) as archive:
        archive.writestr(f"{draw(st.sampled_from((name, '../x', 'a')))}.npy", member(draw))
        if how == 5:
            archive.writestr("bomb.npy", BOMB)
    return buffer.getvalue()


def _bomb() -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**22,)})
    return header.getvalue() + bytes(2**24)


BOMB = _bomb()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def picture(kind: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (12, 9)) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), np.uint8)
    Image.fromarray(pixels, "RGBA").convert(mode).save(buffer, kind)
    return buffer.getvalue()


def read_all(images: Images) -> None:
    for row in range(min(3, len(images))):
        with contextlib.suppress(BadImage):
            images.read(row)


# ------------------------------------------------------------------------------------------------- config, command line
WORDS = (
    "nan",
    "inf",
    "-1",
    "1e400",
    "9" * 5000,
    "(1,)",
    "(" * 300,
    "('a',",
    "{}",
    "None",
    "true",
    "",
    "\0",
    "é",
    "0x10",
    "1_0",
)


def overrides(draw: st.DrawFn, base: Path, place: Path) -> Case:
    keys = st.one_of(
        st.sampled_from(sorted(KEYS)), st.sampled_from(("model", "no.key", "", "train.", "..", "data.root.x"))
    )
    pairs = draw(
        st.lists(st.tuples(keys, st.one_of(st.sampled_from(WORDS), st.text(max_size=10))), min_size=1, max_size=3)
    )
    name = draw(
        st.sampled_from(("mlvpt_digits", "dr_moe", "e2vpt", "mlvpt_digits:a=1", "no", "x" * 4000, "\0", "/", ""))
    )
    name = "mlvpt_digits" if draw(st.integers(0, 4)) else name

    def act() -> None:
        configuration.validate(configuration.load_config(name, pairs))

    return f"{name[:40]} {pairs}"[:300], act


def stored_config(draw: st.DrawFn, base: Path, place: Path) -> Case:
    text = damaged_json(draw, configuration.to_json(configuration.default_config()).encode())

    def act() -> None:
        configuration.validate(configuration.from_json(text.decode(errors="surrogateescape")))

    return repr(text[:100]), act


def command_line(draw: st.DrawFn, base: Path, place: Path) -> Case:
    modes = st.sampled_from((*program.MODES, "none", ""))
    words = st.one_of(
        st.builds("--mode={}".format, modes),
        st.builds("--{}={}".format, st.sampled_from((*FLAGS, "config", "workdir", "json", "help")), TEXTS),
        st.builds("--config.{}={}".format, st.sampled_from(sorted(KEYS)), TEXTS),
        st.builds("--help={}".format, st.one_of(st.sampled_from(sorted(KEYS)), TEXTS)),
        TEXTS,
    )
    given = [word for word in draw(st.lists(words, max_size=5)) if word not in ("-h", "--help")]

    def act() -> None:
        program.parse(given)

    return str(given)[:300], act


# ------------------------------------------------------------------------------------------------------------ data sets
CSV = b"image,labels,split\n0.png,sea;sand,train\n1.png,,train\nb/2.png,sun,val\n"
WIDE = b"image,sea,sand\n0.png,1,0\n1.png,,1\nb/2.png,0,1.0\n"
JSONL = b'{"image": "0.png", "labels": ["sea"]}\n{"image": "1.png", "labels": {"sea": 0, "sun": null}}\n'
COCO = {
    "images": [{"id": 1, "file_name": "0.png"}, {"id": 2, "file_name": "1.png"}],
    "annotations": [{"image_id": 1, "category_id": 3}, {"image_id": 2, "category_id": 5}],
    "categories": [{"id": 3, "name": "sea"}, {"id": 5, "name": "sun"}],
}


def data_of(place: Path, name: str, **keys):
    data = configuration.default_config().data
    data.name, data.root, data.test_splits, data.val_split = name, str(place), (), ""
    for key, value in keys.items():
        data[key] = value
    return data


def open_all(data, split: str) -> None:
    read_all(open_split(data, split).images)


def own_images(place: Path) -> None:
    for name in ("0.png", "1.png", "b/2.png"):
        write(place / name, picture())


def tables(draw: st.DrawFn, base: Path, place: Path) -> Case:
    own_images(place)
    kind = draw(st.sampled_from(("csv", "wide", "jsonl", "json", "classes")))
    name = {"jsonl": "jsonl"}.get(kind, "csv")
    content = {"wide": WIDE, "jsonl": JSONL}.get(kind, CSV)
    keys = {"bad_images": draw(st.sampled_from(("skip", "error"))), "images": "", "table": "t"}
    if kind == "wide":
        keys["label_column"] = ""
    if kind == "classes":
        write(place / "c", damaged(draw, b"sea\nsand\nsun\n"))
        keys["classes"] = "c"
    elif kind == "jsonl":
        first, rest = content.split(b"\n", 1)
        content = damaged_json(draw, first) + b"\n" + rest
    elif kind == "json":
        name, content = "coco_json", damaged_json(draw, json.dumps(COCO).encode())
    else:
        content = damaged_csv(draw, content)
    write(place / "t", content)
    return f"{kind} {content[:200]!r}", partial(open_all, data_of(place, name, **keys), "train")


def published(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """Pascal VOC, NUS-WIDE, COCO 2014 and the two of Visual Genome, in their published layouts."""
    name = draw(st.sampled_from(("voc2007", "nuswide", "coco2014", "vg256", "vg500")))
    shutil.copytree(base / name, place, dirs_exist_ok=True)
    path = draw(st.sampled_from(sorted(path for path in place.rglob("*") if path.is_file() and path.suffix != ".jpg")))
    content = (damaged_json if path.suffix == ".json" else damaged)(draw, path.read_bytes())
    path.write_bytes(content)
    keys = {"bad_images": "skip", "keep_empty": name != "vg256" and draw(st.booleans())}
    return f"{path.name} {content[:150]!r}", partial(open_all, data_of(place, name, **keys), "train")


def prepare_published(base: Path) -> None:
    from mlmoe_jax.data.sources import nuswide, visual_genome, voc

    for name in voc.CLASSES:
        write(base / f"voc2007/VOC2007/ImageSets/Main/{name}_train.txt", b"000001 1\n000002 -1\n000003  0\n")
    write(base / "voc2007/VOC2007/JPEGImages/000001.jpg", picture("JPEG"))
    write(base / "nuswide/ImageList/TrainImagelist.txt", b"a\\1.jpg\nb\\2.jpg\n")
    write(base / "nuswide/ConceptsList/Concepts81.txt", "\n".join(nuswide.CLASSES).encode())
    write(base / "nuswide/Groundtruth/Labels_Train.txt", b"1 " * 81 + b"\n" + b"0 " * 81 + b"\n")
    write(base / "nuswide/Flickr/a/1.jpg", picture("JPEG"))
    write(base / "coco2014/annotations/instances_train2014.json", json.dumps(COCO).encode())
    write(base / "coco2014/train2014/0.png", picture())
    objects = [{"image_id": n, "objects": [{"names": ["large brown dog"]}, {"names": ["tree."]}]} for n in (1, 2, 3, 4)]
    write(base / "vg256/objects.json", json.dumps(objects).encode())
    write(base / "vg256/VG_100K/1.jpg", picture("JPEG"))
    write(base / "vg500/train_list_500.txt", b"1.jpg\n2.jpg\n")
    write(base / "vg500" / visual_genome.INDEX_500, json.dumps({"1.jpg": [0, 17], "2.jpg": [3]}).encode())
    write(base / "vg500/VG_100K/1.jpg", picture("JPEG"))


def prepare_packed(base: Path) -> None:
    own_images(base / "files")
    write(base / "files/t.csv", b"image,labels,split\n0.png,sea,train\n1.png,sea;sun,val\n")
    data = [
        f"--config.data.{key}"
        for key in ("name=csv", f"root={base}/files", "table=t.csv", "val_split=val", "test_splits=()")
    ]
    code = program.main(["--mode=pack", "--config=mlvpt_digits", *data, f"--output={base}/set"])
    if code:
        raise RuntimeError(f"cannot pack a data set: exit code {code}")


def packed_data(draw: st.DrawFn, base: Path, place: Path) -> Case:
    shutil.copytree(base / "set", place / "set")
    path = draw(st.sampled_from(sorted((place / "set").glob("[a-z]*"))))
    whole = path.read_bytes()
    damage = {".json": damaged_json, ".npz": damaged_npz}.get(path.suffix, damaged)
    content = damage(draw, whole)
    path.write_bytes(content)
    if path.suffix == ".npz" and draw(st.integers(0, 3)):  # a hostile set has the right digest
        manifest = json.loads((place / "set/manifest.json").read_bytes())
        manifest["splits"][path.stem]["labels"] |= packed_entry(content)
        write(place / "set/manifest.json", json.dumps(manifest).encode())

    def act() -> None:
        list(packed.verify(place / "set"))
        for split in ("train", "val"):
            open_all(data_of(place / "set", "packed"), split)

    return f"{path.name} {content[:150]!r}", act


def packed_entry(content: bytes) -> dict[str, object]:
    import hashlib

    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


# ------------------------------------------------------------------------------------------------------ weights, images
class _Call:
    def __init__(self, name: str, *arguments: object):
        self.name, self.arguments = name, arguments

    def __reduce__(self):
        module, _, function = self.name.partition(":")
        return getattr(__import__(module), function), self.arguments


def weights(draw: st.DrawFn, base: Path, place: Path) -> Case:
    kind = draw(st.sampled_from(("safetensors", "npz", "pth", "pickle")))
    arrays = {"a/b": np.ones((2, 3), np.float32), "c": np.zeros(4, np.float32)}
    if kind == "safetensors":
        content = save(arrays)
        if draw(st.booleans()):
            size = struct.unpack("<Q", content[:8])[0]
            header = damaged_json(draw, content[8 : 8 + size])
            length = len(header) if draw(st.integers(0, 3)) else draw(st.sampled_from((0, 2**63, 2**64 - 1, 10**9)))
            content = struct.pack("<Q", length) + header + content[8 + size :]
        else:
            content = damaged(draw, content)
    elif kind == "npz":
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        content = damaged_npz(draw, buffer.getvalue())
    else:
        marker = str(place.parent / "outside" / "run")
        evil = _Call(
            draw(st.sampled_from(("os:system", "builtins:eval", "builtins:exec", "builtins:open"))), f"touch {marker}"
        )
        value = draw(st.sampled_from(({"a": evil}, evil, [evil], {"state_dict": {"w": evil}}, {"a": 1}, 5, [[]] * 9)))
        content = pickle.dumps(value, protocol=draw(st.integers(0, 5)))
        if draw(st.booleans()):
            content = damaged(draw, content)
        if kind == "pth":
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as archive:
                archive.writestr("archive/data.pkl", content)
                archive.writestr(f"archive/data/{draw(st.sampled_from(('0', '../../x')))}", b"\0" * 16)
            content = buffer.getvalue() if draw(st.booleans()) else damaged(draw, buffer.getvalue())
    path = write(place / f"w.{'pth' if kind == 'pickle' else kind}", content)
    return f"{kind} {content[:150]!r}", partial(read_tensors, path)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, mode: int, depth: int, *chunks: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, mode, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


ZIPPED = zlib.compress(bytes(50_000_000), 9)
KINDS_OF_IMAGES = [(kind, mode) for kind in FORMATS for mode in ("RGB", "L", "RGBA", "P", "CMYK")]


def prepare_images(base: Path) -> None:
    for kind, mode in KINDS_OF_IMAGES:
        with contextlib.suppress(OSError, KeyError, ValueError):  # not every format has every mode
            write(base / f"{kind}-{mode}", picture(kind, mode))


def images(draw: st.DrawFn, base: Path, place: Path) -> Case:
    if draw(st.integers(0, 5)) == 0:
        side = st.sampled_from((0, 1, 3000, 12_000, 50_000, 2**31 - 1, 2**32 - 1))
        extra = draw(st.sampled_from((b"", chunk(b"zTXt", b"a\0\0" + ZIPPED), chunk(b"iCCP", b"a\0\0" + ZIPPED))))
        pixels = chunk(b"IDAT", ZIPPED)
        mode, depth = draw(st.sampled_from((0, 2, 3, 4, 6, 9))), draw(st.sampled_from((1, 8, 16, 99)))
        content = png(draw(side), draw(side), mode, depth, extra, pixels)
    else:
        path = draw(st.sampled_from(sorted(base.iterdir())))
        content = damaged(draw, path.read_bytes())
    return repr(content[:100]), partial(read_image, content, decoding=Decoding(draw(st.sampled_from((0, 4)))))


def lists(draw: st.DrawFn, base: Path, place: Path) -> Case:
    own_images(place)
    odd = (
        "~nosuchuser/x",
        "://",
        "s3://x",
        "file:///etc",
        "/dev/zero",
        "x" * 5000,
        "a\0b",
        "[",
        "**",
        "~",
        "-",
    )
    listed = draw(st.lists(st.one_of(st.sampled_from((*odd, *NAMES)), TEXTS), max_size=4))
    items = draw(
        st.lists(
            st.one_of(
                st.sampled_from((*odd[:-1], f"{place}/b", f"{place}/*.png", f"{place}/?.p[", f"@{place}/l")), TEXTS
            ),
            min_size=1,
            max_size=3,
        )
    )
    write(place / "l", damaged(draw, "\n".join(listed).encode(errors="surrogatepass")))
    items = [item for item in items if item != "-"]

    def act() -> None:
        read_all(GivenImages(find_images(items)))

    return str((items, listed))[:300], act


# ---------------------------------------------------------------------------------------------------------- run folders
DATA = b"image,labels,split\n" + b"".join(
    b"%d.png,%s,%s\n" % (n, (b"sea", b"sea;sun", b"sand")[n % 3], b"train" if n < 16 else b"val") for n in range(24)
)


def prepare_run(base: Path) -> None:
    """Train the packaged backbone for two steps on 24 images."""
    for n in range(24):
        write(base / f"files/{n}.png", picture(size=(64, 64)))
    write(base / "files/t.csv", DATA)
    keys = (
        *(
            "data.name=csv",
            f"data.root={base}/files",
            "data.table=t.csv",
            "data.val_split=val",
            "data.test_splits=val,",
        ),
        *("train.epochs=1", "train.batch_size=8", "eval.batch_size=8", "train.log_every=1", "report.samples=2"),
        *("model.prompts.num_groups=2", "model.prompts.groups=computed"),
    )
    command = ["--config=mlvpt_digits", f"--workdir={base}/run", *(f"--config.{key}" for key in keys)]
    if code := program.main(command):
        raise RuntimeError(f"cannot train a run: exit code {code}")


def make_run(base: Path) -> None:
    """Write a run folder without a model, with every file that reports, thresholds and comparisons read."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from helpers import made_run

    made_run.make_run(base / "run")
    command(["--mode=report", f"--workdir={base}/run"])  # the first one takes seconds to set up its charts


def changed_run(draw: st.DrawFn, base: Path, place: Path, names: Sequence[str]) -> str:
    """Copy the run with damage in one file; return a description."""
    run = place / "run"
    shutil.copytree(base / "run", run, ignore=shutil.ignore_patterns("tensorboard"))
    path = run / draw(st.sampled_from([name for name in names if (run / name).exists()]))
    damage = {".json": damaged_json, ".npz": damaged_npz, ".csv": damaged_csv}.get(path.suffix, damaged)
    content = damage(draw, path.read_bytes())
    if path.suffix == ".jsonl" and draw(st.booleans()):
        first, _, rest = path.read_bytes().partition(b"\n")
        content = damaged_json(draw, first) + b"\n" + rest
    path.write_bytes(content)
    return f"{path.relative_to(run)} {content[:150]!r}"


READ = (
    *(
        "config.json",
        "labels.txt",
        "label_space.npz",
        "backbone.json",
        "thresholds.json",
        "metrics.jsonl",
        "results.json",
    ),
    *("per_class.csv", "cooccurrence.csv", "scores.npz", "starts.json", "samples/index.json", "samples/explained.npz"),
)


def run_folder(draw: st.DrawFn, base: Path, place: Path) -> Case:
    changed = changed_run(draw, base, place, READ)
    folder, mode = place / "run", draw(st.sampled_from(("report", "report", "report", "thresholds", "compare")))
    arguments = {
        "report": ["--mode=report", f"--workdir={folder}"],
        "thresholds": ["--mode=thresholds", f"--workdir={folder}"],
        "compare": ["--mode=compare", f"--workdir={folder}", f"--workdir={base / 'run'}"],
    }[mode]
    return f"{mode}: {changed}", partial(command, arguments)


def model(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """The modes that restore the model: its files are damaged, and the selected values are placed on the device."""
    from mlmoe_jax.runs.restore import open_run

    names = (
        "config.json",
        "label_space.npz",
        "preprocess.json",
        "backbone.json",
        "frozen.safetensors",
        "thresholds.json",
    )
    notes = [str(path.relative_to(base / "run")) for path in (base / "run/checkpoints").rglob("*") if path.is_file()]
    changed = changed_run(draw, base, place, (*names, *sorted(notes)))
    return f"open: {changed}", lambda: open_run(RunFolder(place / "run"))


def command(arguments: list[str]) -> None:
    """Run a command as `main` does, so that its errors are seen here."""
    flags, pairs = program.parse(arguments)
    program.MODES[flags.mode](flags, pairs)


GROUPS = {
    "overrides": Group(overrides, 0.15),
    "stored config": Group(stored_config, 0.05),
    "command line": Group(command_line, 0.1),
    "tables": Group(tables, 0.2),
    "published data": Group(published, 0.1, prepare_published),
    "packed data": Group(packed_data, 0.05, prepare_packed),
    "weights": Group(weights, 0.12, lambda base: None),
    "images": Group(images, 0.12, prepare_images),
    "image lists": Group(lists, 0.05),
    "run folders": Group(run_folder, 0.05, make_run),
    "models": Group(model, 0.03, prepare_run),
}
