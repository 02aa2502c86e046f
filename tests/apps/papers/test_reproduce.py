"""Published numbers beside those of runs: what is measured, and how it is shown and written."""

import json
import math

import numpy as np
import pytest
from helpers.commands import csv_rows
from helpers.scored_run import write_results

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.papers import grid
from mlmoe_jax.apps.papers.paper import load_paper
from mlmoe_jax.apps.papers.reproduce import Measurements, comparison_table, write_tables
from mlmoe_jax.apps.papers.request import Request, parse_request
from mlmoe_jax.data.labels.space import LabelSpace
from mlmoe_jax.evaluation.metrics.published import preset
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.main import main
from mlmoe_jax.runs.folder import CONFIG, LABEL_SPACE, LABELS, RESULTS, RunFolder

NAMES = ("car", "traffic light", "aeroplane")


def write_run(folder: RunFolder, config, seed: int) -> dict[str, np.ndarray]:
    """Write a finished run with drawn scores of ten images; return scores and label codes."""
    draw = np.random.default_rng(seed)
    codes = (draw.random((10, 3)) < 0.5).astype(np.int8)
    codes[0], codes[1] = 1, 0
    scores = draw.random((10, 3))
    folder.write_text(CONFIG, configuration.to_json(config))
    folder.write_text(LABELS, "\n".join(NAMES) + "\n")
    together = np.array([[0, 3, 0], [3, 0, 0], [0, 0, 0]])
    space = LabelSpace(NAMES, together, np.array([8, 4, 5]), 20, *np.zeros((2, 3), np.int32))
    with open(folder / LABEL_SPACE, "wb") as file:
        space.save(file)
    split = config.data.test_splits[0]
    write_results(folder, {split: {"mAP": 0.5}}, SplitScores(split, np.arange(10).astype(str), scores, codes))
    return {"scores": scores, "codes": codes, "frequency": space.frequency}


def finish(request: Request, folder: RunFolder) -> dict[str, dict]:
    """Write all runs of a request; return the scores by the name of the run."""
    written = {}
    for seed, run in enumerate(request.runs):
        config = configuration.load_config(run.reference, request.run_overrides(run))
        written[run.name] = write_run(folder.below(run.name), config, seed)
    return written


def outcomes_of(request: Request, folder: RunFolder):
    measurements = Measurements(request, folder)
    return measurements.measure_rows(request.rows)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path)


# ------------------------------------------------------------------------------------------------------ measurements
@pytest.mark.parametrize(
    ("table", "only", "evaluator", "exchanged"),
    [("mlvpt.1", "ML-VPT,dinov2-b,224", "mlvpt", {}), ("drmoe.1", "Q2L", "q2l", {"OF1": "CF1", "CF1": "OF1"})],
)
def test_metrics_are_those_of_the_evaluator_of_the_row(table, only, evaluator, exchanged, folder):
    request = parse_request(table, only=only)
    (written,) = finish(request, folder).values()
    (outcome,) = outcomes_of(request, folder)
    expected = preset(evaluator, written["scores"], written["codes"], frequency=written["frequency"])
    assert expected["CF1"] != expected["OF1"]
    for column, number in outcome.row.numbers.items():
        assert outcome.ours[column] == pytest.approx(100 * expected[exchanged.get(column, column)])
        assert outcome.difference(column) == pytest.approx(outcome.ours[column] - number.value)
    assert (outcome.spread, outcome.state) == ({}, "")


def test_seeds_are_averaged_and_methods_subtracted(folder):
    request = parse_request("mlvpt.fig3", only="coco2014", seeds=(0, 1))
    written = finish(request, folder)
    of = {row.row.settings["method"]: row for row in outcomes_of(request, folder)}

    def found(method: str) -> list[float]:
        runs = [one for name, one in written.items() if name.startswith(method)]
        return [100 * preset("mlvpt", one["scores"], one["codes"], frequency=one["frequency"])["mAP"] for one in runs]

    for row, values in (("VPT", found("vpt,")), ("GVPT − VPT", np.subtract(found("gvpt,"), found("vpt,")))):
        assert len(values) == 2
        assert of[row].ours["mAP"] == pytest.approx(np.mean(values))
        assert of[row].spread["mAP"] == pytest.approx(np.std(values, ddof=1))


