"""Tables, published data sets and packed data."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

from etils.epath import Path as EPath
from hypothesis import strategies as st

import mlmoe_jax.config as configuration
from mlmoe_jax.data.sources import packed
from mlmoe_jax.data.sources.labeling_formats import FORMATS, LabelEntry, LabelFile
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.main import main
from tools.fuzz.hostile import (
    Case,
    Silent,
    damaged,
    damaged_csv,
    damaged_json,
    damaged_npz,
    encoded,
    read_all,
    write,
)

CSV = b"image,labels,split\n0.png,sea;sand,train\n1.png,,train\nb/2.png,sun,val\n"
WIDE = b"image,sea,sand\n0.png,1,0\n1.png,,1\nb/2.png,0,1.0\n"
JSONL = b'{"image": "0.png", "labels": ["sea"]}\n{"image": "1.png", "labels": {"sea": 0, "sun": null}}\n'
# As the labeling tools write them, with the same images and labels.
CHOICES = {"from_name": "labels", "type": "choices", "value": {"choices": ["sea", "sand"]}}
LABELED = {
    "label_studio": [
        {"data": {"image": "/data/local-files/?d=0.png"}, "annotations": [{"result": [CHOICES], "ground_truth": True}]},
        {"image": "1.png", "annotation_id": 2, "labels": {"choices": ["sun", "sea"]}},
    ],
    "fiftyone": {"classes": ["sea", "sun"], "labels": {"0": [1, {"label": 0, "attributes": {}}], "b/2": None}},
    "cvat": b"<annotations><meta><task><labels><label><name>sea</name></label></labels></task></meta>"
    b"<image name='0.png' subset='train'><tag label='sea'><attribute name='difficult'>true</attribute></tag></image>"
    b"</annotations>",
    "wd_tagger": b"tag_id,name,category,count\n1,deep_sea,0,2\n2,sun,0,1\n",
}
RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
PACKETS = [
    f"<x:xmpmeta xmlns:x='adobe:ns:meta/'><rdf:RDF xmlns:rdf='{RDF}'><rdf:Description rdf:about='' "
    f"xmlns:dc='http://purl.org/dc/elements/1.1/' {attribute}>{content}</rdf:Description></rdf:RDF></x:xmpmeta>"
    for attribute, content in (
        ("", "<dc:subject><rdf:Bag><rdf:li>sea</rdf:li><rdf:li>a|b</rdf:li></rdf:Bag></dc:subject>"),
        ("dc:subject='sea'", "<dc:title>t</dc:title>"),
        ("", "<dc:subject/><!-- x --><dc:subject>sea</dc:subject>"),
    )
]
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
        write(place / name, encoded())


def encoded_json(content) -> bytes:
    return content if isinstance(content, bytes) else json.dumps(content).encode()


def tables(draw: st.DrawFn, base: Path, place: Path) -> Case:
    own_images(place)
    kind = draw(st.sampled_from(("csv", "wide", "jsonl", "json", "classes", *LABELED)))
    name = {"jsonl": "jsonl"}.get(kind, "csv")
    content = {"wide": WIDE, "jsonl": JSONL}.get(kind, CSV)
    keys = {"bad_images": draw(st.sampled_from(("skip", "error"))), "images": "", "table": "t"}
    keys["group_column"] = "image" if draw(st.booleans()) else ""
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
    elif kind in LABELED:
        name, content = kind, LABELED[kind]
        content = (damaged if isinstance(content, bytes) else damaged_json)(draw, encoded_json(content))
    else:
        content = damaged_csv(draw, content)
    if kind == "wd_tagger":
        write(place / "t/selected_tags.csv", content)
        write(place / "t/0.txt", damaged(draw, b"deep sea, sun"))
    else:
        write(place / "t", content)
    return f"{kind} {content[:200]!r}", partial(open_all, data_of(place, name, **keys), "train")


def keywords(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """XMP in a sidecar and in a photograph, which are read, and get a label."""
    encoding = draw(st.sampled_from(("utf-8", "utf-16", "utf-16-be", "latin-1")))
    sidecar = damaged(draw, draw(st.sampled_from(PACKETS)).encode(encoding))
    write(place / "0.jpg", encoded("JPEG", xmp=damaged(draw, draw(st.sampled_from(PACKETS)).encode())[:60_000]))
    write(place / draw(st.sampled_from(("0.jpg.xmp", "0.xmp", "1.xmp"))), sidecar)
    file = LabelFile(EPath(place), ("sea", "sun"), ["0.jpg"], str(place))

    def act() -> None:
        form = FORMATS["xmp"]
        form.require(file)
        form.write(file, [LabelEntry("0.jpg", {"sun": 1})])
        split = open_split(data_of(place, "keywords"), "train")
        if "sun" not in split.classes:
            raise Silent(f"the label is not in {split.classes}")

    return repr(sidecar[:200]), act


def published(draw: st.DrawFn, base: Path, place: Path) -> Case:
    """The published data sets, in their layouts."""
    name = draw(st.sampled_from(("voc2007", "nuswide", "coco2014", "vg256", "vg500", "chestxray14", "chexpert")))
    shutil.copytree(base / name, place, dirs_exist_ok=True)
    path = draw(st.sampled_from(sorted(path for path in place.rglob("*") if path.is_file() and path.suffix != ".jpg")))
    content = (damaged_json if path.suffix == ".json" else damaged)(draw, path.read_bytes())
    path.write_bytes(content)
    keys = {"bad_images": "skip", "keep_empty": name != "vg256" and draw(st.booleans())}
    return f"{path.name} {content[:150]!r}", partial(open_all, data_of(place, name, **keys), "train")


def prepare_published(base: Path) -> None:
    from mlmoe_jax.data.sources import chest, nuswide, visual_genome, voc

    for name in voc.VOC_CLASSES:
        write(base / f"voc2007/VOC2007/ImageSets/Main/{name}_train.txt", b"000001 1\n000002 -1\n000003  0\n")
    write(base / "voc2007/VOC2007/JPEGImages/000001.jpg", encoded("JPEG"))
    write(base / "nuswide/ImageList/TrainImagelist.txt", b"a\\1.jpg\nb\\2.jpg\n")
    write(base / "nuswide/ConceptsList/Concepts81.txt", "\n".join(nuswide.CONCEPTS).encode())
    write(base / "nuswide/Groundtruth/Labels_Train.txt", b"1 " * 81 + b"\n" + b"0 " * 81 + b"\n")
    write(base / "nuswide/Flickr/a/1.jpg", encoded("JPEG"))
    write(base / "coco2014/annotations/instances_train2014.json", json.dumps(COCO).encode())
    write(base / "coco2014/train2014/0.png", encoded())
    objects = [{"image_id": n, "objects": [{"names": ["large brown dog"]}, {"names": ["tree."]}]} for n in (1, 2, 3, 4)]
    write(base / "vg256/objects.json", json.dumps(objects).encode())
    write(base / "vg256/VG_100K/1.jpg", encoded("JPEG"))
    write(base / "vg500/train_list_500.txt", b"1.jpg\n2.jpg\n")
    write(base / "vg500" / visual_genome.INDEX_500, json.dumps({"1.jpg": [0, 17], "2.jpg": [3]}).encode())
    write(base / "vg500/VG_100K/1.jpg", encoded("JPEG"))
    rows = b"Image Index,Finding Labels,Patient ID\n1.png,Mass|Hernia,1\n2.png,No Finding,2\n"
    write(base / "chestxray14/Data_Entry_2017.csv", rows)
    write(base / "chestxray14/train_val_list.txt", b"1.png\n2.png\n")
    write(base / "chestxray14/images/1.png", encoded())
    header, place = ",".join(("Path", *chest.OBSERVATIONS)), "train/patient1/study1/view1_frontal.jpg"
    write(base / "chexpert/train.csv", f"{header}\nCheXpert-v1.0/{place},,-1.0{',' * 11}0.0,1.0\n".encode())
    write(base / f"chexpert/{place}", encoded("JPEG"))


def prepare_packed(base: Path) -> None:
    own_images(base / "files")
    write(base / "files/t.csv", b"image,labels,split\n0.png,sea,train\n1.png,sea;sun,val\n")
    data = [
        f"--config.data.{key}"
        for key in ("name=csv", f"root={base}/files", "table=t.csv", "val_split=val", "test_splits=()")
    ]
    code = main(["--mode=pack", "--config=mlvpt_digits", *data, f"--output={base}/set"])
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
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
