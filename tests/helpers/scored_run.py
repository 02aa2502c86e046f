"""A run folder with scores and without a model, for tests of code that reads scores."""

from pathlib import Path

import numpy as np

import mlmoe_jax.config as configuration
from mlmoe_jax.evaluation import results
from mlmoe_jax.evaluation.results import MetricSettings, SplitResult, SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.folder import CONFIG, LABELS, RESULTS, RunFolder


def drawn_split(name: str = "val", rows: int = 40, labels: int = 3, seed: int = 0, codes: int = 2) -> SplitScores:
    """Return a split with scores of two digits, so that there are ties; `codes` 4 also has unknown and difficult."""
    draw = np.random.default_rng(seed)
    truth = draw.choice([0, 1, -1, 2][:codes], (rows, labels), p=[0.6, 0.4] if codes == 2 else [0.5, 0.3, 0.1, 0.1])
    scores = np.clip(draw.normal(0.3 + 0.3 * (truth == 1), 0.2), 0, 1).round(2).astype(np.float32)
    return SplitScores(name, np.array([f"{name}/{row}.jpg" for row in range(rows)]), scores, truth.astype(np.int8))


SETTINGS = MetricSettings(threshold=0.5, consistent=True, difficult="negative", preset="none")


def write_results(
    folder: RunFolder,
    metrics: dict[str, dict[str, float]],
    *splits: SplitScores,
    settings: MetricSettings = SETTINGS,
    finished: bool = True,
    keep_others: bool = False,
) -> None:
    """Write metrics by split and the scores of some splits, as an evaluation does."""
    files = {split.name: results.write_scores(folder, split) for split in splits}
    entries = {
        name: SplitResult(files.get(name, ""), settings, metrics.get(name, {}), finished)
        for name in dict.fromkeys([*metrics, *files])
    }
    results.write_split_results(folder, entries, keep_others=keep_others)


def stored_metrics(folder: RunFolder | Path) -> dict[str, dict[str, float]]:
    """Return split -> metric -> value of results.json."""
    return {split: entry["metrics"] for split, entry in RunFolder(Path(str(folder))).read_json(RESULTS).items()}


def stored_scores(folder: RunFolder) -> dict[str, SplitScores]:
    """Return split -> scores of a run folder."""
    run = StoredRun(folder)
    return {name: run.split(name) for name in run.scored_splits}


def write_run(path: Path, *splits: SplitScores, names: str = "abc", **keys) -> RunFolder:
    """Return a run folder with a config (the defaults, and `keys` such as data__val_split), labels and scores."""
    folder, config = RunFolder(path), configuration.default_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in keys.items()})
    folder.write_text(CONFIG, configuration.to_json(config))
    folder.write_text(LABELS, "".join(f"{name}\n" for name in names))
    if splits:
        write_results(folder, {}, *splits, settings=MetricSettings.of(config))
    return folder
