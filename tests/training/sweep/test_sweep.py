import csv
import json
import math

import pytest

from mlmoe_jax import config as configuration
from mlmoe_jax.config import default_config, flatten
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import CONFIG, RESULTS, RunFolder
from mlmoe_jax.training.loop import Stopped
from mlmoe_jax.training.resume import changed_keys
from mlmoe_jax.training.sweep import run as sweeping
from mlmoe_jax.training.sweep.grid import SweepAxis, as_text, folder_name, parse, plan, selection_of, short_names
from mlmoe_jax.training.sweep.run import format_table, over_seeds, picture, sweep

GROUPS = "model.prompts.num_groups"


# ------------------------------------------------------------------------------------------------------ the flag
@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("config.model.prompts.num_groups=2,3, 5,8", GROUPS, (2, 3, 5, 8)),
        ("seed=0", "seed", (0,)),
        ("optim.learning_rate=1e-3,1", "optim.learning_rate", (0.001, 1.0)),
        ("train.save_backbone=true,0", "train.save_backbone", (True, False)),
        ("optim.name=adamw,sgd", "optim.name", ("adamw", "sgd")),
        ("data.val_split=,val", "data.val_split", ("", "val")),
        ("data.images=a=b,c", "data.images", ("a=b", "c")),
        ("data.test_splits=('test','val'),('test',)", "data.test_splits", (("test", "val"), ("test",))),
        ("data.test_splits=test,val", "data.test_splits", (("test",), ("val",))),
        ("augment.crop_scale=(0.1,1.0),[0.5,1.0]", "augment.crop_scale", ((0.1, 1.0), (0.5, 1.0))),
    ],
)
def test_a_flag_is_read_as_the_type_of_its_key(text, key, values):
    config = default_config()
    before = flatten(config)
    (swept,) = parse([text], config)
    assert (swept.key, swept.values) == (key, values)
    assert list(map(type, swept.values)) == list(map(type, values))
    assert flatten(config) == before


@pytest.mark.parametrize(
    ("texts", "part"),
    [
        (["seed"], "--sweep=seed is not KEY=VALUE"),
        (["seed="], "--sweep=seed= is not KEY=VALUE"),
        (["=1,2"], "is not KEY=VALUE"),
        (["sede=1"], "did you mean 'seed'"),
        (["optim=1"], "'optim' is a section"),
        (["seed=1,x"], "--sweep key 'seed' takes a whole number of at least 0 such as 0, not 'x'"),
        (["seed=1,2,"], "not ''"),
        (["seed=1", "config.seed=2"], "--sweep is given twice for seed"),
        (["optim.learning_rate=0.1,1e-1"], "gives optim.learning_rate the value 0.1 twice"),
        (["augment.crop_scale=(0.1,1.0"], "bracket"),
    ],
)
def test_mistakes_in_the_flag(refusal, texts, part):
    assert part in refusal(parse, texts, default_config())


# --------------------------------------------------------------------------------------------------- folder names
def test_names_are_as_short_as_the_config_allows():
    keys = [GROUPS, "seed", "train.batch_size", "optim.name", "model.head.kind", "data.name"]
    assert list(short_names(keys, default_config()).values()) == [
        "num_groups",
        "seed",
        "train.batch_size",
        "optim.name",
        "head.kind",
        "data.name",
    ]


def test_folder_names_are_safe_distinct_and_free_of_the_flags_order():
    assert (
        folder_name({"seed": 0, "num_groups": 2}) == folder_name({"num_groups": 2, "seed": 0}) == "num_groups=2,seed=0"
    )
    plain = [1e-5, 1e20, True, -1, "adamw", "", ("test", "val")]
    assert [folder_name({"k": value}) for value in plain] == [
        *("k=1e-05", "k=1e+20", "k=true", "k=-1", "k=adamw", "k=", "k=test+val"),
    ]
    odd = ["a/b", "a_b", "a b", "../x", "a,b", "x" * 300, "x" * 301, ("a+b",), ("a", "b"), (), ("",), (("^b$", 1.0),)]
    names = [folder_name({"k": value}) for value in odd]
    assert len(set(names)) == len(odd)
    for name in names:
        assert len(name) < 80
        assert not set(name) & set("/ ,\\:*?\"<>|'$^()")


