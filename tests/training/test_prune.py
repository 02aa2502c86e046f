import copy

import jax
import numpy as np
import pytest
from helpers import tiny

from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import open_run
from mlmoe_jax.training import prune as pruning
from mlmoe_jax.training.prune import Level, at_level, make_levels, measure_importance, prune

TOKENS = np.array([0.3, -0.5, 0.1, 0.9])
SEGMENTS = np.array([[4, 3, 2, 1], [1, 2, 3, 4], [-1, -2, -3, -4], [0, 9, 0, 9]], float)


def levels_of(token_levels, segment_levels, keep_segments=1):
    settings = default_config().prune
    settings.token_levels, settings.segment_levels = token_levels, segment_levels
    settings.keep_segments = keep_segments
    return make_levels({"tokens": TOKENS, "segments": SEGMENTS}, settings)


# ---------------------------------------------------------------------------------------------------------- levels
def test_the_least_important_go_first_with_their_sign():
    (level,) = levels_of((0.5,), (0.25,))
    assert level == Level("tokens=0.5,segments=0.25", "1001", ("1110", "0111", "1110", "0111"))


def test_levels_are_cumulative_and_the_same_masks_are_trained_once():
    found = levels_of((0.0, 0.25, 0.26, 0.5), (0.0,))
    assert [level.kept_tokens for level in found] == ["1111", "1011", "1001"]
    assert {level.kept_segments for level in found} == {("1111",) * 4}


def test_something_stays():
    (level,) = levels_of((0.99,), (0.99,), keep_segments=3)
    assert level.kept_tokens == "0001"
    assert [row.count("1") for row in level.kept_segments] == [3] * 4


def test_the_config_of_a_level_starts_again_with_its_masks():
    config = load_config("e2vpt:dataset=digits,prompts=4", [("model.prompts.segments", "4")])
    (level,) = levels_of((0.5,), (0.25,))
    pruned = at_level(config, level)
    assert pruned.model.prompts.pruning == "fixed"
    assert pruned.model.prompts.kept_tokens == "1001"
    assert pruned.model.prompts.kept_segments == ("1110", "0111", "1110", "0111")
    assert config.model.prompts.pruning == "none"


# ------------------------------------------------------------------------------------------------- the whole of it
@pytest.fixture(scope="module")
def config():
    """E2VPT on digits with a backbone of one narrow block, a training of three steps."""
    with pytest.MonkeyPatch.context() as patch:
        tiny.use_vit(patch, patch=16, mlp_ratio=1.0)
        small = load_config("e2vpt:dataset=digits,prompts=4,key_values=2", [])
        small.model.backbone.weights, small.model.prompts.segments = "none", 4
        tiny.use_scenes(patch, train=60, val=40, test=40, test_shift=40)
        small.train.epochs, small.train.batch_size, small.eval.batch_size = 1, 20, 40
        small.data.test_splits = ("test",)
        small.prune.token_levels, small.prune.segment_levels = (0.25, 0.5), (0.5,)
        small.prune.keep_segments = 1
        yield small


@pytest.fixture(scope="module")
def pruned(config, tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("pruned"))
    return folder, prune(config, folder)


@pytest.mark.slow
def test_all_stages_are_there_and_the_best_on_validation_is_taken(pruned):
    folder, results = pruned
    table = folder.read_text("prune.csv").splitlines()
    assert table[0] == "level,prompts,segments,val/mAP,test/mAP"
    rows = [line.split(",") for line in table[1:]]
    assert [(int(row[-4]), int(row[-3])) for row in rows] == [(3, 6), (2, 4)]
    best = max(rows, key=lambda row: float(row[-2]))
    assert float(best[-2]) == results["val"]["mAP"]
    run = open_run(folder)
    assert run.config.model.prompts.pruning == "fixed"
    kept = run.config.model.prompts.kept_tokens
    assert kept.count("1") == int(best[-4])
    np.testing.assert_array_equal(run.frozen["prompts/token_mask"], [float(digit) for digit in kept])
    assert "prompts/deep" in run.values


@pytest.mark.slow
def test_finished_stages_are_not_done_again(pruned, config, monkeypatch):
    folder, results = pruned
    for name in ("train", "measure_importance"):
        monkeypatch.setattr(pruning, name, lambda *_, **__: pytest.fail("done again"))
    again = prune(config, folder)
    assert again["val"]["mAP"] == results["val"]["mAP"]


@pytest.mark.slow
def test_a_level_starts_from_the_first_initial_values(pruned):
    folder, _ = pruned
    search, level = (
        open_run(RunFolder(folder / name)) for name in ("prune/search", "prune/levels/tokens=0.5,segments=0.5")
    )
    assert search.config.seed == level.config.seed
    assert set(search.values) - set(level.values) == {"prompts/token_mask", "prompts/segment_mask"}


@pytest.mark.slow
def test_importance_is_the_mean_gradient_of_the_masks(pruned):
    """Against finite differences of the loss, over the same batches."""
    folder, _ = pruned
    run = open_run(RunFolder(folder / "prune/search"))
    measured = measure_importance(run)
    assert measured["tokens"].shape == (4,)
    assert measured["segments"].shape == (4, 4)
    stored = np.load(folder / "prune/importance_signed.npz")
    np.testing.assert_allclose(stored["tokens"], measured["tokens"], rtol=1e-4, atol=1e-6)
    absolute = measure_importance(run, how="absolute")
    assert (absolute["tokens"] >= np.abs(measured["tokens"]) - 1e-9).all()
    # a prompt's mask scales what its segments' masks scale: the gradients are tied
    values = jax.device_get(run.values)
    tied = (measured["segments"] * values["prompts/segment_mask"]).sum(axis=1)
    np.testing.assert_allclose(tied, measured["tokens"] * values["prompts/token_mask"], rtol=1e-3, atol=1e-6)


# ------------------------------------------------------------------------------------------------------ bad inputs
def test_what_cannot_be_pruned_is_refused_before_anything_is_written(config, tmp_path, refusal):
    folder = RunFolder(tmp_path / "new")
    other = load_config("vpt:dataset=digits", [])
    assert "configs/e2vpt.py" in refusal(prune, other, folder)
    unchosen, masked = copy.deepcopy(config), copy.deepcopy(config)
    unchosen.eval.select_on = "none"
    assert "eval.select_on" in refusal(prune, unchosen, folder)
    masked.model.prompts.pruning = "learned"
    assert "model.prompts.pruning" in refusal(prune, masked, folder)
    odd = copy.deepcopy(config)
    odd.prune.token_levels = (1.0,)
    assert "prune.token_levels" in refusal(prune, odd, folder)
    assert not (tmp_path / "new").exists()


def test_another_config_in_the_same_folder_is_refused(pruned, config, refusal):
    other = copy.deepcopy(config)
    other.seed = 5
    assert "seed was 0 and is 5" in refusal(prune, other, pruned[0])


def test_the_masks_of_a_level_stay_as_they_are_in_training(pruned):
    folder, _ = pruned
    for name in ("tokens=0.25,segments=0.5", "tokens=0.5,segments=0.5"):
        run = open_run(RunFolder(folder / f"prune/levels/{name}"))
        mask = np.asarray(run.frozen["prompts/segment_mask"])
        assert mask.sum(axis=1).tolist() == [2, 2, 2, 2]
