"""Keywords of photographs: in XMP as programs write it, and in IPTC; and the sidecars of labels."""

import hashlib

import pytest
from etils import epath
from helpers.photographs import (
    BLANK,
    LAYOUTS,
    SEA,
    array,
    encode,
    jpeg_with_iptc,
    packet,
    photograph,
    rest,
    texts,
)
from helpers.tables import data_settings, listed, opened

from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.data.sources import xmp
from mlmoe_jax.data.sources.labeling_formats import FORMATS, LabelEntry, LabelFile
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.usage import unused_input
from mlmoe_jax.errors import UserError

KEYWORDS = ["sea", "sand & sun"]
NAMES = ("sea", "dog", "animal", "grün <&>")
TREE = LabelTree(implies=((1, 2),))


def read(folder, **keys):
    data = data_settings("keywords", folder, val_split="", test_splits=(), keep_empty=True, **keys)
    return open_split(data, "train")


def write(folder, labels, *, form="xmp", output="", tree=None, base=""):
    """Write labels {image: names}, and return the sentence and the written files."""
    file = LabelFile(epath.Path(output or folder), NAMES, list(labels), str(base), tree=tree)
    FORMATS[form].require(file)
    return FORMATS[form].write(file, [LabelEntry(name, dict.fromkeys(own, POSITIVE)) for name, own in labels.items()])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photograph(tmp_path / "a.jpg")
    return tmp_path


# ------------------------------------------------------------------------------------------------------------- layouts
def test_a_new_description_is_about_the_image_of_the_first_that_names_it():
    head = f'<rdf:RDF xmlns:rdf="{xmp._RDF}">'
    first, second = (f'<rdf:Description rdf:about="{about}"/>' for about in ("uuid:1", ""))
    for parts in (first + second, second + first):
        packet = xmp.XmpPacket(f"{head}{parts}</rdf:RDF>".encode()).add({xmp.SUBJECT: ["dog"]})
        assert packet.count(b'rdf:about="uuid:1"') == 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_keywords_are_read_in_the_layouts_of_programs(name, folder):
    (folder / "a.jpg.xmp").write_bytes(encode(LAYOUTS[name]))
    assert listed(read(folder)) == ["a.jpg: sand & sun, sea"]


@pytest.mark.parametrize(
    ("name", "suffix"),
    [*((name, "jpg") for name in LAYOUTS), *(("ExifTool", suffix) for suffix in ("png", "tif", "webp", "avif"))],
)
def test_keywords_are_read_in_photographs(name, suffix, folder):
    (folder / "a.jpg").unlink()
    photograph(folder / f"a.{suffix}", encode(LAYOUTS[name]))
    assert listed(read(folder)) == [f"a.{suffix}: sand & sun, sea"]


@pytest.mark.parametrize("name", [*LAYOUTS, *BLANK])
@pytest.mark.parametrize("tree", [None, TREE], ids=["flat", "tree"])
def test_labels_are_added_and_nothing_else_differs(name, tree, folder):
    before = encode({**LAYOUTS, **BLANK}[name])
    path = folder / "a.jpg.xmp"
    path.write_bytes(before)
    image = (folder / "a.jpg").read_bytes()
    assert write(folder, {"a.jpg": ["sea", "dog", "grün <&>"]}, tree=tree) == ""
    after = path.read_bytes()
    assert rest(after) == rest(before)
    own = KEYWORDS if name in LAYOUTS else []
    assert {text.rpartition("|")[2] for text in texts(after, "subject")} == {*own, "sea", "dog", "grün <&>"}
    assert {*texts(after, "written")} == {"sea", "dog", "grün <&>"}
    split = read(folder)
    assert {*split.classes} == {*own, "sea", "dog", "grün <&>"}
    assert split.labels[:].min() == POSITIVE
    if tree:
        assert "animal|dog" in texts(after, "levels")
        assert {text.rpartition("|")[2] for text in texts(after, "levels")} >= {*own, "grün <&>"}
    assert (folder / "a.jpg").read_bytes() == image
    assert write(folder, {"a.jpg": ["dog"]}, tree=tree) == "1 file had all labels already"
    assert path.read_bytes() == after


