"""New names of labels in output: renamed, joined and left out, in every result."""

import logging

import numpy as np
import pytest
from helpers.color_model import HALVES, NAMES, color, expected, make_run
from helpers.refusals import Refusal, each

from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.output_names import OutputNames, read_output_names
from mlmoe_jax.inference.predictor import Predictor

TREE = LabelTree(((0, 1), (1, 2), (3, 2)))  # red implies green implies blue, and so does dark


def read(at, rename=None, leave_out=None, names=NAMES):
    paths = []
    for name, text in (("rename.csv", rename), ("leave_out.txt", leave_out)):
        (at / name).write_text(text or "")
        paths.append(at / name if text else "")
    return read_output_names(names, *paths)


@pytest.mark.parametrize(
    ("rename", "leave_out", "names", "sources"),
    [
        ("red,rot\n", None, ("rot", "green", "blue", "dark"), [0, 1, 2, 3]),
        ("red\ta, b\n\n", None, ("a, b", "green", "blue", "dark"), [0, 1, 2, 3]),
        ('red,"a, b"\n', None, ("a, b", "green", "blue", "dark"), [0, 1, 2, 3]),
        ("red,green\ngreen,red\n", None, ("green", "red", "blue", "dark"), [0, 1, 2, 3]),
        ("red,blue\n", None, ("blue", "green", "dark"), [0, 1, 0, 2]),
        ("*e*,x\nred,y\n[bd]*,z\n", None, ("y", "x", "z"), [0, 1, 1, 2]),
        (None, "dark\n", ("red", "green", "blue"), [0, 1, 2, -1]),
        ("red,rot\n", "rot\n?ark\n", ("green", "blue"), [-1, 0, 1, -1]),
        ("red,rot\n", "red\n", ("green", "blue", "dark"), [-1, 0, 1, 2]),
    ],
)
def test_names_of_files(rename, leave_out, names, sources, tmp_path):
    output = read(tmp_path, rename, leave_out)
    assert output.names == names
    assert output.sources.tolist() == sources


def test_a_label_with_the_name_of_a_pattern_is_that_label(tmp_path):
    assert read(tmp_path, leave_out="a*\n", names=("a*", "ab")).names == ("ab",)


def test_what_is_joined_left_out_and_unknown_is_said(tmp_path, capsys, caplog):
    caplog.set_level(logging.WARNING)
    read(tmp_path, "red,x\nblue,x\nzebra,y\n", "dark\nlion\n")
    said = capsys.readouterr().err + caplog.text
    assert "labels are joined to 1 name, with their highest score and their lowest threshold: x (red, blue)" in said
    assert "1 of 4 labels are left out" in said
    assert f"--rename={tmp_path}/rename.csv has 1 name of no label: zebra" in said
    assert f"--leave-out={tmp_path}/leave_out.txt has 1 name of no label: lion" in said


@each(
    [
        Refusal(f"{rename} {leave_out}", None, lambda at, given=(rename, leave_out): _read_beside(at, given), says)
        for rename, leave_out, says in (
            ('{"red": "x"}\n', None, "should be a table of names and new names"),
            ("red\n", None, "should be a table of names and new names"),
            ("red,a,b\n", None, "should be a table of names and new names"),
            ("red,\n", None, "should be a table of names and new names"),
            ("red,a\nred,b\n", None, "gives 'red' two new names, 'a' and 'b'"),
            ("\n", None, "has no names"),
            ("z*,x\n", None, "has the pattern 'z*', which no label matches"),
            (None, "z?\n", "has the pattern 'z?', which no label matches"),
            (None, "*\n", "leaves no label"),
            ("foo,x\nbar,y\n", None, "has only names of no label (foo, bar); the labels are red, green, blue, dark"),
            (None, "foo\n", "has only names of no label (foo); the labels are red, green, blue, dark"),
            ("red,a\x07\n", None, "has the label 'a\\x07'"),
        )
    ]
)
def test_refusals_of_output_names(case, tmp_path):
    case.check(tmp_path)


def _read_beside(at, given):
    """Read the files, which are not below `at`, whose files must stay."""
    (folder := at.parent / f"{at.name}_files").mkdir(exist_ok=True)
    return read(folder, *given)


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none: No such file"):
        read_output_names(NAMES, tmp_path / "none")


def test_values_are_joined():
    values = np.array([[0.1, 0.5, 0.3, 0.9], [0.7, 0.2, 0.6, 0.4]])
    output = OutputNames.of(["x", None, "x", "y"])
    np.testing.assert_array_equal(output.join(values), [[0.3, 0.9], [0.7, 0.4]])
    np.testing.assert_array_equal(output.join(values, np.minimum), [[0.1, 0.9], [0.6, 0.4]])
    assert output.are_joined
    assert output.kept.tolist() == [0, 2, 3]
    last = OutputNames.of(["x", "y", "z", None])
    np.testing.assert_array_equal(last.join(values), values[:, :3])
    same = OutputNames.of(list("abcd"))
    assert same.join(values) is values
    assert not same.are_joined


@pytest.mark.parametrize(
    ("labels", "implies"),
    [
        (["r", "g", "b", "d"], {("r", "g"), ("g", "b"), ("d", "b")}),
        (["r", None, "b", "d"], {("r", "b"), ("d", "b")}),
        (["r", "r", "b", None], {("r", "b")}),
        (["r", "g", None, None], {("r", "g")}),
    ],
)
def test_the_tree_of_the_names(labels, implies):
    output = OutputNames.of(labels)
    tree = output.prune(TREE)
    assert {(output.names[label], output.names[parent]) for label, parent in tree.implies} == implies


def test_joined_labels_that_imply_each_other_in_a_circle_are_refused():
    with pytest.raises(UserError, match=r"joined so that .* which is a cycle"):
        OutputNames.of(["x", "y", "x", "z"]).prune(TREE)


def test_a_predictor_labels_with_the_new_names(tmp_path):
    read(tmp_path, "red,warm\nblue,warm\n", "green\n")
    plain = Predictor(make_run(), HALVES | {"red": 0.9, "blue": 0.2})
    renamed = plain.rename(tmp_path / "rename.csv", tmp_path / "leave_out.txt")
    assert plain.names == NAMES
    assert renamed.names == ("warm", "dark")
    assert renamed.thresholds.tolist() == [0.2, 0.5]
    result = renamed(color(95, 200, 102))
    assert result.scores == pytest.approx({"warm": expected(0, 0, 102)[2], "dark": 0.5}, abs=1e-6)
    assert result.labels == ("warm", "dark")
    assert renamed(color(95, 200, 102), top_k=1).labels == ("warm",)
    with pytest.raises(UserError, match="top_k is 3"):
        renamed(color(0), top_k=3)
    with pytest.raises(UserError, match="gates are of one label, and --rename joins labels"):
        list(renamed.stream([color(0)], gates=True))


def test_gates_of_labels_that_are_left_out_are_left_out(tmp_path):
    read(tmp_path, "blue,azure\n", "red\n")
    renamed = Predictor(make_run(), HALVES).rename(tmp_path / "rename.csv", tmp_path / "leave_out.txt")
    (result,) = renamed.stream([color(51)], gates=True)
    np.testing.assert_allclose(result.gates["g"], [[0.25, 0.2], [0.5, 0.2], [0.75, 0.2]], atol=1e-6)
    assert renamed.names == ("green", "azure", "dark")
