import copy
import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers.runs import recipe
from helpers.scored_run import stored_metrics, write_results

from mlmoe_jax.apps.tools import prune as pruning
from mlmoe_jax.apps.tools.prune import Level, make_levels, measure_importance, prune, pruned_config
from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.data.pipeline import build_loader
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.models.adapters import prompts
from mlmoe_jax.models.apply import apply_model
from mlmoe_jax.runs import restore
from mlmoe_jax.runs.assemble import assemble, preprocess_for
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import Run, open_run
from mlmoe_jax.runtime.sharding import make_mesh
from mlmoe_jax.training.objective import Objective, training_labels

TOKENS = np.array([0.3, -0.5, 0.1, 0.9])
LEVELS = ("tokens=0.25,segments=0.5", "tokens=0.5,segments=0.5")
SEGMENTS = np.array([[4, 3, 2, 1], [1, 2, 3, 4], [-1, -2, -3, -4], [0, 9, 0, 9]], float)


def levels_of(token_levels, segment_levels):
    settings = default_config().prune
    settings.token_levels, settings.segment_levels = token_levels, segment_levels
    return make_levels({"tokens": TOKENS, "segments": SEGMENTS}, settings)


# ---------------------------------------------------------------------------------------------------------- levels
def test_the_least_important_are_pruned_first_and_equal_masks_appear_once():
    (level,) = levels_of((0.5,), (0.25,))
    assert level == Level("tokens=0.5,segments=0.25", "1001", ("1110", "0111", "1110", "0111"))
    found = levels_of((0.0, 0.25, 0.26, 0.5), (0.0,))
    assert [level.kept_tokens for level in found] == ["1111", "1011", "1001"]
    assert {level.kept_segments for level in found} == {("1111",) * 4}
    (level,) = levels_of((0.99,), (0.99,))
    assert level.kept_tokens == "0001", "at least one prompt is kept, and a quarter of its segments"
    assert [row.count("1") for row in level.kept_segments] == [1] * 4


def test_the_config_of_a_level_has_its_masks():
    config = load_config("e2vpt:dataset=digits,prompts=4", [])
    (level,) = levels_of((0.5,), (0.25,))
    pruned = pruned_config(config, level)
    assert pruned.model.prompts.pruning == "fixed"
    assert pruned.model.prompts.kept_tokens == "1001"
    assert pruned.model.prompts.kept_segments == ("1110", "0111", "1110", "0111")
    assert config.model.prompts.pruning == "none"


@pytest.mark.slow
def test_a_level_starts_from_the_initial_values_of_the_search(config):
    search, (level,) = copy.deepcopy(config), levels_of((0.5,), (0.25,))
    search.model.prompts.pruning = "learned"
    space = synthetic_label_space(10, 1)
    first, again = (assemble(one, space) for one in (search, pruned_config(config, level)))
    masks = {"prompts/token_mask", "prompts/segment_mask"}
    assert set(first.trainable) == set(again.trainable) | masks
    assert set(again.frozen) == set(first.frozen) | masks
    values = {**first.trainable, **first.frozen}
    for path, value in {**again.trainable, **again.frozen}.items():
        assert np.array_equal(value, values[path]) == (path not in masks), path


# ---------------------------------------------------------------------------------------------- the whole procedure
@pytest.fixture
def config(runs, monkeypatch):
    """E2VPT on digits, with prompts of four segments."""
    monkeypatch.setattr(prompts, "SEGMENTS", 4)
    with runs.world():
        yield recipe("pruned")


