"""What `mlmoe reproduce` would train: its flags, and the commands of its dry run."""

import shlex

import pytest

from mlmoe_jax.apps.cli.flags import parse_flags as parse
from mlmoe_jax.apps.papers.paper import PAPERS, load_paper
from mlmoe_jax.apps.papers.request import WORKDIR, commands_after, dry_run, parse_request
from mlmoe_jax.config import load_config, validate
from mlmoe_jax.runs.assemble import preprocess_for

TABLES = [result.id for name in PAPERS for result in load_paper(name).tables()]


def commands_of(script: str) -> list[list[str]]:
    """The arguments of every command of a dry run."""
    lines = [shlex.split(line) for line in script.splitlines() if not line.startswith("#")]
    assert all(line[0] == "mlmoe" for line in lines)
    return [line[1:] for line in lines]


@pytest.mark.parametrize("dataset", ["", "digits"])
@pytest.mark.parametrize("table", TABLES)
def test_every_command_is_understood_and_its_config_is_valid(table, dataset):
    request = parse_request(table, dataset=dataset, overrides=[("train.epochs", "1")])
    folders = set()
    for arguments in commands_of(dry_run(request, "runs/reproduce")):
        flags, overrides = parse(arguments)
        if flags.mode == "train":
            config = load_config(flags.config, overrides)
            validate(config)
            preprocess_for(config)
            assert config.train.epochs == 1
            assert config.data.name == (dataset or dict(parse_items(flags.config))["dataset"])
            folders.add(flags.workdir)
        else:  # what comes afterwards uses the folders of the runs
            assert flags.mode in ("report", "eval")
            assert {folder for folder in (flags.workdir, vars(flags).get("against")) if folder} <= folders
    assert len(folders) == len(request.runs)


def parse_items(reference: str) -> list[list[str]]:
    return [item.split("=") for item in reference.partition(":")[2].split(",")]


def test_rows_and_tables_share_runs():
    assert len(parse_request("mlvpt.1", dataset="digits").runs) == 4
    both = {run.name for run in parse_request("mlvpt.1").runs} & {run.name for run in parse_request("mlvpt.4").runs}
    assert {name.partition(",")[0] for name in both} == {"vpt", "e2vpt", "gatevpt", "mlvpt_dinov2"}


def test_seeds_roots_and_overrides_are_in_the_commands():
    request = parse_request(
        "mlvpt.3",
        only="VPT,DINOv2-B",
        root="nuswide=/n,vg256=/v g",
        seeds=(0, 2),
        overrides=[("train.epochs", "1")],
    )
    script = dry_run(request, "gs://bucket/all")
    assert "# number of runs: 4" in script
    flags, overrides = parse(commands_of(script)[3])
    name = "vpt,backbone=dinov2_vitb14,dataset=vg256,resolution=224,seed=2"
    assert flags.workdir == f"gs://bucket/all/{name}"
    assert overrides == [("seed", "2"), ("data.root", "/v g"), ("train.epochs", "1")]
    assert parse_request("mlvpt.4", root="/coco").run_overrides(parse_request("mlvpt.4").runs[0]) == [
        ("data.root", "/coco")
    ]


def test_what_comes_afterwards_needs_all_its_runs():
    assert len(commands_after(parse_request("mlvpt.fig7"), WORKDIR)) == 1
    assert commands_after(parse_request("mlvpt.fig7", only="ML-VPT"), WORKDIR) == []
    (command,) = commands_after(parse_request("drmoe.gains", seeds=(5, 6)), WORKDIR)
    assert (
        "--workdir=runs/reproduce/drmoe_resnet101,backbone=resnet101,dataset=voc2007,resolution=448,seed=5" in command
    )
    assert "--against=runs/reproduce/hsq_resnet101,backbone=resnet101,dataset=voc2007,resolution=448,seed=5" in command
    (command,) = commands_after(parse_request("drmoe.fig4"), WORKDIR)
    assert command.count("dataset=coco2014") == 2, "figure 4 is on COCO, the gains of table 6 on VOC 2007"