@pytest.mark.parametrize("name", ["ExifTool in Windows", "padding", "Lightroom with settings", "UTF-16 with a mark"])
def test_bytes_outside_the_lists_stay(name):
    """Without the lists and the new description, both are equal."""
    before = encode(LAYOUTS[name])
    encoding = "utf-16" if before[:2] == b"\xff\xfe" else "utf-8"
    after = xmp.XmpPacket(before).add({xmp.SUBJECT: ["dog"], xmp.WRITTEN: ["dog"]})
    before, after = (content.decode(encoding) for content in (before, after))
    start, end = before.index("<dc:subject>"), before.index("</dc:subject>") + len("</dc:subject>")
    added = after.index(" <rdf:Description xmlns:rdf")
    rest_of_it = after.index("</rdf:RDF>", added)
    assert after[:added].rstrip() == (before[:start] + before[end : before.index("</rdf:RDF>")]).rstrip()
    assert after[rest_of_it:] == before[before.index("</rdf:RDF>") :]


# ------------------------------------------------------------------------------------------------- which file is read
def test_the_photograph_counts_only_without_keywords_in_a_sidecar(folder):
    photograph(folder / "b.jpg", encode(packet(array("dc:subject", "embedded"))))
    jpeg_with_iptc(folder / "c.jpg", b"sea", "grün".encode(), b"places|beach")
    jpeg_with_iptc(folder / "d.jpg", "grün".encode("cp1252"))
    photograph(folder / "e.png")
    assert listed(read(folder)) == ["b.jpg: embedded", "c.jpg: beach, grün, sea", "d.jpg: grün"]
    (folder / "b.xmp").write_text(packet(SEA))
    (folder / "b.jpg.XMP").write_text(packet(array("dc:subject", "sky")))
    (folder / "c.xmp").write_text(BLANK["no list"])
    (folder / "d.jpg.xmp").write_text(BLANK["an empty list"])
    assert listed(read(folder)) == ["b.jpg: sand & sun, sea, sky", "c.jpg: beach, grün, sea", "d.jpg:"]


def test_files_that_are_not_read_are_said(folder):
    for name, content in {
        "a.jpg.xmp": "no XML",
        "b.jpg.xmp": "<html/>",
        "c.jpg.xmp": '<!DOCTYPE x [<!ENTITY e "ee">]>' + packet(array("dc:subject", "&e;"), head=""),
        "d.jpg.xmp": packet("<dc:subject rdf:resource='x'/>"),
        "e.jpg.xmp": packet("<dc:subject><rdf:Description/></dc:subject>"),
        "f.jpg.xmp": packet("<dc:subject><rdf:Bag><rdf:li><b>x</b></rdf:li></rdf:Bag></dc:subject>"),
        "j.jpg.xmp": packet(SEA, attributes="dc:subject='sea'"),
        "k.jpg.xmp": packet("<dc:subject><rdf:Bag><rdf:li rdf:resource='x'/></rdf:Bag></dc:subject>"),
        "l.jpg.xmp": packet("<dc:subject><rdf:Alt><rdf:li xml:lang='de'>x</rdf:li></rdf:Alt></dc:subject>"),
        "g.jpg.xmp": packet(SEA, head='<?xml version="1.0" encoding="ISO-8859-1"?>'),
        "h.jpg.xmp": packet(SEA),
        "lonely.xmp": packet(SEA),
    }.items():
        if name != "lonely.xmp":
            photograph(folder / name[:5])
        (folder / name).write_text(content)
    photograph(folder / "i.png", b"<x")
    split = read(folder)
    assert listed(split) == ["h.jpg: sand & sun, sea"]
    reasons = split.usage[0].left_out
    assert reasons["without an image"].examples == ["lonely.xmp"]
    assert reasons["with XMP that is not read"].count == 11
    first, second, third = reasons["with XMP that is not read"].examples
    assert first.startswith(f"a.jpg: {folder}/a.jpg.xmp is damaged: syntax error")
    assert second.endswith("b.jpg.xmp is damaged: it is no XMP, since it has no rdf:RDF")
    assert third.endswith("c.jpg.xmp is damaged: it has a document type, which is not read")
    assert "11 with XMP that is not read" in unused_input(split.usage)[0]


def test_a_folder_without_readable_xmp_says_so(folder):
    (folder / "a.jpg.xmp").write_text("no XML")
    with pytest.raises(UserError, match=r"lists no images; .*1 with XMP that is not read \(a.jpg: "):
        read(folder)


def test_the_size_of_a_sidecar_is_bounded(folder):
    (folder / "a.jpg.xmp").write_text(packet(SEA, tail=" " * 9_000_000))
    with pytest.raises(UserError, match="more than 8,388,608 bytes"):
        write(folder, {"a.jpg": ["sea"]})