@pytest.mark.slow
def test_all_stages_run_and_the_best_level_on_validation_is_chosen(run):
    folder, _, results, _ = run("pruned")
    table = folder.read_text("prune.csv").splitlines()
    assert table[0] == "level,prompts,segments,val/mAP,test/mAP"
    rows = [line.split(",") for line in table[1:]]
    assert [(int(row[-4]), int(row[-3])) for row in rows] == [(3, 24), (2, 16)]
    best = max(rows, key=lambda row: float(row[-2]))
    assert float(best[-2]) == results["val"]["mAP"]
    chosen = open_run(folder)
    assert chosen.config.model.prompts.pruning == "fixed"
    kept = chosen.config.model.prompts.kept_tokens
    assert kept.count("1") == int(best[-4])
    np.testing.assert_array_equal(chosen.frozen["prompts/token_mask"], [float(digit) for digit in kept])
    assert "prompts/deep" in chosen.values
    for name in LEVELS:
        mask = np.asarray(open_run(RunFolder(folder / f"prune/levels/{name}")).frozen["prompts/segment_mask"])
        assert mask.sum(axis=1).tolist() == [8, 8, 8, 8], "training does not change it"
    measured = measure_importance(open_run(RunFolder(folder / "prune/search")))
    stored = np.load(folder / "prune/importance.npz")
    for name in ("tokens", "segments"):
        np.testing.assert_allclose(stored[name], measured[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_finished_stages_are_not_repeated_and_another_choice_replaces_the_files(run, tmp_path, monkeypatch):
    """A checkpoint of another level with a higher step would be restored in place of the chosen one."""
    folder, config, results, _ = run("pruned").copy(tmp_path / "run")
    for name in ("train", "measure_importance"):
        monkeypatch.setattr(pruning, name, lambda *_, **__: pytest.fail("repeated"))
    (folder / "mine.txt").write_text("of the user")
    (folder / "checkpoints" / "99").mkdir()
    assert prune(config, folder) == results
    assert not (folder / "checkpoints" / "99").exists()
    assert (folder / "mine.txt").exists()
    for level, kept in zip(LEVELS, (3, 2), strict=True):
        pruning._adopt_level(folder, RunFolder(folder / f"prune/levels/{level}"))
        assert open_run(folder).config.model.prompts.kept_tokens.count("1") == kept


def test_the_level_is_chosen_by_the_metric_that_selects(config, tmp_path, monkeypatch, capsys):
    chosen = copy.deepcopy(config)
    chosen.eval.select_metric, chosen.prune.token_levels = "mAP_envelope", (0.25, 0.5, 0.75)
    figures = iter([(0.5, 0.5), (0.2, np.nan), (0.3, 0.9), (0.8, 0.4)])  # of the search and the three levels

    def train(config, folder):
        results = {"val": dict(zip(("mAP", "mAP_envelope"), next(figures), strict=True))}
        write_results(folder, results)
        return results

    monkeypatch.setattr(pruning, "train", train)
    monkeypatch.setattr(pruning, "_importance_once", lambda *_: {"tokens": TOKENS, "segments": SEGMENTS})
    folder = RunFolder(tmp_path)
    assert prune(chosen, folder) == {"val": {"mAP": 0.3, "mAP_envelope": 0.9}}
    assert stored_metrics(folder)["val"]["mAP"] == 0.3
    assert folder.read_text("prune.csv").splitlines()[0] == "level,prompts,segments,val/mAP,val/mAP_envelope"
    assert "chosen by mAP_envelope on val: tokens=0.5,segments=0.5" in capsys.readouterr().err


@pytest.fixture
def searched(config, drawn_parts):
    """A run with learned masks and random values, as if trained; its dropout shows whether it is in training mode."""
    config = copy.deepcopy(config)
    config.model.prompts.pruning, config.model.prompts.dropout = "learned", 0.2
    config.loss.kind = "bce"  # the asymmetric loss detaches a factor, so its gradient is not a derivative
    space, mesh = replace(synthetic_label_space(10, 1), names=tuple("0123456789")), make_mesh(config.mesh)
    parts = drawn_parts(config, space)
    values = {**parts.trainable, **parts.stats}
    placed = {"definition": parts.definition, "preprocess": preprocess_for(config), "mesh": mesh}
    return Run(config, space, values, parts.frozen, {"step": 1}, **placed)


def losses_of(run):
    """A function that returns the training loss of some values, the mean over the batches of an epoch."""
    config, size = run.config, run.config.train.batch_size
    split = open_split(config.data, "train", seed=config.seed)
    loader = build_loader(config.data, split, batch_size=size, augment=config.augment, seed=config.seed)
    batches = list(itertools.islice(loader, len(split) // size))
    objective = Objective(config.loss, training_labels(config, split.labels))

    @jax.jit
    def loss(values, batch, key):
        prediction, _ = apply_model(run, {**values, **run.frozen}, batch, key=key)
        return objective(prediction, batch)[0]

    return lambda values: np.mean([loss(values, batch, jax.random.key(n)) for n, batch in enumerate(batches)])


@pytest.mark.slow
def test_importance_is_the_mean_gradient_of_the_training_loss(searched):
    """Compared with finite differences of the loss over the same batches, with the same dropout.

    The importance of a whole prompt follows from `test_the_importance_of_a_prompt_is_that_of_its_segments`; it is too
    small for differences in float32.
    """
    measured, loss, step = measure_importance(searched), losses_of(searched), 0.03
    assert measured["tokens"].shape == (4,)
    assert measured["segments"].shape == (4, 4)
    path, mask = "prompts/segment_mask", searched.values["prompts/segment_mask"]
    for place in ((0, 3), (1, 2), (1, 3), (2, 0), (3, 2)):
        ahead, behind = (loss({**searched.values, path: mask.at[place].add(by)}) for by in (step, -step))
        np.testing.assert_allclose(measured["segments"][place], (ahead - behind) / (2 * step), atol=0.02, rtol=0.02)


def test_the_importance_of_a_prompt_is_that_of_its_segments(searched):
    """The mask of a prompt scales the same values as the masks of its segments, which relates their gradients."""
    measured, values = measure_importance(searched), jax.device_get(searched.values)
    tied = (measured["segments"] * values["prompts/segment_mask"]).sum(axis=1)
    np.testing.assert_allclose(tied, measured["tokens"] * values["prompts/token_mask"], rtol=1e-3, atol=1e-6)


def test_positives_that_the_training_does_not_know_are_hidden(searched):
    before = measure_importance(searched)["segments"]
    searched.config.data.known_positives, searched.config.loss.unknown = "one", "negative"
    assert not np.allclose(measure_importance(searched)["segments"], before, rtol=1e-2)


def test_a_split_smaller_than_a_batch_has_an_importance(searched, monkeypatch):
    """It trains, so the refusal would come only after the search."""
    whole = open_split(searched.config.data, "train", seed=0)
    monkeypatch.setattr(restore, "open_split", lambda *_, **__: whole.take(np.arange(7), "train"))
    measured = measure_importance(searched)
    assert all(np.abs(measured[name]).max() > 0 for name in ("tokens", "segments"))
