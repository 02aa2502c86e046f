"""Categories of labels: the file, the label space that keeps them, and the metrics."""

import io

import numpy as np
import pytest
from helpers.scored_run import drawn_split

from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.grouping import cooccurrence
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.sources.label_categories import read_categories
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.decisions.threshold_fit import fit_thresholds
from mlmoe_jax.evaluation.measure import measure
from mlmoe_jax.evaluation.metrics.multilabel import average_precision, precision_recall_f1
from mlmoe_jax.evaluation.metrics.threshold_search import best_thresholds

KINDS = ("x", "y", "x")


def space_of(codes, categories=KINDS) -> LabelSpace:
    groups = np.zeros(3, np.int32)
    return LabelSpace(tuple("abc"), *cooccurrence(codes), len(codes), groups, groups, categories=categories)


def test_a_file_gives_each_label_a_category_and_says_what_it_does_not_use(tmp_path, capsys):
    path = tmp_path / "kinds.csv"
    path.write_text("category,label\nplace,beach\nspecies, gull \nplace,cliff\n")
    assert read_categories(path, ("gull", "beach")) == ("species", "place")
    assert "1 label that the data has not: cliff" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("label,category\na,x\n", "no category for 1 label: b; add"),
        ("label,category\na,x\nb,\n", "no category for 1 label: b; add"),
        ("label,category\na,x\nb,y\na,y\n", "names the label 'a' twice"),
        ("label,kind\na,x\n", "category"),
    ],
)
def test_refusals(tmp_path, text, words):
    path = tmp_path / "kinds.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_categories(path, ("a", "b"))
    with pytest.raises(UserError):
        read_categories(tmp_path / "none.csv", ("a",))


def test_the_label_space_keeps_them():
    file = io.BytesIO()
    space = space_of(drawn_split().codes)
    space.save(file)
    stored = dict(np.load(io.BytesIO(file.getvalue())))
    read = LabelSpace.from_arrays(stored)
    assert read.categories == KINDS
    assert {name: labels.tolist() for name, labels in read.labels_by_category().items()} == {"x": [0, 2], "y": [1]}
    with pytest.raises(ValueError, match="do not fit"):
        LabelSpace.from_arrays({**stored, "categories": np.array(["x"])})
    assert space_of(drawn_split().codes, ()).labels_by_category() == {}


def test_the_metrics_of_a_category_are_those_of_its_labels():
    split, config = drawn_split(rows=80, codes=4), default_config()
    metrics = measure(split, space_of(split.codes), config)
    valid = split.codes != -1
    for name, labels in {"x": [0, 2], "y": [1]}.items():
        scores, truth, known = split.scores[:, labels], split.codes[:, labels] == 1, valid[:, labels]
        assert metrics[f"category/{name}/mAP"] == average_precision(scores, truth, mask=known).mean()
        expected = precision_recall_f1(scores >= 0.5, truth, mask=known)
        assert metrics[f"category/{name}/CF1@0.5"] == expected["CF1"]
        assert metrics[f"category/{name}/OF1@0.5"] == expected["OF1"]
    assert not [name for name in measure(split, space_of(split.codes, ()), config) if name.startswith("category/")]


def test_a_category_has_one_threshold():
    split, config = drawn_split(rows=80), default_config()
    config.thresholds.per, config.data.categories = "category", "kinds.csv"
    found = fit_thresholds(split, "abc", config, categories=space_of(split.codes).labels_by_category())
    truth = split.codes == 1
    both = best_thresholds(split.scores[:, [0, 2]], truth[:, [0, 2]], per="global")
    one = best_thresholds(split.scores[:, [1]], truth[:, [1]], per="global")
    assert list(found.values.values()) == [both[0], one[0], both[1]]
    assert found.source["shared"] == []
    split.codes[:, 1] = np.arange(80) < 3
    few = fit_thresholds(split, "abc", config, categories=space_of(split.codes).labels_by_category())
    assert few.source["shared"] == ["b"]
    assert few.values["b"] == best_thresholds(split.scores, split.codes == 1, per="global")[0]