# ---------------------------------------------------------------------------------------------------------- the plan
def finished(folder: RunFolder, config, results) -> None:
    folder.write_text(CONFIG, configuration.to_json(config))
    folder.write_json(RESULTS, results)


def test_the_grid_has_every_combination_with_its_own_config(tmp_path):
    config = default_config()
    runs = plan(config, RunFolder(tmp_path), [SweepAxis(GROUPS, (2, 3)), SweepAxis("seed", (0, 1))])
    assert [run.name for run in runs] == [f"num_groups={g},seed={s}" for g in (2, 3) for s in (0, 1)]
    for run in runs:
        assert run.values == {GROUPS: run.config.model.prompts.num_groups, "seed": run.config.seed}
        assert str(run.folder) == str(tmp_path / run.name)
        assert run.results is None
    assert (config.seed, config.model.prompts.num_groups) == (0, 5)
    assert not list(tmp_path.iterdir())


def test_a_tuple_is_swept(tmp_path):
    values = (("test",), ("test", "test_shift"))
    runs = plan(default_config(), RunFolder(tmp_path), [SweepAxis("data.test_splits", values)])
    assert tuple(run.config.data.test_splits for run in runs) == values


@pytest.mark.parametrize(
    ("swept", "part"),
    [
        (SweepAxis("train.epochs", (1, 0)), "the sweep's run epochs=0 cannot be trained: the config has mistakes"),
        (
            SweepAxis("data.image_size", (64, 60)),
            "the sweep's run image_size=60 cannot be trained: data.image_size is 60",
        ),
        (SweepAxis("model.backbone.name", ("vit_digits", "vit_huge")), "run backbone.name=vit_huge cannot be trained"),
    ],
)
def test_a_value_that_cannot_be_trained_is_found_before_anything_is(tmp_path, refusal, swept, part):
    assert part in refusal(plan, default_config(), RunFolder(tmp_path), [swept])


def test_a_config_that_only_a_swept_key_makes_valid(tmp_path):
    config = default_config()
    config.data.val_split = ""
    (run,) = plan(config, RunFolder(tmp_path), [SweepAxis("eval.select_on", ("test",))])
    assert run.config.eval.select_on == "test"


def test_finished_runs_are_read_and_unfinished_ones_are_not(tmp_path):
    config, folder = default_config(), RunFolder(tmp_path)
    config.train.log_every = 7  # may differ when a run goes on
    for seed, results in ((0, {"test": {"mAP": 0.5, "mAP_envelope": math.nan}}), (1, None)):
        other = default_config()
        other.seed = seed
        run = RunFolder(tmp_path / f"seed={seed}")
        run.write_text(CONFIG, configuration.to_json(other))
        if results:
            run.write_json(RESULTS, results)
    runs = plan(config, folder, [SweepAxis("seed", (0, 1, 2))])
    assert runs[0].results["test"]["mAP"] == 0.5
    assert math.isnan(runs[0].results["test"]["mAP_envelope"])
    assert [run.results for run in runs[1:]] == [None, None]


@pytest.mark.parametrize("trace", ["checkpoints", "results.json"])
def test_runs_with_another_config_are_found_before_anything_is_trained(tmp_path, refusal, trace):
    for seed in (0, 2):
        other = default_config()
        other.seed, other.loss.gamma_neg = seed, 3.0
        run = RunFolder(tmp_path / f"seed={seed}")
        run.write_text(CONFIG, configuration.to_json(other))
        (run / trace).mkdir() if trace == "checkpoints" else run.write_json(trace, {})
    sentence = refusal(plan, default_config(), RunFolder(tmp_path), [SweepAxis("seed", (0, 1, 2))])
    assert "seed=0 (loss.gamma_neg was 3.0 and is 2.0), seed=2 (loss.gamma_neg" in sentence
    assert "another --workdir" in sentence


def test_a_config_without_a_step_taken_is_no_run_yet(tmp_path):
    folder = RunFolder(tmp_path)
    assert changed_keys(default_config(), folder) == []
    other = default_config()
    other.seed = 1
    folder.write_text(CONFIG, configuration.to_json(other))
    assert changed_keys(default_config(), folder) == []
    (tmp_path / "checkpoints").mkdir()
    assert changed_keys(default_config(), folder) == ["seed was 1 and is 0"]
    assert selection_of(folder) == {}


