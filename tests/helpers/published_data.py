"""Small folders in the layouts of published data sets; image k is k + 1 pixels wide."""

import json

from helpers.tables import write, write_images
from mlmoe_jax.data.sources.chest import OBSERVATIONS
from mlmoe_jax.data.sources.nuswide import CONCEPTS
from mlmoe_jax.data.sources.voc import VOC_CLASSES

# ----------------------------------------------------------------------------------------------------------------- VOC
VOC = {
    "train": {
        "2008_000002": "tvmonitor",
        "2007_000033": "aeroplane person ~car",  # ~ is before classes that are difficult
        "2008_000009": "",
        "2008_000007": "~boat",
    },
    "val": {"2008_000003": "train"},
}


def voc_mark(name: str, names: str) -> str:
    return " 1" if name in names.split() else " 0" if f"~{name}" in names else "-1"


def write_voc(root, splits=VOC, year=2012) -> None:
    """Write the lists and the images of splits {split: {image: classes}}, and those of trainval."""
    folder = root / f"VOCdevkit/VOC{year}"
    whole = {image: names for images in splits.values() for image, names in images.items()}
    for split, images in {**splits, "trainval": whole}.items():
        for name in VOC_CLASSES:
            text = "".join(f"{image} {voc_mark(name, names)}\n" for image, names in images.items())
            write(folder, f"ImageSets/Main/{name}_{split}.txt", text, ())
    write_images(folder / "JPEGImages", [f"{image}.jpg" for image in whole])


# ---------------------------------------------------------------------------------------------------------------- COCO
COCO_CATEGORIES = {"person": 1, "bottle": 44, "stop sign": 13}  # with gaps and out of order, as in the real file
COCO = {
    "train": {30: ["bottle", "bottle"], 9: ["stop sign"], 100: ["person", "stop sign"], 2000: []},
    "val": {42: ["person"]},
}


def coco_file(split, number) -> str:
    return f"COCO_{split}2014_{number:012d}.jpg"


def instances(images, categories=COCO_CATEGORIES) -> dict:
    """Return the content of an instances file for images {(id, file name): names of categories}."""
    return {
        "images": [{"id": number, "file_name": name} for number, name in images],
        "annotations": [
            {"image_id": number, "category_id": categories[label], "iscrowd": int(label == "person")}
            for (number, _), labels in images.items()
            for label in labels
        ],
        "categories": [{"id": number, "name": name} for name, number in categories.items()],
    }


def write_coco(root) -> None:
    for split, numbers in COCO.items():
        names = [coco_file(split, number) for number in numbers]
        content = instances(dict(zip(zip(numbers, names, strict=True), numbers.values(), strict=True)))
        write(root, f"annotations/instances_{split}2014.json", json.dumps(content), ())
        write_images(root / f"{split}2014", names)


# ------------------------------------------------------------------------------------------------------------ NUS-WIDE
NUSWIDE = {
    "Train": {"actor/0001_1.jpg": ("sky", "clouds"), "actor/0002_2.jpg": (), "zoo/0003_3.jpg": ("zebra",)},
    "Test": {"zoo/0004_4.jpg": ("airport",)},
}


def write_nuswide(root, merged=True) -> None:
    """Write all labels into one file per split, or into one file per concept and split."""
    for split, images in NUSWIDE.items():
        write(root, f"ImageList/{split}Imagelist.txt", "".join(f"{name}\r\n" for name in images).replace("/", "\\"), ())
        write_images(root / "Flickr", images)
        if merged:  # as published: every field is followed by a blank
            rows = ["".join(f"{int(name in names)} " for name in CONCEPTS) for names in images.values()]
            write(root, f"Groundtruth/Labels_{split}.txt", "\n".join(rows) + "\n", ())
            continue
        for name in CONCEPTS:
            column = "".join(f"{int(name in names)}\n" for names in images.values())
            write(root, f"Groundtruth/TrainTestLabels/Labels_{name}_{split}.txt", column, ())


# ------------------------------------------------------------------------------------------------------- Visual Genome
def objects_of(*names) -> list[dict]:
    return [{"synsets": ["x.n.01"], "object_id": 1, "names": [name], "x": 0, "y": 0, "w": 9, "h": 9} for name in names]


def write_genome(root) -> None:
    """Write 20 images with a label and one without, unordered, in both folders, and the lists of 500 labels."""
    content = [
        {"image_id": number, "image_url": "u", "objects": objects_of("Man", "tie" if number % 2 else "zzz")}
        for number in (*range(30, 20, -1), *range(2, 12))
    ]
    content.append({"image_id": 1, "objects": [*objects_of("unheard of"), {"names": []}]})
    write(root, "objects.json", json.dumps(content), ())
    places = [f"VG_100K/{number}.jpg" for number in range(1, 12)]
    write_images(root, [*places, *(f"VG_100K_2/{number}.jpg" for number in range(21, 31))])
    write(root, "train_list_500.txt", "3.jpg\n25.jpg\n2.jpg\n", ())
    write(root, "test_list_500.txt", "4.jpg\n", ())
    index = {"2.jpg": [], "3.jpg": [0, 499], "25.jpg": [7], "4.jpg": [1], "5.jpg": [2]}
    write(root, "vg_category_500_labels_index.json", json.dumps(index), ())


# --------------------------------------------------------------------------------------------------------- chest X-rays
NIH_TABLE = """Image Index,Finding Labels,Follow-up #,Patient ID,OriginalImage[Width,Height],
0.png,Hernia|Mass,0,1,2682,2749,
1.png,No Finding,1,1,2682,2749,
2.png,Effusion,0,2,2682,2749,
3.png,Pleural_Thickening,0,3,2682,2749,
"""


def write_chestxray14(root) -> None:
    write(root, "Data_Entry_2017.csv", NIH_TABLE, ())
    write(root, "train_val_list.txt", "3.png\n0.png\n1.png\n", ())
    write(root, "test_list.txt", "2.png", ())
    folders = ("images_001/images", "images_012/images", "images", "images_012/images")
    write_images(root, [f"{folder}/{k}.png" for k, folder in enumerate(folders)])


CHEXPERT = {
    "train": ("1.0,,,,,,,,,0.0,,,,1.0", ",,-1.0,1.0,,-1.0,0.0,,,,,,,", ",,,,,,-1.0,,,,,,,0.0"),
    "valid": ("0.0," * 13 + "1.0",),
}


def write_chexpert(root) -> None:
    header = ",".join(("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *OBSERVATIONS))
    for split, rows in CHEXPERT.items():
        places = [f"CheXpert-v1.0-small/{split}/patient{k:05}/study1/view1_frontal.jpg" for k in range(len(rows))]
        table = [header, *(f"{place},Male,60,Frontal,AP,{row}" for place, row in zip(places, rows, strict=True))]
        write(root, f"CheXpert-v1.0-small/{split}.csv", "\n".join(table), ())
        write_images(root, places)


WRITE = {
    "voc2012": write_voc,
    "coco2014": write_coco,
    "nuswide": write_nuswide,
    "vg256": write_genome,
    "vg500": write_genome,
    "chestxray14": write_chestxray14,
    "chexpert": write_chexpert,
}
