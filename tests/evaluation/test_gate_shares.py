"""The weight of gates on shared experts, against plain numpy."""

import numpy as np
import pytest

import mlmoe_jax.config as configuration
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.split import Split
from mlmoe_jax.evaluation import gate_shares
from mlmoe_jax.evaluation.evaluate import write_results
from mlmoe_jax.evaluation.gate_shares import collect, join, label_shares, shared_entries
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.runs.folder import RunFolder

NAMES = ("a", "b", "c", "d")


def drawn(name: str, rows: int, seed: int, *, static: bool = False) -> SplitScores:
    draw = np.random.default_rng(seed)
    codes = draw.choice([0, 1, -1, 2], (rows, 4), p=[0.5, 0.3, 0.1, 0.1]).astype(np.int8)
    images = ArrayImages(np.zeros((rows, 2, 2, 3), np.uint8))
    split = Split(name, NAMES, codes, [f"{name}/{row}" for row in range(rows)], images)
    shares = draw.uniform(0.5, 1, (1 if static else rows, 4)).astype(np.float32)
    return SplitScores.of(split, draw.random((rows, 4)), {"experts": shares})


def test_shares_of_batches_are_ordered_by_row_and_without_padding():
    rows, shares = np.array([3, 0, 4, 1, 2, -1]), np.arange(24, dtype=np.float32).reshape(6, 4)
    mask = np.array([1, 1, 0, 1, 1, 0])  # image 4 could not be read; the last one is padding
    outputs = [
        {"id": rows[part], "mask": mask[part], "shares": {"experts": shares[part], "still": shares[:1]}}
        for part in (slice(0, 3), slice(3, 6))
    ]
    found = collect(outputs, 5)
    np.testing.assert_array_equal(found["experts"][:4], shares[[1, 3, 4, 0]])
    assert np.isnan(found["experts"][4]).all()
    np.testing.assert_array_equal(found["still"], shares[:1])
    assert collect([{"id": rows, "mask": mask}], 5) == {}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("difficult", ["ignore", "positive"])
def test_means_per_label_against_a_loop(tmp_path, static, difficult):
    folder = RunFolder(tmp_path)
    scored = {"val": drawn("val", 5, 0, static=static), "test": drawn("test", 60, 1, static=static)}
    if not static:
        scored["test"].shares["experts"][5] = np.nan  # could not be read
    write_results(folder, {}, scored, NAMES, difficult="ignore")
    again = drawn("more", 7, 2)
    write_results(folder, {}, {"test": drawn("test", 7, 2), "more": again}, NAMES, difficult="ignore", prefix="eval/")
    found = label_shares(folder, "test", difficult=difficult)["experts"]  # those of the training
    stored = scored["val" if static else "test"].shares["experts"].astype(np.float64)
    shares = np.broadcast_to(stored, (60, 4))
    rows = [n for n in range(60) if static or n != 5]
    shows = np.isin(scored["test"].codes, (1, 2) if difficult == "positive" else (1,))
    for k in range(4):
        assert found.mean[k] == pytest.approx(np.mean([shares[n, k] for n in rows]))
        assert found.present[k] == pytest.approx(np.mean([shares[n, k] for n in rows if shows[n, k]]))
    later = label_shares(folder, "more", difficult=difficult)["experts"].mean
    np.testing.assert_allclose(later, again.shares["experts"].mean(axis=0), rtol=1e-6)
    assert label_shares(folder, "none", difficult=difficult) == {}


def test_a_split_of_one_image_does_not_stand_for_the_others():
    splits = [drawn("val", 1, 0), drawn("test", 5, 1)]
    shares = np.concatenate([split.shares["experts"] for split in splits])
    np.testing.assert_array_equal(join(splits)["shared/experts"], shares)


def test_runs_without_such_gates_and_damaged_files(tmp_path, refusal, monkeypatch):
    folder = RunFolder(tmp_path)
    plain = drawn("val", 5, 0)
    write_results(folder, {}, {"val": SplitScores.of(plain.source, plain.scores)}, NAMES, difficult="ignore")
    assert label_shares(folder, "val", difficult="ignore") == {}

    def damage() -> str:
        return refusal(label_shares, folder, "val", difficult="ignore")

    folder.write_bytes("gates.npz", b"PK")
    assert "gates.npz is damaged" in damage()
    arrays = {"labels": plain.codes, "split": np.full(5, "val")}
    folder.write_npz("gates.npz", **arrays, **{"shared/experts": np.zeros((4, 4), np.float32)})
    assert "gates.npz is damaged" in damage()
    monkeypatch.setattr(gate_shares, "USUAL", 1000)
    folder.write_npz("gates.npz", labels=np.zeros((1, 10_000_000), np.int8), split=np.full(1, "val"))
    assert "gates.npz is damaged: it would unpack to" in damage()


def test_shares_of_static_gates_may_unpack_to_as_much_as_the_scores(tmp_path, monkeypatch):
    monkeypatch.setattr(gate_shares, "USUAL", 1000)
    folder, codes = RunFolder(tmp_path), np.zeros((1000, 1000), np.int8)
    noise = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)  # does not compress, as scores do not
    folder.write_npz("scores.npz", scores=noise)
    shares = {"shared/experts": np.full((1, 1000), 0.5, np.float32)}
    folder.write_npz("gates.npz", labels=codes, split=np.full(1000, "val"), **shares)
    assert label_shares(folder, "val", difficult="ignore")["experts"].mean.tolist() == [0.5] * 1000


def test_the_entries_of_shared_experts():
    routed = configuration.load_config("configs/mlmoe_dinov2.py:dataset=digits", [])
    routed.model.head.routing.shared_experts, routed.model.head.routing.task_experts = 3, 2
    assert shared_entries(routed) == {"experts": (0, 1, 2)}
    routed.model.head.routing.task_experts = 0
    assert shared_entries(routed) == {}, "all weight is on shared experts"
    assert shared_entries(configuration.load_config("configs/mlvpt_digits.py", [])) == {}
