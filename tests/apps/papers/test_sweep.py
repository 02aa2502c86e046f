"""A sweep: its trainings, one after another, and the table and plot of their results."""

import json
import math
import statistics

import pytest
from helpers.commands import csv_rows
from helpers.scored_run import write_results

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.papers import grid
from mlmoe_jax.apps.papers import sweep as sweeping
from mlmoe_jax.apps.papers.grid import GridPoint, combine_axes, plan_runs
from mlmoe_jax.apps.papers.sweep import average_seeds, draw_plot, plot_points, seeds_table, x_axis
from mlmoe_jax.config import default_config
from mlmoe_jax.errors import USER_ERROR, Stopped, UserError
from mlmoe_jax.runs.folder import CONFIG, RunFolder
from mlmoe_jax.runtime.storage import InUse

GROUPS = "model.prompts.num_groups"


# --------------------------------------------------------------------------------------------------------- the sweep
def sweep(path, swept, *, select_on: str = "val", as_document: bool = False) -> int:
    """Sweep the combinations of the values of keys, and print the outcome."""
    config = default_config()
    config.eval.select_on = select_on
    outcome = sweeping.sweep(combine_axes([GridPoint("", {}, config)], swept), RunFolder(path))
    print(outcome.json() if as_document else outcome.text())
    return outcome.exit_code


def mean_ap(config) -> float:
    return 0.9 + config.model.prompts.num_groups / 1000 + config.seed / 100 + 1e-17 + 1 / 3000


@pytest.fixture
def trainings(monkeypatch):
    """Replace training: write results at once, or raise `trainings[name]`; `ran` lists the trained runs."""

    class Trainings(dict):
        def __init__(self):
            self.ran = []

    trainings = Trainings()

    def train(config, folder):
        name = folder.path.name
        trainings.ran.append(name)
        if name in trainings:
            raise trainings[name]
        value = mean_ap(config)
        results = {"val": {"mAP": value, "OF1@0.5": math.nan}, "test": {"mAP": value + 0.01, "OF1@0.5": 0.25}}
        folder.write_text(CONFIG, configuration.to_json(config))
        write_results(folder, results)
        return results

    monkeypatch.setattr(grid, "train", train)
    monkeypatch.setattr(sweeping, "draw_plot", lambda points, x_key: f"{len(points)} over {x_key}".encode())  # slow
    return trainings


def test_a_second_call_trains_only_the_missing_runs(trainings, tmp_path, capsys):
    folder = tmp_path / "new"
    assert sweep(folder, {GROUPS: (2, 3)}) == 0
    assert trainings.ran == ["num_groups=2", "num_groups=3"]
    assert sweep(folder, {GROUPS: (8, 2, 3)}) == 0
    assert trainings.ran == ["num_groups=2", "num_groups=3", "num_groups=8"]
    rows = csv_rows(folder / "sweep.csv")
    metrics = ("val/mAP", "val/OF1@0.5", "test/mAP", "test/OF1@0.5")
    assert list(rows[0]) == [GROUPS, *metrics, "run", "error"]
    assert [row[GROUPS] for row in rows] == ["8", "2", "3"]
    assert float(rows[1]["val/mAP"]) == pytest.approx(0.9 + 2 / 1000 + 1 / 3000, abs=1e-15), "not rounded"
    assert (rows[1]["val/OF1@0.5"], rows[1]["test/OF1@0.5"]) == ("", "0.25")
    assert (folder / "sweep.png").read_text() == f"6 over {GROUPS}"
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert (lines[0], lines[-1]) == (["mAP,", "%", "val", "test"], ["num_groups=3", "90.33", "91.33"])
    assert "run 2 of 3, num_groups=2: already finished" in err


def test_a_failed_run_is_listed_and_the_others_are_trained(trainings, tmp_path, capsys):
    reason = "the loss is nan at step 4"
    trainings["num_groups=3"] = UserError(reason)
    swept = {GROUPS: (2, 3, 5)}
    assert sweep(tmp_path, swept) == USER_ERROR
    out, err = capsys.readouterr()
    assert f"error: 1 of 3 runs failed, the first, num_groups=3, because: {reason}" in err
    assert f"num_groups=3  failed: {reason}" in out
    assert trainings.ran == ["num_groups=2", "num_groups=3", "num_groups=5"]
    rows = csv_rows(tmp_path / "sweep.csv")
    assert [(row["error"], row["val/mAP"] == "") for row in rows] == [("", False), (reason, True), ("", False)]
    del trainings["num_groups=3"]
    assert sweep(tmp_path, swept) == 0
    assert trainings.ran[3:] == ["num_groups=3"]
    trainings["seed=0"] = UserError("no data")
    assert sweep(tmp_path / "none", {"seed": (0,)}) == USER_ERROR
    assert not (tmp_path / "none" / "sweep.png").exists(), "there is nothing to draw"