def test_labels_and_pairs(folder):
    of_labels = parse_request("drmoe.6", only="HSQ")
    (written,) = finish(of_labels, folder).values()
    (outcome,) = outcomes_of(of_labels, folder)
    one = {name: value[:, 2:] for name, value in written.items() if name != "frequency"}
    assert outcome.ours["AP aeroplane"] == pytest.approx(100 * preset("drmoe", **one, frequency=None)["mAP"])
    assert math.isnan(outcome.ours["AP sofa"])
    pairs = parse_request("mlvpt.fig1")
    finish(pairs, folder)
    (outcome,) = outcomes_of(pairs, folder)
    assert outcome.ours["p(car | traffic light)"] == 3 / 4
    assert math.isnan(outcome.ours["p(dog | frisbee)"])


def test_what_needs_no_training_and_what_this_package_lacks(folder):
    (outcome,) = outcomes_of(parse_request("mlvpt.4", only="linear probing", dataset="digits"), folder)
    assert (outcome.ours["trainable, M"], outcome.ours["total, M"]) == pytest.approx((1290 / 1e6, 1_026_058 / 1e6))
    assert ("mAP" in outcome.ours, outcome.state) == (False, "not reproduced here")
    (outcome,) = outcomes_of(parse_request("drmoe.originals", only="ML-Decoder"), folder)
    assert (outcome.ours, outcome.state) == ({}, "this package does not have it")


@pytest.mark.slow
def test_the_costs_on_the_page_are_those_of_the_models(folder):
    for outcome in outcomes_of(parse_request("mlvpt.4"), folder):
        shown = {column: value for column, value in outcome.row.ours.items() if value is not None}
        assert len(shown) == 3
        assert outcome.ours == pytest.approx(shown, abs=1e-4)  # MACs have four digits, parameters all
        assert outcome.ours["trainable, M"] == pytest.approx(shown["trainable, M"], abs=1e-9)
        assert outcome.ours["total, M"] == pytest.approx(shown["total, M"], abs=1e-9)


# ------------------------------------------------------------------------------------------------------------ output
@pytest.fixture
def two(folder):
    """ML-VPT's table 2 on DINOv2-B with one run finished: (request, outcomes, folder)."""
    finish(parse_request("mlvpt.2", only="ML-VPT,dinov2-b,224"), folder)
    request = parse_request("mlvpt.2", only="dinov2-b,224")
    return request, outcomes_of(request, folder), folder


def test_the_text_has_three_lines_per_row_and_every_caveat(two):
    request, outcomes, _ = two
    text, ours = comparison_table(request, outcomes).text(), outcomes[-1]
    lines = text.splitlines()
    assert lines[0] == "ML-VPT, table 2: Prompt tuning of six frozen backbones on VOC 2007"
    assert "not reproduced here" in lines[3]
    at = next(k for k, line in enumerate(lines) if line.startswith("ML-VPT, DINOv2-B"))
    assert lines[at].split()[-4:] == ["published", "96.4", "91.0", "92.3"]
    assert lines[at + 1].split() == ["ours", *(f"{ours.ours[c]:.2f}" for c in ("mAP", "CF1", "OF1"))]
    assert lines[at + 2].split()[:2] == ["difference", f"{ours.difference('mAP'):+.2f}"]
    plain = " ".join(text.split())
    assert all(request.paper.notes[note] in plain for note in request.table.notes)
    assert "evaluator of mlvpt" in text


def shown(folder, table, trained=None, **flags) -> str:
    """The text of a table, of which the runs of the rows `trained` are finished."""
    if trained:
        finish(parse_request(table, only=trained, dataset=flags.get("dataset", "")), folder)
    request = parse_request(table, **flags)
    return comparison_table(request, outcomes_of(request, folder)).text()


def test_numbers_that_were_not_simply_read_are_marked(folder):
    text, paper = shown(folder, "mlvpt.1", only="GateVPT,vit_b16_in1k,224"), load_paper("mlvpt")
    note = paper.numbers["one_of_two"]
    (line,) = (line for line in text.splitlines() if "75.6?" in line)
    assert f" {note}, " in line
    assert f"[{note}] {paper.readings['one_of_two']}" in " ".join(text.split())


