"""The grid of a sweep: its flags, the names of its folders, its runs and their results."""

import pytest

from mlmoe_jax.apps.papers.grid import (
    GridPoint,
    combine_axes,
    parse_sweep,
    plan_runs,
    point_name,
    short_name,
    value_text,
)
from mlmoe_jax.config import default_config, flatten, load_config
from mlmoe_jax.runs.folder import RunFolder

GROUPS = "model.prompts.num_groups"


def plan(config, folder, swept):
    """Return the runs of a config with all combinations of the swept values."""
    return plan_runs(combine_axes([GridPoint("", {}, config)], swept), folder)


# ------------------------------------------------------------------------------------------------------ the flag
@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("config.model.prompts.num_groups=2,3, 5,8", GROUPS, (2, 3, 5, 8)),
        ("seed=0,0", "seed", (0,)),
        ("optim.learning_rate=1e-3,1", "optim.learning_rate", (0.001, 1.0)),
        ("train.save_backbone=true,0", "train.save_backbone", (True, False)),
        ("optim.name=adamw,sgd", "optim.name", ("adamw", "sgd")),
        ("data.val_split=,val", "data.val_split", ("", "val")),
        ("data.images=a=b,c", "data.images", ("a=b", "c")),
        ("data.test_splits=('test','val'),('test',)", "data.test_splits", (("test", "val"), ("test",))),
        ("data.test_splits=test,val", "data.test_splits", (("test",), ("val",))),
        (
            "config=vpt,gvpt:sides=co,per_group=2,mlvpt_digits",
            "config",
            ("vpt", "gvpt:sides=co,per_group=2", "mlvpt_digits"),
        ),
        ("augment.crop_scale=(0.1,1.0),[0.5,1.0]", "augment.crop_scale", ((0.1, 1.0), (0.5, 1.0))),
    ],
)
def test_values_of_a_flag_have_the_type_of_the_key(text, key, values):
    config = default_config()
    before = flatten(config)
    assert parse_sweep([text], config) == {key: values}
    assert list(map(type, parse_sweep([text], config)[key])) == list(map(type, values))
    assert flatten(config) == before
    again = f"{key}={','.join(map(value_text, values))}"
    assert parse_sweep([again], config) == {key: values}, "text and values are inverse"


# --------------------------------------------------------------------------------------------------- folder names
def test_names_are_as_short_as_the_config_allows():
    short = ("num_groups", "seed", "train.batch_size", "optim.name", "head.kind", "data.name")
    keys = [GROUPS, "seed", "train.batch_size", "optim.name", "model.head.kind", "data.name"]
    assert tuple(short_name(key, default_config()) for key in keys) == short


def test_folder_names_are_safe_distinct_and_independent_of_the_order_of_flags():
    config = default_config()
    names = [point_name(values, config) for values in ({"seed": 0, GROUPS: 2}, {GROUPS: 2, "seed": 0})]
    assert names == ["num_groups=2,seed=0"] * 2
    plain = {1e-5: "1e-05", 1e20: "1e+20", True: "true", -1: "-1", "adamw": "adamw", "": ""}
    assert [point_name({"k": value}, config) for value in plain] == [f"k={text}" for text in plain.values()]
    odd = ["a/b", "a_b", "a b", "../x", "a,b", "x" * 300, "x" * 301, ("a", "b"), ("a+b",), (), ("",), (("^b$", 1.0),)]
    names = [point_name({"k": value}, config) for value in odd]
    assert len(set(names)) == len(odd)
    for name in names:
        assert len(name) < 120
        assert not set(name) & set("/ ,\\:*?\"<>|'$^()")


# ---------------------------------------------------------------------------------------------------------- the plan
def test_the_grid_has_every_combination_with_its_own_config(tmp_path):
    config = default_config()
    config.data.val_split = ""  # only a swept key makes the config valid
    runs = plan(config, RunFolder(tmp_path), {"eval.select_on": ("test",), GROUPS: (2, 3), "seed": (0, 1)})
    assert [run.name for run in runs] == [f"num_groups={g},seed={s},select_on=test" for g in (2, 3) for s in (0, 1)]
    for run in runs:
        assert run.values == {key: flatten(run.config)[key] for key in ("eval.select_on", GROUPS, "seed")}
        assert str(run.folder) == str(tmp_path / run.name)
    assert (config.seed, config.model.prompts.num_groups) == (0, 5)
    assert not list(tmp_path.iterdir())


def test_a_published_learning_rate_follows_a_swept_backbone(tmp_path):
    config = load_config("mlvpt_dinov2", [])
    backbones = parse_sweep(["config.model.backbone.name=dinov2_vitb14,dinov2_vits14"], config)
    rates = {
        run.values["model.backbone.name"]: run.config.optim.learning_rate
        for run in plan(config, RunFolder(tmp_path), backbones)
    }
    assert rates == {"dinov2_vitb14": 1e-4, "dinov2_vits14": 5e-4}
