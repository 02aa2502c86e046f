import math

import numpy as np
import pytest
from helpers.scored_run import drawn_split, write_run, write_scores

from mlmoe_jax.evaluation.results import SplitScores, read_labels, read_results, read_scores, require_split
from mlmoe_jax.runs.folder import LABELS, RESULTS, SCORES, RunFolder


def test_scores_and_results_are_read_back(tmp_path):
    written = {name: drawn_split(name, rows, seed=rows, codes=4) for name, rows in {"val": 5, "test": 7}.items()}
    for table in written.values():
        table.scores[2] = np.nan
    folder = write_run(tmp_path / "run", *written.values())
    folder.write_json(RESULTS, {"val": {"mAP": 0.5, "OP@0.5": math.nan}, "test": {}})
    found = read_scores(folder)
    assert list(found) == ["val", "test"]
    for name, table in found.items():
        assert (table.name, table.ids.tolist()) == (name, written[name].ids.tolist())
        np.testing.assert_array_equal(table.scores, written[name].scores.astype(np.float32))
        np.testing.assert_array_equal(table.codes, written[name].codes)
        np.testing.assert_array_equal(np.flatnonzero(~table.read), [2])
    assert read_results(folder)["val"] == pytest.approx({"mAP": 0.5, "OP@0.5": math.nan}, nan_ok=True)


def test_rows_columns_and_targets():
    codes = np.array([[1, 0, -1, 2], [0, 1, 2, 1]], np.int8)
    table = SplitScores("val", np.array(["x", "y"]), np.arange(8.0).reshape(2, 4) / 8, codes)
    turned = table.take(np.array([1, 0])).with_labels(np.array([3, 0]))
    assert (turned.name, turned.ids.tolist()) == ("val", ["y", "x"])
    np.testing.assert_array_equal(turned.scores, [[7 / 8, 4 / 8], [3 / 8, 0]])
    np.testing.assert_array_equal(turned.codes, [[1, 0], [2, 1]])
    label, mask = table.targets("ignore")
    np.testing.assert_array_equal(label, [[1, 0, 0, 0], [0, 1, 0, 1]])
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0], [1, 1, 0, 1]])


def test_splits_of_a_later_evaluation_are_added(tmp_path):
    old, new = drawn_split("test", 4), drawn_split("test", 6, seed=1)
    folder = write_run(tmp_path / "run", old)
    write_scores(folder, new, drawn_split("other", 3), prefix="eval/")
    folder.write_json(RESULTS, {"test": {"mAP": 0.25}})
    folder.write_json(f"eval/{RESULTS}", {"test": {"mAP": 1.0}, "other": {"mAP": 0.75}})
    found = read_scores(folder)
    assert {name: len(table) for name, table in found.items()} == {"test": 4, "other": 3}
    assert read_results(folder) == {"test": {"mAP": 0.25}, "other": {"mAP": 0.75}}
    (folder / SCORES).unlink()
    (folder / RESULTS).unlink()
    assert {name: len(table) for name, table in read_scores(folder).items()} == {"test": 6, "other": 3}
    assert read_results(folder)["test"] == {"mAP": 1.0}


def test_one_split_by_name(tmp_path, refusal):
    folder = write_run(tmp_path / "run", drawn_split("val", 4))
    found = read_scores(folder)
    assert require_split(folder, found, "val") is found["val"]
    text = refusal(require_split, folder, found, "vla")
    assert "has scores of val, not of vla; run --mode=eval" in text
    assert "--config.data.test_splits=vla" in text


def test_names_of_labels_are_split_only_at_newlines(tmp_path, refusal):
    folder = write_run(tmp_path / "run", names=["traffic light", "caf\u00e9\u2028x", "c"])
    assert read_labels(folder) == ("traffic light", "caf\u00e9\u2028x", "c")
    (folder / LABELS).unlink()
    assert "no labels.txt" in refusal(read_labels, folder)


def test_a_folder_without_results(tmp_path, refusal):
    for read, name in ((read_scores, SCORES), (read_results, RESULTS)):
        assert "there is no run folder" in refusal(read, RunFolder(tmp_path / "none"))
        assert f"has no {name}; run --mode=eval --workdir=" in refusal(read, write_run(tmp_path / "run"))


WRONG = {
    "labels": lambda table: {"scores": table.scores[:, :2], "labels": table.codes[:, :2]},
    "rows": lambda table: {"ids": table.ids[:3]},
    "codes": lambda table: {"labels": table.codes + 7},
    "kind": lambda table: {"scores": table.scores.astype(str)},
    "range": lambda table: {"scores": table.scores + 1.5},
    "objects": lambda table: {"ids": table.ids.astype(object)},
}


@pytest.mark.parametrize("what", ["cut off", "no key", *WRONG])
def test_damaged_scores(tmp_path, refusal, what):
    table = drawn_split("val", 4)
    folder = write_run(tmp_path / "run", table)
    arrays = {"ids": table.ids, "scores": table.scores, "labels": table.codes, "split": np.full(4, "val")}
    if what == "cut off":
        folder.write_bytes(SCORES, (folder / SCORES).read_bytes()[:200])
    elif what == "no key":
        folder.write_npz(SCORES, ids=table.ids)
    else:
        folder.write_npz(SCORES, **arrays | WRONG[what](table))
    assert f"{folder / SCORES} is damaged" in refusal(read_scores, folder)


@pytest.mark.parametrize("stored", [[], {"val": 0.5}, {"val": {"mAP": "high"}}, {"val": {"mAP": 10**400}}])
def test_damaged_results(tmp_path, refusal, stored):
    folder = write_run(tmp_path / "run")
    folder.write_json(RESULTS, stored)
    assert "results.json is damaged" in refusal(read_results, folder)