def test_splits_and_classes(folder):
    for split in ("train", "val"):
        (folder / split).mkdir()
        photograph(folder / split / "a.jpg", encode(packet(SEA)))
    (folder / "names.txt").write_text("sand & sun\nsea\nsky\n")
    keys = {"images": "{split}", "classes": "names.txt", "test_splits": ()}
    for split in ("train", "val"):
        found = opened("keywords", folder, split, **keys)
        assert listed(found) == [f"{split}/a.jpg: sand & sun, sea"]
        assert found.classes == ("sand & sun", "sea", "sky")


# ---------------------------------------------------------------------------------------------- which file is written
@pytest.mark.parametrize(
    ("form", "existing", "expected"),
    [
        ("xmp", (), "a.jpg.xmp"),
        ("xmp_lightroom", (), "a.xmp"),
        ("xmp", ("a.xmp",), "a.xmp"),
        ("xmp_lightroom", ("a.jpg.xmp",), "a.jpg.xmp"),
        ("xmp", ("a.XMP",), "a.XMP"),
        ("xmp", ("a.xmp", "a.jpg.xmp"), "a.jpg.xmp"),
    ],
)
def test_the_existing_sidecar_is_changed(form, existing, expected, folder):
    for name in existing:
        (folder / name).write_text(packet(SEA))
    write(folder, {"a.jpg": ["dog"]}, form=form)
    assert {path.name for path in folder.iterdir() if path.name.lower().endswith("xmp")} == {*existing, expected}
    assert texts((folder / expected).read_bytes(), "subject") == [*(KEYWORDS if existing else []), "dog"]


def test_images_with_one_stem_have_sidecars_of_their_own(folder):
    photograph(folder / "a.png")
    (folder / "a.xmp").write_text(packet(SEA))
    write(folder, {"a.jpg": ["dog"], "a.png": ["animal"]}, form="xmp_lightroom")
    assert texts((folder / "a.xmp").read_bytes(), "subject") == KEYWORDS
    assert texts((folder / "a.png.xmp").read_bytes(), "subject") == ["animal"]


def test_sidecars_in_another_folder_begin_as_those_beside_the_images(folder):
    (folder / "sub").mkdir()
    for name in ("b", "c"):
        photograph(folder / "sub" / f"{name}.jpg")
    (folder / "sub/b.xmp").write_text(packet(SEA, attributes='xmp:Rating="5"'))
    write(folder, {"sub/b.jpg": ["dog"], "sub/c.jpg": []}, output=folder / "out")
    assert texts((folder / "out/sub/b.xmp").read_bytes(), "subject") == [*KEYWORDS, "dog"]
    assert rest((folder / "out/sub/b.xmp").read_bytes()) == rest((folder / "sub/b.xmp").read_bytes())
    assert texts((folder / "sub/b.xmp").read_bytes(), "subject") == KEYWORDS
    written = opened("xmp", folder, table="out", keep_empty=True, val_split="")
    assert listed(written) == ["sub/b.jpg: dog, sand & sun, sea", "sub/c.jpg:"]
    write(folder, {"sub/b.jpg": ["animal"]}, base=folder)
    assert texts((folder / "sub/b.xmp").read_bytes(), "subject") == [*KEYWORDS, "animal"]


def test_a_new_sidecar_has_the_keywords_of_the_photograph(folder):
    photograph(folder / "a.jpg", encode(packet(SEA)))
    digest = hashlib.sha256((folder / "a.jpg").read_bytes()).digest()
    write(folder, {"a.jpg": ["dog", "sea"]}, tree=TREE)
    content = (folder / "a.jpg.xmp").read_bytes()
    assert texts(content, "subject") == [*KEYWORDS, "dog"]
    assert texts(content, "levels") == [*KEYWORDS, "animal|dog"]
    assert hashlib.sha256((folder / "a.jpg").read_bytes()).digest() == digest


def test_damaged_xmp_in_the_photograph_is_no_obstacle(folder):
    photograph(folder / "a.jpg", b"<x")
    write(folder, {"a.jpg": ["dog"]})
    assert texts((folder / "a.jpg.xmp").read_bytes(), "subject") == ["dog"]


# ---------------------------------------------------------------------------------------------- what a person does
def test_a_label_that_a_person_removed_does_not_come_back(folder):
    path = folder / "a.jpg.xmp"
    write(folder, {"a.jpg": ["sea", "dog"]}, tree=TREE)
    text = path.read_text()
    for item in ("<rdf:li>dog</rdf:li>", "<rdf:li>animal|dog</rdf:li>"):
        start = text.index(item)
        text = text[:start] + text[start + len(item) :]
    path.write_text(text.replace("<rdf:li>sea</rdf:li>", "<rdf:li>sea</rdf:li><rdf:li>sky</rdf:li>", 1))
    write(folder, {"a.jpg": ["sea", "dog", "animal"]}, tree=TREE)
    assert texts(path.read_bytes(), "subject") == ["sea", "sky", "animal"]
    assert texts(path.read_bytes(), "levels") == ["sea", "animal"]
    assert texts(path.read_bytes(), "written") == ["sea", "dog", "animal"]
    assert listed(read(folder)) == ["a.jpg: animal, sea, sky"]


