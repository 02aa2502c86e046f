"""Attributes, of whose values an image has one: what tables, lists of names and labeling tools say of them."""

import json

import numpy as np
import pytest
from PIL import Image

from mlmoe_jax.config import default_config
from mlmoe_jax.data.attributes import AttributeValues
from mlmoe_jax.data.label_tree import Attribute, LabelTree
from mlmoe_jax.data.sources.corrections import correct_labels
from mlmoe_jax.data.sources.labeling_formats import FORMATS, LabelEntry, LabelFile
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.errors import UserError

COLORS = "color: [red, blue, white]\n"
WEATHER = "weather: {values: [sunny, rain], optional: true}\n"


@pytest.fixture
def opened(tmp_path):
    """Return the split of a table whose attributes are columns, or of a YAML file."""

    def opened(text: str, *, columns: str = "", yaml: str = "", name: str = "csv", **keys):
        for number in range(4):
            Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.jpg")
        (tmp_path / "table").write_text(text)
        (tmp_path / "a.yaml").write_text(yaml)
        data = default_config().data
        table = {"name": name, "root": str(tmp_path), "table": "table", "attributes": "a.yaml" if yaml else columns}
        data.update(table | {"val_split": "", "test_splits": ()} | keys)
        return open_split(data, "train")

    return opened


def named(split) -> list[dict[str, int]]:
    """Return label -> code of each image, without negative labels."""
    return [
        {name: code for name, code in zip(split.classes, row, strict=True) if code}
        for row in np.asarray(split.labels).tolist()
    ]


TABLE = "image,labels,color,weather\n0.jpg,dog,red,sunny\n1.jpg,,blue,\n2.jpg,cat;dog,,none\n"


def test_columns_have_values(opened):
    split = opened(TABLE.replace("none", "rain"), columns="color,weather")
    assert split.classes == ("cat", "color: blue", "color: red", "dog", "weather: rain", "weather: sunny")
    assert named(split) == [
        {"dog": 1, "color: red": 1, "weather: sunny": 1},
        {"color: blue": 1, "weather: rain": -1, "weather: sunny": -1},
        {"cat": 1, "dog": 1, "color: blue": -1, "color: red": -1, "weather: rain": 1},
    ]
    assert split.tree.attributes == (Attribute("color", (1, 2)), Attribute("weather", (4, 5)))
    assert split.usage[0].notes == [f"has 1 image of train whose {name} is unknown" for name in ("color", "weather")]


def test_a_cell_of_spaces_is_unknown():
    cells = {"color": "  ", "size": None}
    values = AttributeValues({"color": ("red", "blue"), "size": ("big", "small")})
    assert values.read_cells(cells) == dict.fromkeys(values.labels, -1)


def test_a_file_has_values_without_images_and_optional_attributes(opened):
    split = opened(TABLE, yaml=COLORS + WEATHER)
    assert named(split)[2] == {"cat": 1, "dog": 1, "weather: none": 1} | dict.fromkeys(
        ("color: blue", "color: red", "color: white"), -1
    )
    assert named(split)[1] == {"color: blue": 1} | dict.fromkeys(
        ("weather: none", "weather: rain", "weather: sunny"), -1
    )
    assert split.tree.attributes[1] == Attribute("weather", (7, 6, 5), optional=True)