def test_a_run_that_is_a_link_out_of_the_sweep_is_refused(tmp_path, precious, refusal):
    (tmp_path / "seed=1").symlink_to(precious.parent)
    sentence = refusal(plan, default_config(), RunFolder(tmp_path), [SweepAxis("seed", (0, 1))])
    assert sentence.startswith(f"{tmp_path}/seed=1 is a link out of the run folder {tmp_path}, to {precious.parent};")


def test_a_run_folder_is_not_a_sweep_folder(tmp_path, refusal):
    finished(RunFolder(tmp_path), default_config(), {})
    assert "is itself the run folder" in refusal(plan, default_config(), RunFolder(tmp_path), [SweepAxis("seed", (0,))])


# --------------------------------------------------------------------------------------------------------- the sweep
def mean_ap(config) -> float:
    return 0.9 + config.model.prompts.num_groups / 1000 + config.seed / 100 + 1e-17 + 1 / 3000


@pytest.fixture
def trainings(monkeypatch):
    """Stand in for training: a run folder and results at once, or what `trainings[name]` raises; list what ran."""

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
        finished(folder, config, results)
        return results

    monkeypatch.setattr(sweeping, "train", train)
    return trainings


def table_of(folder) -> list[dict]:
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_runs_one_after_another_and_again_only_what_is_missing(trainings, tmp_path, capsys):
    folder = RunFolder(tmp_path / "new")
    assert sweep(default_config(), folder, [SweepAxis(GROUPS, (2, 3))]) == 0
    assert trainings.ran == ["num_groups=2", "num_groups=3"]
    assert sweep(default_config(), folder, [SweepAxis(GROUPS, (8, 2, 3))]) == 0
    assert trainings.ran == ["num_groups=2", "num_groups=3", "num_groups=8"]
    rows = table_of(tmp_path / "new")
    assert list(rows[0]) == [
        *(GROUPS, "step", "weights", "selected_on"),
        *("val/mAP", "val/OF1@0.5", "test/mAP", "test/OF1@0.5", "run", "error"),
    ]
    assert [row[GROUPS] for row in rows] == ["8", "2", "3"]
    for row in rows:
        config = default_config()
        config.model.prompts.num_groups = int(row[GROUPS])
        assert float(row["val/mAP"]) == mean_ap(config)
        assert (row["val/OF1@0.5"], row["test/OF1@0.5"]) == ("", "0.25")
    assert (tmp_path / "new" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].split() == ["num_groups=3", "90.33", "91.33"]
    assert "run 2 of 3, num_groups=2: already finished" in err


def test_a_failed_run_is_listed_and_the_others_are_trained(trainings, tmp_path, capsys, refusal):
    trainings["num_groups=3"] = UserError("the loss is nan at step 4")
    folder = RunFolder(tmp_path)
    sentence = refusal(sweep, default_config(), folder, [SweepAxis(GROUPS, (2, 3, 5))])
    assert sentence.startswith("1 of 3 runs failed, the first, num_groups=3, because: the loss is nan at step 4")
    assert trainings.ran == ["num_groups=2", "num_groups=3", "num_groups=5"]
    assert [row["error"] for row in table_of(tmp_path)] == ["", "the loss is nan at step 4", ""]
    assert table_of(tmp_path)[1]["val/mAP"] == ""
    assert "num_groups=3  failed: the loss is nan at step 4" in capsys.readouterr().out
    assert (tmp_path / "sweep.png").exists()
    del trainings["num_groups=3"]
    assert sweep(default_config(), folder, [SweepAxis(GROUPS, (2, 3, 5))]) == 0
    assert trainings.ran[3:] == ["num_groups=3"]
    assert [row["error"] for row in table_of(tmp_path)] == [""] * 3


def test_where_all_fail_there_is_a_table_and_no_picture(trainings, tmp_path, refusal):
    trainings["seed=0"] = trainings["seed=1"] = UserError("no data")
    refusal(sweep, default_config(), RunFolder(tmp_path), [SweepAxis("seed", (0, 1))])
    assert [row["error"] for row in table_of(tmp_path)] == ["no data"] * 2
    assert not (tmp_path / "sweep.png").exists()


