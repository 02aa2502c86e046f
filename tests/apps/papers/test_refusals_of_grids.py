"""Sweeps and reproductions that are refused before any training."""

from helpers.refusals import Refusal, each

from mlmoe_jax.apps.papers.grid import GridPoint, combine_axes, parse_sweep, plan_runs
from mlmoe_jax.apps.papers.request import parse_request
from mlmoe_jax.config import default_config, to_json
from mlmoe_jax.runs.folder import CONFIG, RunFolder


def of_flags(says, *texts):
    """Values of --sweep."""
    return Refusal(f"sweep of {' '.join(texts)}", None, lambda at: parse_sweep(texts, default_config()), says)


def of_request(says, table="mlvpt.1", **options):
    """Flags of mlmoe reproduce."""
    return Refusal(f"{table} {options}", None, lambda at: parse_request(table, **options), says)


def of_plan(name, says, make=lambda at: None, **swept):
    """A sweep of one key."""
    ((key, values),) = swept.items()
    points = combine_axes([GridPoint("", {}, default_config())], {key.replace("__", "."): values})
    return Refusal(name, make, lambda at: plan_runs(points, RunFolder(at / "sweep")), says)


def write_other_run(at):
    other = default_config()
    other.seed = 1
    folder = RunFolder(at / "sweep/seed=0")
    folder.write_text(CONFIG, to_json(other))
    (folder / "checkpoints").mkdir()


def link_away(at):
    for name in ("elsewhere", "sweep"):
        (at / name).mkdir()
    (at / "sweep/seed=1").symlink_to(at / "elsewhere")


REFUSALS = [
    of_flags("--sweep=seed is not KEY=VALUE,VALUE,…, such as", "seed"),
    of_flags("--sweep=seed= is not KEY=VALUE", "seed="),
    of_flags("is not KEY=VALUE", "=1,2"),
    of_flags("did you mean 'seed'", "sede=1"),
    of_flags("'optim' is a section", "optim=1"),
    of_flags("--sweep key 'seed' takes an integer of at least 0 and at most 4,294,967,295 such as ", "seed=1,x"),
    of_flags("not ''", "seed=1,2,"),
    of_flags("--sweep is given twice for seed", "seed=1", "config.seed=2"),
    of_flags("not '(0.1'", "augment.crop_scale=(0.1,1.0"),
    *(
        of_request(f"--table={table} is not among mlvpt.1, mlvpt.2, ", table)
        for table in ("x.1", "mlvpt.9", "mlvpt", "")
    ),
    of_request("no row of the table matches --only=resnet; its rows have VPT, ", only="resnet"),
    of_request("--root names voc2007, which the rows of mlvpt.1 do not use", root="voc2007=/data"),
    of_request("gate_hidden is set by drmoe.5 itself", "drmoe.5", overrides=[("model.head.routing.gate_hidden", "3")]),
    of_request("seed is set by drmoe.5 itself", "drmoe.5", seeds=(1,), overrides=[("seed", "3")]),
    of_request("data.root is set by mlvpt.1 itself", root="/data", overrides=[("data.root", "/other")]),
    of_plan("epochs", "the run epochs=0 cannot be trained: the config has mistakes", train__epochs=(1, 0)),
    of_plan("a size", "the run image_size=60 cannot be trained: data.image_size is 60", data__image_size=(64, 60)),
    of_plan("a metric", "select_metric=Brier cannot be trained", eval__select_metric=("mAP", "Brier")),
    of_plan("a backbone", "backbone.name=vit_huge cannot be trained", model__backbone__name=("vit_digits", "vit_huge")),
    of_plan(
        "another config",
        "holds a run with a different config (seed was 1 and is 0)",
        write_other_run,
        seed=(2, 0),
    ),
    of_plan("a link", "seed=1 is a link out of the run folder {at}/sweep, to {at}/elsewhere;", link_away, seed=(0, 1)),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)
