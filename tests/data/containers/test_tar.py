"""Images in tar files: random access to each, and every odd file that people have reported."""

import gzip
import io
import os
import pickle
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.parquet_files import png
from helpers.refusals import Refusal, each
from helpers.tars import write_tar

from mlmoe_jax.data.containers import tar
from mlmoe_jax.data.containers.catalog import open_images
from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import cache_folder


def open_all(address):
    return open_images(str(address), Usage(str(address), "file"))


def left_out(address):
    """Return reason -> count of the members that are not used."""
    usage = Usage("x", "file")
    open_images(str(address), usage)
    return {reason: part.count for reason, part in usage.left_out.items()}


def names_of(images):
    return [images.name(row).rpartition("#")[2] for row in range(len(images))]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path):
    """300 images with labels in three shards."""
    for shard in range(3):
        rows = range(100 * shard, 100 * shard + 100)
        members = [
            (f"{k:03}.{suffix}", png(k) if suffix == "png" else "{}") for k in rows for suffix in ("png", "json")
        ]
        write_tar(tmp_path / "shards" / f"train-{shard:03}.tar", members)
    return tmp_path / "shards"


@pytest.mark.parametrize("further", [0, 1])
def test_a_text_may_have_the_largest_size_and_no_more(tmp_path, further):
    path = write_tar(tmp_path / "a.tar", [("a.json", b" " * (tar.TEXT_BYTES + further))])
    (text,) = tar.read_index(tar.index_shard(str(path)))["text"].to_pylist()
    assert (text is None) == bool(further)


def test_an_image_may_have_the_largest_size_and_no_more(tmp_path, monkeypatch):
    images = open_all(write_tar(tmp_path / "a.tar", [("a.png", png())]))
    monkeypatch.setattr(tar, "MAX_FILE", len(png()))
    assert images.encoded(0) == png()
    monkeypatch.setattr(tar, "MAX_FILE", len(png()) - 1)
    with pytest.raises(BadImage, match="it has more than"):
        images.encoded(0)


def test_images_are_in_the_order_of_members_and_read_at_random(folder, monkeypatch):
    images = open_all(folder)
    assert len(images) == 300
    assert images.name(150) == f"{folder}/train-001.tar#150.png"
    order = np.random.default_rng(0).permutation(300)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda row: images.encoded(int(row)), order)) == [png(int(row)) for row in order]
    assert left_out(folder) == {"in no image format": 300}
    with pytest.raises(IndexError):
        images.encoded(300)


def test_a_shard_is_indexed_once_and_again_if_it_changes(folder, monkeypatch):
    open_all(folder)
    written = sorted((cache_folder() / "tar").glob("*.arrow"))
    monkeypatch.setattr(tar, "_read_members", None)
    assert len(open_all(folder)) == 300
    monkeypatch.undo()
    os.environ["MLMOE_CACHE"] = str(written[0].parents[1])
    write_tar(folder / "train-001.tar", [("new.png", png(7))])
    assert names_of(open_all(folder))[100] == "new.png"


def test_a_worker_receives_few_bytes_and_does_not_index(folder, monkeypatch):
    sent = pickle.dumps(open_all(folder))
    assert len(sent) < 2000
    monkeypatch.setattr(tar, "_read_members", None)
    tar.read_index.cache_clear()
    tar.image_members.cache_clear()
    assert pickle.loads(sent).encoded(299) == png(299)


def test_the_version_of_an_image_changes_with_its_shard(folder, monkeypatch):
    before = open_all(folder)
    write_tar(folder / "train-001.tar", [("000.png", png(7))] * 1)
    after = open_all(folder)
    monkeypatch.setattr(tar, "read_range", None)
    assert before.stamp(0) == after.stamp(0)
    assert before.stamp(100) != after.stamp(100)


@pytest.mark.parametrize("address", ["", "/train-{000..002}.tar", "/train-00{0..2}.tar"])
def test_shards_are_named_by_their_folder_or_by_ranges(folder, address):
    assert len(open_all(f"{folder}{address}")) == 300


def test_a_file_and_a_part_of_the_shards_are_opened(folder, monkeypatch):
    assert len(open_all(f"{folder}/train-{{001..002}}.tar")) == 200
    monkeypatch.chdir(folder)
    images = open_all("train-001.tar")
    assert images.name(0) == "./train-001.tar#100.png"
    assert images.encoded(0) == png(100)