@pytest.mark.parametrize("stop", [Stopped("stopped at step 3 of 9; and so on"), KeyboardInterrupt()])
def test_a_stop_ends_the_sweep(trainings, tmp_path, capsys, stop):
    trainings["seed=1"] = stop
    assert sweep(default_config(), RunFolder(tmp_path), [SweepAxis("seed", (0, 1, 2))]) == 130
    assert trainings.ran == ["seed=0", "seed=1"]
    assert [row["seed"] for row in table_of(tmp_path)] == ["0"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "run 2 of 3, seed=1: stopped" in err.splitlines()[-1]


def test_two_sweeps_do_not_share_a_folder(trainings, tmp_path, refusal):
    folder = RunFolder(tmp_path)
    with folder.writing():
        assert "another process" in refusal(sweep, default_config(), folder, [SweepAxis("seed", (0,))])
    assert trainings.ran == []


def test_only_the_first_process_writes(trainings, tmp_path, monkeypatch):
    monkeypatch.setattr("mlmoe_jax.runtime.distributed.process", lambda: (1, 2))
    assert sweep(default_config(), RunFolder(tmp_path), [SweepAxis("seed", (0,))]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["seed=0"]


def test_json_has_all_digits_and_the_seeds_together(trainings, tmp_path, capsys):
    swept = [SweepAxis("seed", (0, 1)), SweepAxis(GROUPS, (2,))]
    assert sweep(default_config(), RunFolder(tmp_path), swept, as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    config = default_config()
    config.model.prompts.num_groups = 2
    assert printed["runs"][0] == {
        "run": "num_groups=2,seed=0",
        "config": {"seed": 0, GROUPS: 2},
        "selected": None,
        "results": {
            "val": {"mAP": mean_ap(config), "OF1@0.5": None},
            "test": {"mAP": mean_ap(config) + 0.01, "OF1@0.5": 0.25},
        },
        "error": None,
    }
    (group,) = printed["over_seeds"]
    assert group["config"] == {GROUPS: 2}
    assert group["mAP"]["val"] == pytest.approx({"mean": mean_ap(config) + 0.005, "std": 0.005, "count": 2})


# ----------------------------------------------------------------------------------------------------- what it shows
def runs_of(folder, *swept, fail=()):
    """The runs of a grid, finished, with the mAP of `mean_ap`."""
    runs = plan(default_config(), RunFolder(folder), list(swept))
    for run in runs:
        if run.name in fail:
            run.error = "diverged"
        else:
            run.results = {split: {"mAP": mean_ap(run.config) + more} for split, more in (("val", 0), ("test", 0.01))}
    return runs


def test_over_seeds_is_the_mean_and_deviation_of_what_there_is(tmp_path):
    swept = (SweepAxis("seed", (0, 1, 2)), SweepAxis(GROUPS, (2, 3)))
    runs = runs_of(tmp_path, *swept, fail=("num_groups=3,seed=2",))
    runs[0].results["test"]["mAP"] = math.nan
    (two, of_two), (three, of_three) = over_seeds(runs)
    assert (two, three) == ({GROUPS: 2}, {GROUPS: 3})
    base = mean_ap(runs[0].config)
    assert of_two["val"].mean == pytest.approx(base + 0.01)
    assert of_two["val"].std == pytest.approx(math.sqrt(2 / 3) / 100)
    assert (of_two["val"].count, of_two["test"].count, of_three["val"].count) == (3, 2, 2)
    assert of_three["val"].std == pytest.approx(0.005)
    without = over_seeds(runs_of(tmp_path, swept[1]))
    assert [(spreads["val"].std, spreads["val"].count) for _, spreads in without] == [(0, 1), (0, 1)]


def test_the_table_has_a_line_a_run_and_then_the_seeds(tmp_path):
    runs = runs_of(tmp_path, SweepAxis(GROUPS, (2,)), SweepAxis("seed", (0, 1)), fail=("num_groups=2,seed=1",))
    runs[0].selected = {"step": 12, "kind": "ema", "split": "val"}
    lines = [line.split() for line in format_table(runs).splitlines()]
    assert lines[0] == ["mAP,", "%", "val", "test", "weights"]
    assert lines[1] == ["num_groups=2,seed=0", "90.23", "91.23", "ema", "of", "step", "12"]
    assert lines[2] == ["num_groups=2,seed=1", "failed:", "diverged"]
    assert lines[5] == ["num_groups=2", "90.23", "±", "0.00", "91.23", "±", "0.00", "1", "seeds"]
    assert "published" not in format_table(runs)
    runs[0].config.eval.select_on = "test"
    assert "selected on test, as published" in format_table(runs)


@pytest.fixture
def shown(monkeypatch):
    """Return a function that gives what `picture` hands to `draw`: (panels as plain values, x values, options)."""

    def call(runs):
        calls = []
        monkeypatch.setattr(sweeping, "draw", lambda panels, x, **options: calls.append((panels, x, options)))
        picture(runs)
        ((panels, x, options),) = calls
        plain = {
            heading: {line.label: [pytest.approx(list(row)) for row in (line.y, line.spread)] for line in lines}
            for heading, lines in panels.items()
        }
        return plain, x, options

    return call


def percent(groups, seed=0.0, split="val"):
    return 90 + groups / 10 + seed + 1 / 30 + (split == "test")


def test_one_key_is_a_line_a_split(tmp_path, shown):
    panels, x, options = shown(runs_of(tmp_path, SweepAxis(GROUPS, (2, 8)), SweepAxis("seed", (0, 1))))
    assert panels == {
        "": {s: [[percent(2, 0.5, s), percent(8, 0.5, s)], [0.5, 0.5]] for s in ("val", "test")},
    }
    assert x == [2, 8]
    assert (options["x_label"], options["y_label"], options["legend"]) == (GROUPS, "mAP (%)", "split")
    assert options["title"] == "digits, vit_digits, linear\nmean ± standard deviation over 2 seeds"


def test_a_second_key_is_a_line_each_in_a_panel_a_split(tmp_path, shown):
    swept = (SweepAxis("optim.name", ("adamw", "sgd")), SweepAxis(GROUPS, (2, 3)))
    panels, x, options = shown(runs_of(tmp_path, *swept, fail=("num_groups=2,optim.name=adamw",)))
    assert panels == {
        split: {"2": [[percent(2, 0, split)], [0]], "3": [[percent(3, 0, split)] * 2, [0, 0]]}
        for split in ("val", "test")
    }
    assert list(panels["val"]) == ["2", "3"]
    assert x == ["adamw", "sgd"]
    assert options["legend"] == "num_groups"
    assert options["title"].endswith("\n1 of 4 runs failed")


def test_an_empty_value_is_a_line_of_its_own(tmp_path, shown):
    panels, _, _ = shown(runs_of(tmp_path, SweepAxis(GROUPS, (2, 3)), SweepAxis("data.images", ("", "val"))))
    assert list(panels["val"]) == ["", "val"]


def test_more_keys_are_a_line_a_combination(tmp_path, shown):
    swept = (
        SweepAxis(GROUPS, (2, 3)),
        SweepAxis("optim.name", ("adamw", "sgd")),
        SweepAxis("augment.flip", (False, True)),
    )
    panels, x, options = shown(runs_of(tmp_path, *swept))
    combinations = [f"optim.name={name}, flip={flip}" for name in ("adamw", "sgd") for flip in ("false", "true")]
    assert list(panels["test"]) == combinations
    assert x == [2, 3]
    assert options["legend"] == "optim.name, flip"


def test_seeds_alone_are_points_beside_their_mean(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sweeping, "draw", lambda *arguments, **options: calls.append((arguments, options)))
    picture(runs_of(tmp_path, SweepAxis("seed", (3, 0))))
    (((panels, x), options),) = calls
    assert x == ["3", "0"]
    assert all(line.level for line in panels[""])
    assert [line.label for line in panels[""]] == ["val", "test"]
    assert panels[""][0].y == pytest.approx([percent(5, 3), percent(5, 0)])
    assert options["x_label"] == "seed"


def test_units_and_kinds_of_values(tmp_path, shown):
    _, x, options = shown(runs_of(tmp_path, SweepAxis("data.image_size", (128, 64))))
    assert (x, options["x_label"]) == ([128, 64], "data.image_size (pixels)")
    _, x, _ = shown(runs_of(tmp_path, SweepAxis("augment.flip", (True, False))))
    assert x == ["true", "false"]
    assert as_text(("a", 1)) == "('a', 1)"