def test_a_stop_ends_the_sweep(trainings, tmp_path):
    trainings["seed=1"] = Stopped("stopped at step 3 of 9")
    with pytest.raises(Stopped):
        sweep(tmp_path, {"seed": (0, 1, 2)})
    assert trainings.ran == ["seed=0", "seed=1"]
    assert [row["seed"] for row in csv_rows(tmp_path / "sweep.csv")] == ["0"]
    assert (tmp_path / "sweep.png").exists()


def test_a_run_that_another_process_trains_is_skipped(trainings, tmp_path, capsys):
    """Two sweeps share a folder: each skips the run that the other one holds, and reads it once it is finished."""
    swept = {"seed": (0, 1)}
    with RunFolder(tmp_path / "seed=0").writing():
        assert sweep(tmp_path, swept) == 0
        assert trainings.ran == ["seed=1"]
        assert [row["seed"] for row in csv_rows(tmp_path / "sweep.csv")] == ["1"]
        out, err = capsys.readouterr()
        assert "run 1 of 2, seed=0: skipped, as another process is training it" in err
        assert out.splitlines()[1].split(maxsplit=1) == ["seed=0", "another process is training it"]
        assert "seed=1" in out
    trainings["seed=0"] = InUse("another process is writing to it")  # both have seen it free; its lock decides
    assert sweep(tmp_path, swept) == 0
    assert "seed=0: skipped, as another process" in capsys.readouterr().err
    del trainings["seed=0"]
    assert sweep(tmp_path, swept) == 0
    assert trainings.ran == ["seed=1", "seed=0", "seed=0"]


def test_a_run_that_another_process_finishes_meanwhile_is_not_trained(trainings, tmp_path, monkeypatch):
    train = grid.train

    def meanwhile(config, folder):
        for seed in (1, 2):
            other = default_config()
            other.seed = seed
            train(other, RunFolder(tmp_path / f"seed={seed}"))
        return train(config, folder)

    monkeypatch.setattr(grid, "train", meanwhile)
    assert sweep(tmp_path, {"seed": (0, 1, 2)}) == 0
    assert trainings.ran == ["seed=1", "seed=2", "seed=0"]
    assert [row["seed"] for row in csv_rows(tmp_path / "sweep.csv")] == ["0", "1", "2"]


def test_configs_are_swept():
    names = ("linear_probe:dataset=digits", "mlvpt_digits")
    points = combine_axes(grid.method_points(names, [("train.epochs", "3")]), {"seed": (0, 1)})
    assert [(*point.values.values(),) for point in points] == [(name, seed) for name in names for seed in (0, 1)]
    assert [point.name for point in points[2:]] == ["config=mlvpt_digits,seed=0", "config=mlvpt_digits,seed=1"]
    configs = [point.config for point in points]
    assert [config.model.head.kind for config in configs] == ["linear", "linear", "group_experts", "group_experts"]
    assert [(config.train.epochs, config.seed) for config in configs] == [(3, 0), (3, 1)] * 2


def test_only_the_first_process_writes(trainings, tmp_path, monkeypatch):
    monkeypatch.setattr("mlmoe_jax.runtime.distributed.process", lambda: (1, 2))
    assert sweep(tmp_path, {"seed": (0,)}) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["seed=0"]


def test_json_has_unrounded_metrics_and_statistics_over_seeds(trainings, tmp_path, capsys):
    assert sweep(tmp_path, {"seed": (0, 1), GROUPS: (2,)}, as_document=True) == 0
    printed = json.loads(capsys.readouterr().out)
    value = 0.9 + 2 / 1000 + 1 / 3000
    assert printed["runs"][0] == {
        "run": "num_groups=2,seed=0",
        "config": {"seed": 0, GROUPS: 2},
        "results": {"val": {"mAP": value, "OF1@0.5": None}, "test": {"mAP": value + 0.01, "OF1@0.5": 0.25}},
        "error": None,
    }
    assert [group["config"] for group in printed["over_seeds"]] == [{GROUPS: 2}]