FORMS = {
    "names": ("image,labels\n0.jpg,dog;red\n1.jpg,color: blue;sunny\n", {}),
    "columns per class": ("image,dog,red,blue,sunny\n0.jpg,1,1,0,0\n1.jpg,0,0,1,1\n", {"label_column": ""}),
    "objects": (
        '{"image": "0.jpg", "labels": ["dog"], "color": "red"}\n'
        '{"image": "1.jpg", "color": "blue", "labels": ["sunny"]}\n',
        {"name": "jsonl"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_labels_are_values_in_all_forms(opened, form):
    text, keys = FORMS[form]
    assert named(opened(text, yaml=COLORS + WEATHER, **keys)) == [
        {"dog": 1, "color: red": 1, "weather: none": 1},
        {"color: blue": 1, "weather: sunny": 1},
    ]


def test_a_table_may_have_attributes_alone(opened):
    assert named(opened("image,color\n0.jpg,red\n1.jpg,blue\n", columns="color")) == [
        {"color: red": 1},
        {"color: blue": 1},
    ]


@pytest.mark.parametrize(
    ("text", "keys", "reason"),
    [
        (
            "image,labels\n0.jpg,red\n1.jpg,blue;red\n",
            {"yaml": COLORS},
            "table line 3 (1.jpg) has color: blue and color",
        ),
        (
            "image,color\n0.jpg,red\n1.jpg,pink\n",
            {"yaml": COLORS},
            "line 3 has the label 'color: pink', which is no value",
        ),
        ("image,color\n0.jpg,red\n1.jpg,nan\n", {"columns": "color"}, "which is not one value"),
        ("image,color\n0.jpg,red\n1.jpg,red;blue\n", {"columns": "color"}, "which is not one value"),
        ("image,color\n0.jpg,red\n1.jpg,red\n", {"columns": "color"}, "has one value in the data"),
        ("image,labels\n0.jpg,red\n1.jpg,blue\n", {"columns": "colour"}, "colour of data.attributes has no value"),
        (
            "image,labels\n0.jpg,yes\n",
            {"yaml": "hat: [yes, no]\nbag: [yes, no]\n"},
            "which may be hat: yes or bag: yes",
        ),
        ("image,labels\n0.jpg,red\n", {"yaml": "color: red\n"}, "has another form"),
        ("image,labels\n0.jpg,red\n", {"yaml": "color: [red, red]\n"}, "has a value of color twice"),
        ("image,labels\n0.jpg,red\n", {"columns": "color: x"}, "has ': '"),
    ],
)
def test_what_is_no_attribute_is_refused(opened, text, keys, reason):
    with pytest.raises(UserError) as error:
        opened(text, **keys)
    assert reason in str(error.value)


def test_a_tree_must_not_contradict_an_attribute():
    names, attribute = ("dark", "color: red", "color: blue"), (Attribute("color", (1, 2)),)
    assert LabelTree(((0, 1),), (), attribute).find_contradiction(names) == ""
    both = LabelTree(((0, 1), (0, 2)), (), attribute).find_contradiction(names)
    assert "are exclusive, but dark implies color: red and color: blue" in both
    assert LabelTree((), (), (*attribute, Attribute("other", (0, 1)))).find_contradiction(names)


def test_an_attribute_is_stored():
    tree = LabelTree(((0, 1),), (), (Attribute("a", (1, 2)), Attribute("b", (3, 4), optional=True)))
    assert LabelTree.load(tree.dump(), "vwxyz") == tree
    with pytest.raises(ValueError, match="other labels"):
        LabelTree.load(tree.dump(), "vwx")


def test_a_model_knows_the_values():
    values = AttributeValues({"color": ()}).known_by(["dog", "color: red", "color: blue"])
    with pytest.raises(ValueError, match="no value of color"):
        values.spell("color: pink")


def test_a_corrected_value_replaces_the_given_one(opened, tmp_path):
    split = opened("image,color\n0.jpg,red\n1.jpg,blue\n", columns="color")
    (tmp_path / "s.csv").write_text("image,label,suggested,accept\n0.jpg,color: blue,1,yes\n")
    corrected = correct_labels(split, tmp_path / "s.csv", split.tree.attributes).close_labels(split.tree)
    assert named(corrected) == [{"color: blue": 1}, {"color: blue": 1}]


@pytest.mark.parametrize("form", ["label_studio", "cvat"])
def test_labeling_tools_have_one_choice_per_attribute(opened, tmp_path, form):
    split = opened(TABLE, yaml=COLORS + WEATHER)
    path = tmp_path / f"labels{FORMATS[form].suffix}"
    labels = [{name: 1 for name, code in row.items() if code == 1} for row in named(split)]
    entries = [LabelEntry(name, row) for name, row in zip(split.ids, labels, strict=True)]
    FORMATS[form].write(LabelFile(path, split.classes, split.ids, tree=split.tree), entries)
    if form == "label_studio":
        [first, *_] = json.loads(path.read_text())
        chosen = {r["from_name"]: r["value"]["choices"] for r in first["annotations"][0]["result"]}
        assert chosen == {"color": ["red"], "labels": ["dog"], "weather": ["sunny"]}
        configuration = (tmp_path / "labels_config.xml").read_text()
        assert '<Choices name="color" toName="image" choice="single">' in configuration
    else:
        assert '<attribute name="color">red</attribute>' in path.read_text()
        assert "<input_type>radio</input_type>" in path.read_text()
    assert named(opened(path.read_text(), yaml=COLORS + WEATHER, name=form)) == [
        {**row, **{name: code for name, code in given.items() if code == -1 and name.startswith("color")}}
        | ({} if any(name.startswith("weather") for name in row) else {"weather: none": 1})
        for row, given in zip(labels, named(split), strict=True)
    ]
