import numpy as np
import pytest
from helpers.tables import jsonl, lines, write

from mlmoe_jax.data.sources.tables import open_table


def test_labels_are_lists_or_objects_of_names(tmp_path):
    text = lines(
        {"image": "a.png", "labels": ["dog", "cat", "dog"]},
        {"image": "b.png", "labels": {"cat": 0, "dog": None, "cow": 1}},
        {"image": "sub/c.png", "labels": []},
    )
    write(tmp_path, "train.jsonl", "\ufeff" + text.replace("\n", "\n\n", 1))
    split = open_table(jsonl(tmp_path), "train")
    assert split.classes == ("cat", "cow", "dog")
    assert split.ids == ["a.png", "b.png", "sub/c.png"]
    np.testing.assert_array_equal(split.labels, [[1, 0, 1], [0, 1, -1], [0, 0, 0]])
    split = open_table(jsonl(tmp_path), "train", classes=["dog", "cow", "cat", "elk"])
    np.testing.assert_array_equal(split.labels, [[1, 0, 1, 0], [-1, 1, 0, -1], [0, 0, 0, 0]])


def test_other_keys_can_be_set(tmp_path):
    write(tmp_path, "train.jsonl", lines({"file": "a.png", "tags": {"x": True, "y": 0.0}}))
    split = open_table(jsonl(tmp_path, image_column="file", label_column="tags"), "train")
    assert split.labels.tolist() == [[1, 0]]


@pytest.mark.parametrize(
    "row",
    [
        {"image": 5, "labels": []},
        {"image": "b.png", "labels": "dog"},
        {"image": "b.png", "labels": None},
        {"image": "b.png", "labels": [1]},
        {"image": "b.png", "labels": [""]},
        {"image": "b.png", "labels": {"dog": 2}},
        {"image": "b.png", "labels": {"dog": "1"}},
        {"image": "b.png", "labels": {"dog": []}},
    ],
)
def test_objects_of_another_form_are_refused(tmp_path, refusal, row):
    write(tmp_path, "train.jsonl", lines({"image": "a.png", "labels": ["dog"]}, row))
    sentence = refusal(open_table, jsonl(tmp_path), "train")
    assert sentence.startswith(f"{tmp_path}/train.jsonl line 2 should be a JSON object with a path under 'image', ")


@pytest.mark.parametrize("text", ['{"image": ', '{"image": "a.png"}', "[]", "5", '"a"', "[" * 100_000])
def test_lines_that_are_not_objects_are_refused(tmp_path, refusal, text):
    write(tmp_path, "train.jsonl", f'{{"image": "a.png", "labels": []}}\n{text}\n')
    sentence = refusal(open_table, jsonl(tmp_path), "train")
    assert sentence.startswith(f"{tmp_path}/train.jsonl line 2 should be a JSON object with a path under 'image', and ")