# ---------------------------------------------------------------------------------------------------- table and plot
def runs_of(folder, axes, fail=()):
    """Return the runs of a grid as finished ones with the mAP of `mean_ap`."""
    runs = plan_runs(combine_axes([GridPoint("", {}, default_config())], axes), RunFolder(folder))
    for run in runs:
        if run.name in fail:
            run.error = "diverged"
        else:
            run.results = {split: {"mAP": mean_ap(run.config) + more} for split, more in (("val", 0), ("test", 0.01))}
    return runs


def test_statistics_over_seeds_use_finite_values_of_finished_runs(tmp_path):
    runs = runs_of(tmp_path, {"seed": (0, 1, 2), GROUPS: (2, 3)}, fail=("num_groups=3,seed=2",))
    runs[0].results["test"]["mAP"] = math.nan
    two, three = average_seeds(runs)
    assert (two["config"], three["config"]) == ({GROUPS: 2}, {GROUPS: 3})
    expected = {"mean": mean_ap(runs[0].config) + 0.01, "std": statistics.stdev((0, 0.01, 0.02)), "count": 3}
    assert two["mAP"]["val"] == pytest.approx(expected)
    assert (two["mAP"]["test"]["count"], three["mAP"]["val"]["count"]) == (2, 2)
    title, _, *lines = (line.split() for line in seeds_table(runs).text().splitlines())
    assert title[:2] == ["mean", "±"]
    assert lines == [
        ["num_groups=2", "91.23", "±", "1.00", "92.73", "±", "0.71"],
        ["num_groups=3", "90.83", "±", "0.71", "91.83", "±", "0.71"],
    ]
    single = runs_of(tmp_path, {GROUPS: (2,)})
    assert math.isnan(average_seeds(single)[0]["mAP"]["val"]["std"])
    assert seeds_table(single).text().splitlines()[-1].split() == ["num_groups=2", "90.23", "91.23"]


@pytest.mark.parametrize(("split", "said"), [("val", False), ("test", True)])
def test_a_selection_on_test_is_printed(trainings, tmp_path, capsys, split, said):
    assert sweep(tmp_path, {GROUPS: (2,)}, select_on=split) == 0
    assert ("selected on test, as published" in capsys.readouterr().out) is said


def percent(groups, seed=0.0, split="val"):
    return pytest.approx(90 + groups / 10 + seed + 1 / 30 + (split == "test"))


def test_one_key_gives_one_line_in_a_panel_per_split(tmp_path):
    points = plot_points(runs_of(tmp_path, {GROUPS: (2, 8), "seed": (0, 1)}), GROUPS)
    assert points == [
        {"panel": split, "line": "mAP", "x": groups, "y": percent(groups, seed, split)}
        for groups in (2, 8)
        for seed in (0, 1)
        for split in ("val", "test")
    ]
    assert draw_plot(points, GROUPS).startswith(b"\x89PNG")
    assert [point["x"] for point in plot_points(runs_of(tmp_path, {"seed": (3, 0)}), "seed")] == [3, 3, 0, 0]


def test_more_keys_give_one_line_per_combination(tmp_path):
    axes = {"optim.name": ("adamw", "sgd"), GROUPS: (2, 3), "augment.flip": (False, True)}
    points = plot_points(runs_of(tmp_path, axes, fail=["flip=false,name=adamw,num_groups=2"]), "optim.name")
    lines = {(point["line"], point["x"]) for point in points}
    names = [f"flip={flip},num_groups={groups}" for flip in ("false", "true") for groups in (2, 3)]
    whole = {(name, x) for name in names for x in ("adamw", "sgd")}
    assert whole - lines <= {("flip=false,num_groups=2", "adamw")}


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1e-4, 1e-3, 1e-2], "log"),
        ([0.0, 1e-3, 1e-1], "linear"),
        ([8, 2, 3], "linear"),
        ([-1, 0, 100], "linear"),
        (["sgd", "adamw"], None),
    ],
)
def test_numbers_have_a_scale_for_their_range_and_names_the_given_order(values, scale):
    points = [{"panel": "val", "line": "a", "x": x, "y": 90.0} for x in values]
    x = x_axis(points, "groups").to_dict()
    assert x["title"] == "groups"
    if scale:
        assert (x["type"], x["scale"]["type"]) == ("quantitative", scale)
    else:
        assert (x["type"], x["sort"]) == ("nominal", values)
