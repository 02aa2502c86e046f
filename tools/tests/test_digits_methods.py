"""`python -m benchmarks.digits_methods`: its trainings, the choice of learning rates, and the tables."""

import os

import numpy as np
import pytest
from scipy.stats import ttest_rel

from benchmarks import digits_methods, page
from mlmoe_jax.apps.papers.grid import GridRun, plan_runs
from mlmoe_jax.runs.folder import RunFolder


def results(*methods: str) -> dict:
    """Return made results of methods for three seeds."""
    rng = np.random.default_rng(0)
    listed = {
        method: {
            "rate": 0.005,
            "trainable": 12_810,
            "macs": 73_440_000,
            "images_per_second": 321,
            **{split: rng.uniform(0.8, 0.9, 3).tolist() for split in digits_methods.SPLITS},
        }
        for method in methods
    }
    return {"epochs": 4, "rates": [0.001, 0.005], "seeds": [0, 1, 2], "methods": listed}


def test_each_training_has_its_own_folder_and_a_valid_config(tmp_path):
    points = [digits_methods.point(method, 3, 5e-3, 1) for method in digits_methods.METHODS]
    runs = plan_runs(points, RunFolder(tmp_path))  # it validates the configs
    assert len({run.name for run in runs}) == len(digits_methods.METHODS)
    for run in runs:
        config = run.config
        assert (config.data.name, config.train.epochs, config.optim.learning_rate, config.seed) == (
            "digits",
            3,
            5e-3,
            1,
        )


def test_two_runs_isolate_the_number_of_parameters_and_the_gates_of_labels():
    wide = digits_methods.method_config("gvpt:per_group=12", 4).model
    group_gates, ml_vpt = (
        digits_methods.method_config(f"mlvpt_digits{flag}", 4) for flag in (" --config.model.head.gates_of=group", "")
    )
    assert (wide.prompts.per_group, wide.prompts.sides) == (12, "both")
    assert group_gates.model.head.gates_of == "group"
    group_gates.model.head.gates_of = "label"
    assert group_gates == ml_vpt


def train_by(score):
    """Return a stand-in for `train`: `score` maps (method, rate, seed) to a mAP, an error, or None without results."""

    def train(points, out):
        runs = []
        for point in points:
            config, method = point.config, "vpt" if "method=vpt" in point.name else "gvpt"
            value = score(method, config.optim.learning_rate, config.seed)
            run = GridRun(**vars(point), folder=RunFolder(out / point.name))
            if isinstance(value, str):
                run.error = value
            elif value is not None:
                run.results = {split: {"mAP": value} for split in digits_methods.SPLITS}
            runs.append(run)
        return runs

    return train


def test_the_best_rate_of_the_first_seed_is_trained_with_all_seeds(tmp_path, monkeypatch):
    def score(method, rate, seed):
        if method == "gvpt" and rate == 0.1:
            return "diverged"
        return rate + seed / 100 if method == "vpt" else 0.5 - rate

    monkeypatch.setattr(digits_methods, "METHODS", ("vpt", "gvpt"))
    monkeypatch.setattr(digits_methods, "train", train_by(score))
    vpt, gvpt = digits_methods.train_all(digits_methods.Settings(4, (0.01, 0.1), (3, 4), tmp_path)).values()
    assert (vpt["rate"], vpt["tuning"], vpt["test"]) == (0.1, {"0.01": 0.04, "0.1": 0.13}, [0.13, 0.14])
    assert (gvpt["rate"], gvpt["tuning"], gvpt["test"]) == (0.01, {"0.01": 0.49}, [0.49, 0.49])


@pytest.mark.parametrize("unfinished", [("vpt", 0.01, 3), ("vpt", 0.1, 4)])
def test_a_method_with_an_unfinished_training_has_no_results(unfinished, tmp_path, monkeypatch):
    monkeypatch.setattr(digits_methods, "METHODS", ("vpt", "gvpt"))
    monkeypatch.setattr(digits_methods, "train", train_by(lambda *run: None if run == unfinished else run[1]))
    assert [*digits_methods.train_all(digits_methods.Settings(4, (0.01, 0.1), (3, 4), tmp_path))] == ["gvpt"]


def test_a_difference_has_the_paired_interval_of_the_t_test():
    first, second = np.array([91.0, 92.5, 90.1]), np.array([93.2, 93.0, 92.4])
    interval = ttest_rel(second, first).confidence_interval(0.95)
    expected = f"{(second - first).mean():+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"
    assert digits_methods.difference(first, second) == expected.replace("-", "−")
    assert digits_methods.difference(second[:1], first[:1]) == "−2.20"


def test_the_tables_have_the_means_and_sample_deviations(monkeypatch):
    outcome = results("vpt", "gvpt", "mlvpt_digits", "linear_probe")
    outcome["methods"]["vpt"] |= {"test": [0.90, 0.91, 0.92], "test_shift": [0.80, 0.81, 0.85]}
    monkeypatch.setattr(digits_methods, "PAIRS", (("vpt", "gvpt"),))
    text = digits_methods.tables(outcome)
    assert "4 epochs" in text
    assert "for seed 0, of 0.001, 0.005." in text
    assert "| `vpt` | 0.005 | 12,810 | 73.4 | 91.00 ± 1.00 | 82.00 ± 2.65 | 9.00 ± 1.73 | 321 |" in text
    assert "| `gvpt` − `vpt` | " in text
    outcome["methods"]["linear_probe"]["val"] = [0.5, 0.5, 0.53]
    monkeypatch.setattr(digits_methods, "IN_README", {"linear_probe": "linear probe"})
    assert "| linear probe | 12,810 | 51.00 ± 1.73 | " in digits_methods.table_of_readme(outcome)


def test_a_table_replaces_what_is_between_its_marks(tmp_path):
    (tmp_path / "a.md").write_text("above\n<!-- a -->\nold\n<!-- b -->\nbelow\n")
    page.write_between(tmp_path / "a.md", ("<!-- a -->", "<!-- b -->"), "new")
    assert (tmp_path / "a.md").read_text() == "above\n<!-- a -->\n\nnew\n\n<!-- b -->\nbelow\n"
    with pytest.raises(SystemExit, match=r"a\.md has no lines '<!-- c -->' and '<!-- b -->'"):
        page.write_between(tmp_path / "a.md", ("<!-- c -->", "<!-- b -->"), "new")


def test_processes_side_by_side_share_the_cores(monkeypatch):
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system cannot restrict a process to cores")
    shares = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: shares.append(cores))
    for worker in range(2):
        digits_methods.use_own_cores(worker, 2)
    digits_methods.use_own_cores(5, 6)
    assert shares == [[0, 2], [1, 3], [1]]