def test_files_beside_the_shards_are_counted(folder):
    # img2dataset writes 00000.parquet and 00000_stats.json beside 00000.tar
    for name in ("train-000.parquet", "train-000_stats.json"):
        (folder / name).write_bytes(b"no Parquet")
    assert left_out(folder)["beside the tar files"] == 2
    assert len(open_all(folder)) == 300


def test_all_images_of_an_example_are_opened_and_a_column_has_no_effect(tmp_path):
    # github.com/webdataset/webdataset/issues/20 and github.com/huggingface/datasets/issues/7055
    path = write_tar(tmp_path / "x.tar", [(f"{k}.{side}.png", png()) for k in "ab" for side in ("left", "right")])
    usage = Usage("x.tar", "file")
    images = open_images(str(path), usage, column="image")
    assert names_of(images) == ["a.left.png", "a.right.png", "b.left.png", "b.right.png"]
    assert usage.sentences() == ["x.tar has no columns, so --column=image has no effect"]


@pytest.mark.parametrize("size", [1000, None])
def test_a_shard_that_changes_while_it_is_open_is_refused(folder, size):
    """Labels of one version would be joined to images of another."""
    images = open_all(folder)
    with open(folder / "train-000.tar", "r+b") as file:
        file.write(b"x")
        file.truncate(size)
    with pytest.raises(UserError, match=r"train-000\.tar has changed since it was opened") as raised:
        images.encoded(99)
    assert not isinstance(raised.value, BadImage)
    assert images.encoded(100) == png(100)


def test_a_shard_that_is_gone_is_damage_of_its_images(folder):
    images = open_all(folder)
    (folder / "train-000.tar").unlink()
    with pytest.raises(BadImage, match=r"cannot read .*train-000\.tar#099\.png as an image: .* No such file"):
        images.encoded(99)


def test_an_index_of_another_version_is_not_kept(folder, monkeypatch):
    """A shard may be written while it is indexed."""
    described = tar._describe

    def describe(member, file):
        os.utime(folder / "train-000.tar", ns=(1, 1))
        return described(member, file)

    monkeypatch.setattr(tar, "_describe", describe)
    with pytest.raises(UserError, match=r"train-000\.tar has changed since it was opened"):
        open_all(folder)
    assert not list((cache_folder() / "tar").glob("*.arrow"))


# ------------------------------------------------------------------------------------------------------------ odd files
def dotted(path):
    return write_tar(path, [("some/22.0/1.1.png", png()), ("some/22.0/235342 Track 2.0.jpg", png())])


def from_a_mac(path):
    hidden = [("photos/._a.png", b"\0\5\26\7"), ("__MACOSX/photos/._a.png", b"x"), ("photos/.DS_Store", b"x")]
    return write_tar(path, [*hidden, ("photos/a.png", png())])


def linked(path):
    with tarfile.open(write_tar(path, [("a.png", png())]), "a") as archive:
        for name, kind in {"b.png": tarfile.LNKTYPE, "c.png": tarfile.SYMTYPE, "d.png": tarfile.FIFOTYPE}.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "a.png"
            archive.addfile(member)
    return path


def with_folders(path):
    with tarfile.open(path, "w") as archive:
        (path.parent / "photos.png").mkdir()
        (path.parent / "photos.png" / "a.png").write_bytes(png())
        archive.add(path.parent / "photos.png", "./photos.png")
    return path


def long_names(path):
    return write_tar(path, [(f"{'long/' * 60}ü{'x' * 100}.png", png())], pack_format=tarfile.PAX_FORMAT)


def gnu_names(path):
    return write_tar(path, [(f"{'long/' * 60}{'x' * 100}.png", png())], pack_format=tarfile.GNU_FORMAT)


def sparse(path):
    member = tarfile.TarInfo("a.png")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9999"}
    body = b"1\n0\n3\n".ljust(512, b"\0") + b"abc"
    member.size = len(body)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member, io.BytesIO(body))
    return path


def climbing(path):
    return write_tar(path, [("../../etc/a.png", png()), ("/abs/b.png", png()), ("./c.png", png())])


def empty_first(path):
    write_tar(path.parent / "x" / "0.tar", [])
    write_tar(path.parent / "x" / "1.tar", [("a.png", png())])
    return path.parent / "x"


def huge_text(path):
    return write_tar(path, [("a.png", png()), ("a.json", b" " * (tar.TEXT_BYTES + 1))])


def latin_1(path):
    return write_tar(path, [("caf\udce9.png", png())])


def from_windows(path):
    return write_tar(path, [("photos\\a.png", png())])


def other_case(path):
    return write_tar(path, [("A.JPG", png()), ("B.Jpeg", png())])


