"""The share of gates on shared experts, and DR-MoE's claim about it, against plain numpy."""

import math

import numpy as np
import pytest

import mlmoe_jax.config as configuration
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.labels.grouping import cooccurrence
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.data.split import Split
from mlmoe_jax.evaluation import gate_shares
from mlmoe_jax.evaluation.evaluate import write_results
from mlmoe_jax.evaluation.gate_shares import (
    GateShares,
    ImageShares,
    LabelCompany,
    SplitShares,
    claimed_correlations,
    collect,
    join,
    label_company,
    measure_shares,
    rank_correlation,
    read_shares,
)
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.inference.gate_statistics import shared_entries
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
def test_gates_are_stored_with_the_results(tmp_path, static):
    folder = RunFolder(tmp_path)
    scored = {"val": drawn("val", 5, 0, static=static), "test": drawn("test", 7, 1, static=static)}
    write_results(folder, {}, scored, NAMES, difficult="ignore")
    found = read_shares(folder)
    assert list(found) == ["val", "test"]
    np.testing.assert_array_equal(found["test"].codes, scored["test"].codes)
    expected = scored["val" if static else "test"].shares["experts"]
    np.testing.assert_array_equal(found["test"].shares["experts"], expected)
    assert set(join(list(scored.values()))) == {"shared/experts"}
    again = drawn("test", 7, 2)
    write_results(folder, {}, {"test": again, "more": again}, NAMES, difficult="ignore", prefix="eval/")
    both = read_shares(folder)
    assert list(both) == ["val", "test", "more"]
    np.testing.assert_array_equal(both["test"].shares["experts"], expected, err_msg="those of the training first")


def test_a_split_of_one_image_does_not_stand_for_the_others():
    splits = [drawn("val", 1, 0), drawn("test", 5, 1)]
    shares = np.concatenate([split.shares["experts"] for split in splits])
    np.testing.assert_array_equal(join(splits)["shared/experts"], shares)


def test_runs_without_such_gates_and_damaged_files(tmp_path, refusal):
    folder = RunFolder(tmp_path)
    plain = drawn("val", 5, 0)
    write_results(folder, {}, {"val": SplitScores.of(plain.source, plain.scores)}, NAMES, difficult="ignore")
    assert read_shares(folder) == {}
    folder.write_bytes("gates.npz", b"PK")
    assert "gates.npz is damaged" in refusal(read_shares, folder)
    codes, of = plain.codes, np.full(5, "val")
    folder.write_npz("gates.npz", labels=codes, split=of, **{"shared/experts": np.zeros((4, 4), np.float32)})
    assert "its shares do not fit" in refusal(read_shares, folder)


def test_shares_that_unpack_to_far_more_than_the_file_are_refused(tmp_path, refusal, monkeypatch):
    monkeypatch.setattr(gate_shares, "USUAL", 1000)
    folder, wide = RunFolder(tmp_path), np.zeros((1, 1_000_000), np.int8)
    folder.write_npz("gates.npz", labels=wide, split=np.full(1, "val"))
    assert "gates.npz is damaged: it would unpack to" in refusal(read_shares, folder)


def test_shares_of_static_gates_may_unpack_to_as_much_as_the_scores(tmp_path, monkeypatch):
    monkeypatch.setattr(gate_shares, "USUAL", 1000)
    folder, codes = RunFolder(tmp_path), np.zeros((1000, 1000), np.int8)
    noise = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)  # does not compress, as scores do not
    folder.write_npz("scores.npz", scores=noise)
    shares = {"shared/experts": np.full((1, 1000), 0.5, np.float32)}
    folder.write_npz("gates.npz", labels=codes, split=np.full(1000, "val"), **shares)
    assert read_shares(folder)["val"].codes.shape == (1000, 1000)


def test_the_entries_of_shared_experts():
    routed = configuration.load_config("configs/mlmoe_dinov2.py:dataset=digits", [])
    routed.model.head.routing.shared_experts, routed.model.head.routing.task_experts = 3, 2
    assert shared_entries(routed) == {"experts": (0, 1, 2)}
    routed.model.head.routing.task_experts = 0
    assert shared_entries(routed) == {}, "all weight is on shared experts"
    assert shared_entries(configuration.load_config("configs/mlvpt_digits.py", [])) == {}


