"""Prune the prompts of E2VPT (E2VPT, sec. 3.3).

1. Train with a learned mask value for every prompt and every segment of a prompt.
2. Measure the importance of each mask value.
3. For every level of pruning, set the masks of the least important prompts and segments to 0. Restart from the
   same initial values, and train with constant masks.
4. Choose the level with the best `eval.select_metric` on the selection split, and copy its files to the folder of the
   pruning.

Each training has its own run folder. Finished trainings are not repeated, so the same command resumes a stopped
pruning.
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import Results
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.models.adapters.catalog import prompts_class
from mlmoe_jax.runs.folder import CHECKPOINTS, CONFIG, RunFolder
from mlmoe_jax.runs.restore import Run, open_run
from mlmoe_jax.runtime import distributed
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.training.loop import require_trainable, train
from mlmoe_jax.training.mean_gradient import mean_gradient
from mlmoe_jax.training.resume import config_of_run
from mlmoe_jax.training.selection import selection_split

# Names in the run folder. The trainings have folders of their own below STAGES.
STAGES, LEVELS_TABLE = "prune", "prune.csv"
SEARCH, LEVELS, IMPORTANCE = f"{STAGES}/search", f"{STAGES}/levels", f"{STAGES}/importance.npz"
MASK_PATHS = {"tokens": "prompts/token_mask", "segments": "prompts/segment_mask"}


@dataclass(frozen=True)
class Level:
    """A level of pruning: which prompts and segments of prompts are kept.

    Attributes:
      name: the name of the run folder of the level.
      kept_tokens: one digit per prompt, 1 = kept and 0 = pruned; the value of `config.model.prompts.kept_tokens`.
      kept_segments: for each prompt one digit per segment; the value of `config.model.prompts.kept_segments`.
    """

    name: str
    kept_tokens: str
    kept_segments: tuple[str, ...]


def prune(config: ConfigDict, folder: RunFolder) -> Results:
    """Run the whole pruning procedure in a run folder, and return the metrics of the best level, as fractions.

    Raises:
      UserError: the config has no prunable prompts or no selection split, or the folder holds a run of another mode.
      loop.Stopped: SIGTERM or Ctrl-C stopped the current training, which was saved.
    """
    _require_prunable(config)
    if (folder / CONFIG).exists() and not (folder / STAGES).exists():
        raise UserError(f"{folder} holds a run of another mode, which pruning would replace; choose another --workdir")
    search = copy.deepcopy(config)
    search.model.prompts.pruning = "learned"
    with folder.writing_by_first():
        _train_once(search, folder.below(SEARCH), "training with learned masks")
        results = _train_levels(config, folder, make_levels(_importance_once(folder), config.prune))
        split, metric = selection_split(config), config.eval.select_metric
        best = max(results, key=lambda level: np.nan_to_num(results[level][split][metric], nan=-np.inf))
        status(f"chosen by {metric} on {split}: {best.name}")
        if distributed.is_first():
            _adopt_level(folder, _level_folder(folder, best))
    return results[best]


def _train_levels(config: ConfigDict, folder: RunFolder, levels: Sequence[Level]) -> dict[Level, Results]:
    """Train each level, and return level -> metrics. The table prune.csv is written after each training."""
    results: dict[Level, Results] = {}
    for number, level in enumerate(levels, start=1):
        title = f"level {number} of {len(levels)}, {level.name}"
        results[level] = _train_once(pruned_config(config, level), _level_folder(folder, level), title)
        if distributed.is_first():
            _write_table(folder, results, config.eval.select_metric)
    return results


def _level_folder(folder: RunFolder, level: Level) -> RunFolder:
    return folder.below(f"{LEVELS}/{level.name}")


def _adopt_level(folder: RunFolder, best: RunFolder) -> None:
    """Copy the files of the best level to the run folder, after removing checkpoints copied from another level."""
    (folder / CONFIG).unlink(missing_ok=True)
    if (folder / CHECKPOINTS).exists():
        folder.inside(CHECKPOINTS).rmtree()
    folder.adopt(best)


def pruned_config(config: ConfigDict, level: Level) -> ConfigDict:
    """Return a copy of a config that trains with the masks of a level, which are constant."""
    pruned = copy.deepcopy(config)
    prompts = pruned.model.prompts
    prompts.pruning, prompts.kept_tokens, prompts.kept_segments = "fixed", level.kept_tokens, level.kept_segments
    return pruned


def make_levels(importance: dict[str, np.ndarray], prune_config: ConfigDict) -> list[Level]:
    """Return the levels of pruning for all combinations of a fraction of prompts and a fraction of segments to prune.

    Prompts with the lowest `importance` (see `measure_importance`) are pruned first. Segments are ranked separately
    within each prompt. At least one prompt is kept, and at least a quarter of the segments of each prompt, because the
    authors keep 4 of 16. Of several levels with equal masks, only the first is returned. `prune_config` is
    `config.prune`.
    """
    levels: dict[tuple, Level] = {}
    for tokens, segments in itertools.product(prune_config.token_levels, prune_config.segment_levels):
        kept_tokens = _mask_text(importance["tokens"], tokens, at_least=1)
        kept_segments = tuple(
            _mask_text(row, segments, at_least=max(1, len(row) // 4)) for row in importance["segments"]
        )
        name = f"tokens={tokens:g},segments={segments:g}"
        levels.setdefault((kept_tokens, kept_segments), Level(name, kept_tokens, kept_segments))
    return list(levels.values())


def _mask_text(importance: np.ndarray, level: float, *, at_least: int) -> str:
    """Return one digit per entry: 0 for the fraction `level` with the lowest importance f64[n], 1 for kept entries.

    At least `at_least` entries are kept.
    """
    count = min(round(level * len(importance)), max(0, len(importance) - at_least))
    least = np.argsort(importance, kind="stable")[:count]
    return "".join("0" if index in least else "1" for index in range(len(importance)))


def measure_importance(run: Run) -> dict[str, np.ndarray]:
    """Return the mean of ∂loss/∂mask over the training batches of one epoch, for each mask entry.

    The gradients keep their sign, as in the authors' code. The definition in the paper (Michel et al., sec. 4.1) takes
    the absolute value. The weights are constant here, whereas the authors' code updates them at the same time. The
    result has `tokens` f64[P] and `segments` f64[P,S], for P prompts with S segments each.
    """
    gradient = mean_gradient(run, list(MASK_PATHS.values()), "measure importance")
    return {name: gradient[path] for name, path in MASK_PATHS.items()}


# ----------------------------------------------------------------------------------------------------------- stages
def _importance_once(folder: RunFolder) -> dict[str, np.ndarray]:
    """Return the importance of the masks from the run folder. If it is not stored there, measure and store it first."""
    if distributed.broadcast_from_first((folder / IMPORTANCE).exists()):
        return folder.read_npz(IMPORTANCE)
    measured = measure_importance(open_run(folder.below(SEARCH), [("eval.dtype", "same")]))
    if distributed.is_first():
        folder.write_npz(IMPORTANCE, **measured)
    return measured


def _train_once(config: ConfigDict, folder: RunFolder, title: str) -> Results:
    """Run a training unless it is already finished, and return its results. `title` names it in messages."""
    config_of_run(config, folder)
    if (finished := StoredRun(folder).final_metrics) is not None:
        status(f"{title}: already finished")
        return finished
    status(title)
    return train(config, folder)


def _write_table(folder: RunFolder, results: dict[Level, Results], metric: str) -> None:
    """Write prune.csv, with one row per level.

    The columns are the level, the numbers of kept prompts and segments, and for each split the mAP and `metric`, by
    which the level is chosen.
    """
    splits, rows = next(iter(results.values())), []
    columns = [(split, name) for split in splits for name in dict.fromkeys(("mAP", metric))]
    for level, measured in results.items():
        segments = [row for row, token in zip(level.kept_segments, level.kept_tokens, strict=True) if token == "1"]
        metrics = (measured[split][name] for split, name in columns)
        rows.append([level.name, len(segments), "".join(segments).count("1"), *metrics])
    folder.write_csv(LEVELS_TABLE, ["level", "prompts", "segments", *map("/".join, columns)], rows)


def _require_prunable(config: ConfigDict) -> None:
    require_trainable(config)
    if not prompts_class(config).prunable:
        kind = config.model.prompts.kind
        raise UserError(f"mlmoe prune prunes the prompts of E2VPT, not {kind} prompts; start from configs/e2vpt.py")
    if config.eval.select_on == "none":
        raise UserError("mlmoe prune chooses a level by eval.select_metric; set eval.select_on to val or test")