def test_a_figure_of_images_says_which_runs_are_missing(folder):
    lines = shown(folder, "mlvpt.fig7", trained="VPT").splitlines()
    ours = [line for line in lines if line.split()[:1] == ["ours"]]
    assert ["not reproduced here" in line for line in ours] == [False, True]


def test_on_other_data_there_is_no_difference(folder):
    row = "VPT,dinov2-b,224"
    text = shown(folder, "mlvpt.2", trained=row, dataset="digits", only=row)
    assert "on digits instead of the published data" in text
    assert "difference" not in text


def test_files(two):
    request, outcomes, folder = two
    write_tables(request, outcomes, folder)
    rows = csv_rows(folder / "mlvpt.2.csv")
    assert len(rows) == 4 * 3
    last, reference = rows[-3], "mlvpt_dinov2:backbone=dinov2_vitb14,dataset=voc2007,resolution=224"
    named = {"column": "mAP", "metric": "mlvpt/mAP", "published": "96.4", "config": reference}
    assert last.items() >= named.items()
    ours = [outcomes[-1].ours["mAP"], outcomes[-1].difference("mAP")]
    assert [float(last["ours"]), float(last["difference"])] == pytest.approx(ours)
    assert set(last["caveats"].split()) == set(request.table.notes)
    assert (folder / last["run"] / RESULTS).exists()
    assert (rows[0]["ours"], rows[0]["difference"], rows[0]["uncertain"]) == ("", "", "False")
    assert "| ML-VPT, DINOv2-B, voc2007, 224 | published | 96.4 |" in (folder / "mlvpt.2.md").read_text()


# ---------------------------------------------------------------------------------------------------------- the whole
# Samples need the model of a run, which `trainings` does not make.
FLAGS = ("--mode=reproduce", "--dataset=digits", "--config.report.samples=0")


@pytest.fixture
def trainings(monkeypatch):
    """Replace training by writing drawn scores; lists the trained runs."""
    trained = []

    def train(config, folder):
        trained.append(folder.path.name)
        write_run(folder, config, len(trained))

    monkeypatch.setattr(grid, "train", train)
    return trained


def test_only_what_is_missing_is_trained_and_all_that_is_there_is_shown(trainings, tmp_path, capsys):
    flags = [*FLAGS, "--table=mlvpt.fig3", f"--workdir={tmp_path}"]
    assert main([*flags, "--only=VPT"]) == 0
    assert trainings == ["vpt,dataset=digits"]
    assert not (tmp_path / ".lock").read_text()
    capsys.readouterr()
    assert main([*flags, "--json"]) == 0
    assert trainings == ["vpt,dataset=digits", "gvpt,dataset=digits", "mlvpt_dinov2,dataset=digits"]
    entries = json.loads(capsys.readouterr().out)
    assert len(entries) == 10 * 3
    assert all(entry["ours"] is not None for entry in entries)
    assert len(csv_rows(tmp_path / "mlvpt.fig3-digits.csv")) == 30
    assert main([*FLAGS, "--table=mlvpt.fig7", f"--workdir={tmp_path}"]) == 0
    after = f"--workdir={tmp_path}/mlvpt_dinov2,dataset=digits --against={tmp_path}/vpt,dataset=digits"
    assert after in capsys.readouterr().err, "the command that shows the figure"


def test_a_run_with_another_config_is_not_in_the_table(trainings, tmp_path, capsys):
    """As a trial of one epoch, before the table itself is trained."""
    flags = [*FLAGS, "--table=mlvpt.fig3", f"--workdir={tmp_path}"]
    assert main([*flags, "--only=VPT", "--config.train.epochs=1"]) == 0
    capsys.readouterr()
    assert main([*flags, "--only=GVPT"]) == 0
    told = "vpt,dataset=digits is not in the table, because it was trained differently: train.epochs was 1 and is 8"
    assert capsys.readouterr().err.count(told) == 1
    ours = {row["row"].partition(",")[0]: row["ours"] for row in csv_rows(tmp_path / "mlvpt.fig3-digits.csv")}
    assert ours["GVPT"]
    assert not ours["VPT"]
