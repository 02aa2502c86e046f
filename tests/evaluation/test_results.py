import io
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.scored_run import SETTINGS, drawn_split, stored_scores, write_results, write_run

from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.data.labels.grouping import cooccurrence
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.evaluation.results import write_rows
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.decisions import Thresholds, write_thresholds
from mlmoe_jax.runs.folder import PER_CLASS


def test_scores_and_results_are_read_back(tmp_path):
    written = {name: drawn_split(name, rows, seed=rows, codes=4) for name, rows in {"val": 5, "test": 7}.items()}
    for table in written.values():
        table.scores[2] = np.nan
    written["val"] = replace(written["val"], groups=np.array(["p", "", "q", "p", ""]))
    folder = write_run(tmp_path / "run")
    write_results(folder, {"val": {"mAP": 0.5, "OP@0.5": math.nan}, "test": {}}, *written.values())
    found = stored_scores(folder)
    assert list(found) == ["val", "test"]
    for name, table in found.items():
        assert (table.name, table.ids.tolist()) == (name, written[name].ids.tolist())
        np.testing.assert_array_equal(table.scores, written[name].scores.astype(np.float32))
        np.testing.assert_array_equal(table.codes, written[name].codes)
        np.testing.assert_array_equal(np.flatnonzero(~table.read), [2])
    taken = found["val"].take(np.array([2, 0])).with_labels(np.array([1, 0]))
    assert (taken.ids.tolist(), taken.groups.tolist()) == (found["val"].ids[[2, 0]].tolist(), ["q", "p"])
    np.testing.assert_array_equal(taken.codes, written["val"].codes[[2, 0]][:, [1, 0]])
    assert found["test"].groups is None
    assert StoredRun(folder).metrics["val"] == pytest.approx({"mAP": 0.5, "OP@0.5": math.nan}, nan_ok=True)


def test_a_later_evaluation_replaces_its_splits(tmp_path):
    folder = write_run(tmp_path / "run")
    write_results(folder, {"test": {"mAP": 0.25}, "test_shift": {"mAP": 0.5}}, drawn_split("test", 4))
    later = replace(SETTINGS, threshold=0.25)
    new, other = drawn_split("test", 6, seed=1), drawn_split("train/a", 3)
    write_results(folder, {"test": {"mAP": 1.0}}, new, other, settings=later, keep_others=True)
    assert {name: len(table) for name, table in stored_scores(folder).items()} == {"test": 6, "train/a": 3}
    assert StoredRun(folder).metrics == {"test": {"mAP": 1.0}, "test_shift": {"mAP": 0.5}, "train/a": {}}
    results = StoredRun(folder).results
    assert results["test"].settings == later, "settings are stored with the metrics"
    assert results["test_shift"].settings == SETTINGS
    write_results(folder, {"val": {"mAP": 0.75}})
    assert StoredRun(folder).metrics == {"val": {"mAP": 0.75}}, "a training replaces all results"


def test_only_the_results_of_a_training_finish_it(tmp_path):
    folder = write_run(tmp_path / "run")
    assert StoredRun(folder).final_metrics is None
    write_results(folder, {"test": {"mAP": 0.25}}, finished=False)
    assert StoredRun(folder).final_metrics is None
    write_results(folder, {"test": {"mAP": 0.5}})
    assert StoredRun(folder).final_metrics == {"test": {"mAP": 0.5}}


def test_rows_of_a_split_are_replaced(tmp_path):
    folder, columns = write_run(tmp_path / "run"), ["split", "label", "AP"]
    write_rows(folder, PER_CLASS, columns, [["val", "a", 0.5], ["test", "=b", math.nan]], None)
    write_rows(folder, PER_CLASS, columns, [["val", "a", 0.25]], ["val"])
    assert folder.read_text(PER_CLASS).splitlines() == ["split,label,AP", "test,'=b,", "val,a,0.25"]
    write_rows(folder, PER_CLASS, columns, [], ["test", "val"])
    assert not (folder / PER_CLASS).exists()


def test_names_of_labels_are_split_only_at_newlines(tmp_path):
    folder = write_run(tmp_path / "run", names=["traffic light", "caf\u00e9\u2028x", "c"])
    assert StoredRun(folder).labels == ("traffic light", "caf\u00e9\u2028x", "c")


def run_with_tree(path, **keys) -> StoredRun:
    """A run in which a implies b, with thresholds and one unreadable image."""
    split, groups = drawn_split("val"), np.zeros(3, np.int32)
    split.scores[1] = np.nan
    folder = write_run(path, split, **keys)
    with io.BytesIO() as file:
        LabelSpace(
            tuple("abc"), *cooccurrence(split.codes), len(split), groups, groups, tree=LabelTree(((0, 1),))
        ).save(file)
        folder.write_bytes("label_space.npz", file.getvalue())
    write_thresholds(folder, Thresholds.fixed("abc", 0.5))
    return StoredRun(folder)


def test_reported_scores_are_of_readable_images_and_agree_with_the_tree_unless_a_key_says_otherwise(tmp_path):
    run = run_with_tree(tmp_path / "agreeing")
    raw = run.split("val").readable().scores
    reported = run.correct(raw)
    assert len(reported) == len(run.split("val")) - 1
    assert (raw[:, 0] > raw[:, 1]).any()
    assert (reported[:, 0] <= reported[:, 1]).all()
    run = run_with_tree(tmp_path / "raw", eval__consistent=False)
    np.testing.assert_array_equal(run.correct(raw), raw)
