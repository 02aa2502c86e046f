import math

import numpy as np
import pytest
from helpers.scored_run import drawn_split, write_run, write_scores

from mlmoe_jax.data.split import Split
from mlmoe_jax.evaluation.evaluate import write_results
from mlmoe_jax.evaluation.results import SplitScores, read_labels, read_results, read_scores, require_split
from mlmoe_jax.runs.folder import LABELS, RESULTS, SCORES, RunFolder


def test_results_of_an_evaluation_are_read_back(tmp_path):
    folder = write_run(tmp_path / "run")
    scored = {}
    for seed, (name, rows) in enumerate({"val": 5, "test": 7}.items()):
        table = drawn_split(name, rows, seed=seed, codes=4)
        table.scores[2] = np.nan
        split = Split(name, ("a", "b", "c"), table.codes, table.ids.tolist(), np.zeros((rows, 2, 2, 3), np.uint8))
        scored[name] = SplitScores.of(split, table.scores)
    write_results(folder, {"val": {"mAP": 0.5, "OP@0.5": math.nan}, "test": {}}, scored, "abc", difficult="ignore")
    found = read_scores(folder)
    assert list(found) == ["val", "test"]
    for name, table in found.items():
        assert table.name == name
        assert table.ids.tolist() == scored[name].source.ids
        np.testing.assert_array_equal(table.scores, scored[name].scores)
        np.testing.assert_array_equal(table.codes, scored[name].source.labels)
        np.testing.assert_array_equal(np.flatnonzero(~table.read), [2])
        assert len(table.take(table.read)) == len(table) - 1
    results = read_results(folder)
    assert results["val"].pop("mAP") == 0.5
    assert math.isnan(results["val"]["OP@0.5"])


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


@pytest.mark.parametrize("what", ["cut off", "no key", "labels", "rows", "codes", "kind", "objects", "range"])
def test_damaged_scores(tmp_path, refusal, what):
    table = drawn_split("val", 4)
    folder = write_run(tmp_path / "run", table)
    arrays = {"ids": table.ids, "scores": table.scores, "labels": table.codes, "split": np.full(4, "val")}
    match what:
        case "cut off":
            folder.write_bytes(SCORES, (folder / SCORES).read_bytes()[:200])
        case "no key":
            del arrays["labels"]
        case "labels":
            arrays |= {"scores": table.scores[:, :2], "labels": table.codes[:, :2]}
        case "rows":
            arrays["ids"] = table.ids[:3]
        case "codes":
            arrays["labels"] = table.codes + 7
        case "kind":
            arrays["scores"] = table.scores.astype(str)
        case "range":
            arrays["scores"] = table.scores + 1.5
        case "objects":
            arrays["ids"] = table.ids.astype(object)
    if what != "cut off":
        folder.write_npz(SCORES, **arrays)
    assert f"{folder / SCORES} is damaged" in refusal(read_scores, folder)


@pytest.mark.parametrize("stored", [[], {"val": 0.5}, {"val": {"mAP": "high"}}, {"val": {"mAP": 10**400}}])
def test_damaged_results(tmp_path, refusal, stored):
    folder = write_run(tmp_path / "run")
    folder.write_json(RESULTS, stored)
    assert "results.json is damaged" in refusal(read_results, folder)