# ---------------------------------------------------------------------------------------------------------- the shares
def test_means_per_label_and_per_image_against_a_loop():
    scored = drawn("test", 60, 3)
    shares = scored.shares["experts"].astype(np.float64)
    shares[5] = np.nan
    [found] = measure_shares(SplitShares("test", scored.codes, {"experts": shares}), difficult="positive")
    rows = [n for n in range(60) if n != 5]
    shows = np.isin(scored.codes, (1, 2))
    for k in range(4):
        assert found.mean[k] == pytest.approx(np.mean([shares[n, k] for n in rows]))
        assert found.present[k] == pytest.approx(np.mean([shares[n, k] for n in rows if shows[n, k]]))
        assert found.with_label[k] == sum(shows[n, k] for n in rows)
    for at, n in enumerate(rows):
        own = [shares[n, k] for k in range(4) if shows[n, k]]
        assert found.images.all[at] == pytest.approx(shares[n].mean())
        assert found.images.labels[at] == len(own)
        assert found.images.own[at] == pytest.approx(np.mean(own)) if own else math.isnan(found.images.own[at])


def test_static_gates_have_nothing_per_image():
    scored = drawn("test", 30, 4, static=True)
    fixed = scored.shares["experts"].astype(np.float64)
    for shares in (fixed, np.repeat(fixed, 30, axis=0)):
        [found] = measure_shares(SplitShares("test", scored.codes, {"experts": shares}), difficult="negative")
        assert found.images is None
        np.testing.assert_allclose(found.mean, fixed[0])
        np.testing.assert_allclose(found.present, fixed[0])


def test_the_co_occurrence_of_labels():
    codes = (np.random.default_rng(5).random((80, 4)) < 0.4).astype(np.int8)
    codes[:, 3] = 0
    zeros = np.zeros(4, np.int32)
    space = LabelSpace(NAMES, *cooccurrence(codes), 80, zeros, zeros)
    found = label_company(space)
    for a in range(3):
        given = [(codes[:, a] & codes[:, b]).sum() / codes[:, a].sum() for b in range(4) if b != a]
        assert found.mean[a] == pytest.approx(np.mean(given))
        assert found.largest[a] == pytest.approx(max(given))
    assert math.isnan(found.mean[3])
    assert math.isnan(found.largest[3])


# ---------------------------------------------------------------------------------------------------- the correlations
def ranks(values: np.ndarray) -> np.ndarray:
    """Mean ranks, counted one by one."""
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def test_rank_correlation_by_hand():
    draw = np.random.default_rng(6)
    x = draw.integers(0, 5, 40).astype(float)
    y = x + draw.normal(0, 2, 40)
    found = rank_correlation(np.append(x, np.nan), np.append(y, 1.0))
    rho = np.corrcoef(ranks(x), ranks(y))[0, 1]
    assert (found.rho, found.count) == (pytest.approx(rho), 40)
    reach = 1.959963984540054 * math.sqrt((1 + rho**2 / 2) / 37)
    assert found.low == pytest.approx(math.tanh(math.atanh(rho) - reach))
    assert found.high == pytest.approx(math.tanh(math.atanh(rho) + reach))
    shuffled = [abs(np.corrcoef(ranks(x), draw.permutation(ranks(y)))[0, 1]) for _ in range(2000)]
    assert found.p == pytest.approx(np.mean(np.array(shuffled) >= abs(rho)), abs=0.02)


def test_rank_correlations_that_are_undefined():
    assert math.isnan(rank_correlation([1, 1, 1, 1], [1, 2, 3, 4]).rho)
    assert math.isnan(rank_correlation([1, 2], [1, 2]).rho)
    perfect = rank_correlation([1, 2, 3, 4, 5], [2, 3, 4, 5, 6])
    assert perfect.rho == pytest.approx(1)
    assert math.isnan(perfect.low)


def test_the_claim_in_data_that_follow_it():
    draw = np.random.default_rng(7)
    company = LabelCompany(np.linspace(0, 0.5, 30), np.linspace(0.1, 0.9, 30))
    labels = draw.integers(0, 6, 500)
    own = np.where(labels, 0.9 - 0.01 * labels, np.nan)
    images = ImageShares(0.8 + 0.01 * labels + draw.normal(0, 0.01, 500), own, labels)
    shares = GateShares("experts", company.mean + 0.3, -company.mean, np.ones(30, int), images)
    found = claimed_correlations(shares, company)
    assert [(claim.over, claim.correlation.count) for claim in found] == [
        *[("labels", 30)] * 4,
        ("images", 500),
        ("images", int((labels > 0).sum())),
    ]
    signs = [np.sign(claim.correlation.rho) for claim in found]
    assert signs == [1, 1, -1, -1, 1, -1]
    assert found[4].correlation.low > 0
    still = GateShares("experts", shares.mean, shares.present, shares.with_label, None)
    assert {claim.over for claim in claimed_correlations(still, company)} == {"labels"}