def repeated_in_shards(path):
    for shard in "01":
        write_tar(path.parent / "x" / f"{shard}.tar", [("a.png", png())])
    return path.parent / "x"


# The source of each report, what is written, the images that are found, and the members that are counted as not used
REPORTS = {
    "huggingface/datasets#7150, webdataset#237: dots in names": (
        dotted,
        ["some/22.0/1.1.png", "some/22.0/235342 Track 2.0.jpg"],
        {},
    ),
    "alinlab/CSI#31: files of macOS": (from_a_mac, ["photos/a.png"], {"hidden or of the system": 3}),
    "mxmlnkn/ratarmount#28, python/cpython#122736: links": (linked, ["a.png"], {"that are links or sparse": 3}),
    "webdataset#74: a folder of photographs": (with_folders, ["photos.png/a.png"], {}),
    "NVIDIA/DALI_extra, gnu.tar: long names": (gnu_names, [f"{'long/' * 60}{'x' * 100}.png"], {}),
    "pax headers": (long_names, [f"{'long/' * 60}ü{'x' * 100}.png"], {}),
    "sparse members": (sparse, [], {"that are links or sparse": 1}),
    "names that lead out of the folder": (climbing, ["etc/a.png", "abs/b.png", "c.png"], {}),
    "webdataset#376: an empty first shard": (empty_first, ["a.png"], {}),
    "a text that is no label": (huge_text, ["a.png"], {"in no image format": 1}),
    "a name in Latin-1": (latin_1, ["caf?.png"], {}),
    "macrodata-labs/refiner#124: a path of Windows": (from_windows, ["photos/a.png"], {}),
    "open-edge-platform/anomalib#3058: suffixes in capitals": (other_case, ["A.JPG", "B.Jpeg"], {}),
    "webdataset#327: names repeated in several shards": (repeated_in_shards, ["a.png", "a.png"], {}),
}


@pytest.mark.parametrize("report", REPORTS)
def test_odd_files_are_used_right(report, tmp_path):
    write, names, unused = REPORTS[report]
    path = write(tmp_path / "x.tar")
    assert names_of(open_all(path)) == names
    assert left_out(path) == unused


def shard(at, count=3):
    return write_tar(at / "x.tar", [(f"{k}.png", png(k)) for k in range(count)])


def rewritten(change):
    """Return a function that writes a shard and changes its content."""

    def write(at):
        path = shard(at)
        path.write_bytes(change(path.read_bytes()))
        return path

    return write


def named(name, content):
    def write(at):
        (at / name).write_bytes(content(shard(at).read_bytes()))
        return at / name

    return write


def as_zip(content):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.png", content)
    return buffer.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
REFUSALS = [
    Refusal(name, make, open_all, *says, writes=True)
    for name, make, *says in (
        ("webdataset#142, taskonomy#50: a truncated member", rewritten(lambda x: x[:2600]), "from its member 2.png on"),
        (
            "webdataset#32: a writer that was not closed",
            rewritten(lambda x: x[:3072]),
            "from its member 2.png on",
            "no end",
        ),
        ("a truncated header", rewritten(lambda x: x[:2100]), "x.tar is damaged or truncated from its member 1.png on"),
        ("a damaged header", rewritten(lambda x: x[:1100] + b"????" + x[1104:]), "truncated from its member 0.png on"),
        ("two files joined by cat", rewritten(lambda x: x + x), "further data after its end"),
        ("webdataset#2: no tar file", rewritten(lambda x: b"no tar" * 200), "x.tar is not an uncompressed tar file"),
        ("a zip file", rewritten(as_zip), "x.tar is not an uncompressed tar file"),
        ("a gzip file with the name of a tar file", rewritten(gzip.compress), "is not an uncompressed tar file"),
        ("a pointer of Git LFS", rewritten(lambda x: LFS), "x.tar is not an uncompressed tar file"),
        ("an empty file", rewritten(lambda x: b""), "x.tar is not an uncompressed tar file (empty file)"),
        ("img2dataset#174: a gap in a range", lambda at: f"{shard(at).parent}/x{{0..1}}.tar", "there is no x0.tar in"),
        ("a range without an end", lambda at: f"{shard(at).parent}/x{{0..99999999999}}.tar", "there is no x0.tar in"),
        ("a compressed file", named("x.tar.gz", gzip.compress), "x.tar.gz is compressed", "unpack it to a .tar file"),
    )
]


@each(REFUSALS)
def test_damaged_files_are_refused(case, tmp_path):
    case.check(tmp_path)
    assert not list((cache_folder() / "tar").glob("*.arrow"))