def test_all_labels_that_a_person_removed_leave_a_labeled_photograph(folder):
    write(folder, {"a.jpg": ["dog"]})
    path = folder / "a.jpg.xmp"
    text = path.read_text()
    start, end = text.index("<dc:subject"), text.index("</dc:subject>") + len("</dc:subject>")
    path.write_text(text[:start] + text[end:])
    assert write(folder, {"a.jpg": ["dog"]}) == "1 file had all labels already"
    photograph(folder / "b.jpg", encode(packet(SEA)))
    assert listed(read(folder)) == ["a.jpg:", "b.jpg: sand & sun, sea"]


def test_a_label_in_another_form_or_place_is_not_repeated(folder):
    (folder / "a.jpg.xmp").write_text(
        packet(
            array("dc:subject", "gru\u0308n <&>".replace("<&>", "&lt;&amp;&gt;")),
            array("lr:hierarchicalSubject", "pets|dog"),
        )
    )
    write(folder, {"a.jpg": ["grün <&>", "dog"]}, tree=TREE)
    content = (folder / "a.jpg.xmp").read_bytes()
    assert texts(content, "subject") == ["gru\u0308n <&>", "dog"]
    assert texts(content, "levels") == ["pets|dog", "grün <&>"]


def test_paths_of_a_tree(folder):
    tree = LabelTree(implies=((0, 1), (1, 2), (0, 3)))
    write(folder, {"a.jpg": ["sea", "animal"]}, tree=tree)
    assert texts((folder / "a.jpg.xmp").read_bytes(), "levels") == ["animal|dog|sea", "grün <&>|sea", "animal"]


def test_an_edit_at_the_same_time_is_kept(folder, monkeypatch):
    path = folder / "a.jpg.xmp"
    path.write_text(packet(SEA))
    label = FORMATS["xmp"].write.func.__globals__["_label_sidecar"]

    def edit_once(*given):
        content = label(*given)
        if not edits:
            edits.append(path.write_text(packet(SEA, attributes='xmp:Rating="5"')))
        return content

    edits = []
    monkeypatch.setitem(FORMATS["xmp"].write.func.__globals__, "_label_sidecar", edit_once)
    write(folder, {"a.jpg": ["dog"]})
    assert rest(path.read_bytes()) == rest(packet(attributes='xmp:Rating="5"').encode())
    assert texts(path.read_bytes(), "subject") == [*KEYWORDS, "dog"]


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("content", "says"),
    [("no XML", "a.jpg.xmp is damaged: syntax error"), ("<html/>", "a.jpg.xmp is damaged: it is no XMP")],
)
def test_a_sidecar_that_is_no_xmp_is_refused_before_anything_is_written(content, says, folder):
    photograph(folder / "b.jpg")
    (folder / "a.jpg.xmp").write_text(content)
    with pytest.raises(UserError, match=says):
        write(folder, {"b.jpg": ["dog"], "a.jpg": ["dog"]})
    assert not (folder / "b.jpg.xmp").exists()
    assert (folder / "a.jpg.xmp").read_text() == content


def test_a_link_to_a_sidecar_that_is_gone_stays(folder):
    (folder / "a.jpg.xmp").symlink_to("gone.xmp")
    with pytest.raises(UserError, match=r"cannot read .*a.jpg.xmp: No such file"):
        write(folder, {"a.jpg": ["dog"]})
    assert (folder / "a.jpg.xmp").is_symlink()


def test_names_and_places_that_xmp_cannot_have(folder):
    for file, says in (
        (LabelFile(epath.Path(folder), ("a|b",), ["a.jpg"]), r"cannot hold the label 'a\|b'"),
        (LabelFile("gs://bucket/x", ("a",), ["a.jpg"]), "no local folder"),
        (LabelFile(epath.Path(folder / "a.jpg"), ("a",), ["a.jpg"]), "a.jpg is a file"),
    ):
        with pytest.raises(UserError, match=says):
            FORMATS["xmp"].require(file)


def test_last_level():
    assert [xmp.last_level(text) for text in ("a|b", "a", "a | b ", "a|")] == ["b", "a", "b", ""]
