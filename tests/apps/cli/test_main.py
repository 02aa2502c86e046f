"""The commands as a user runs them, on a reduced digits and a tiny random backbone."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import small_program
from helpers.commands import csv_rows, printed, refused, succeeded
from helpers.scored_run import stored_metrics, stored_scores
from PIL import Image

from mlmoe_jax.apps.cli.commands import COMMANDS
from mlmoe_jax.apps.cli.flags import FLAGS, parse_flags
from mlmoe_jax.config import load_config, split_references
from mlmoe_jax.data.sources.digits import open_scenes
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.version import __version__

SMALL = small_program.SMALL
pytestmark = pytest.mark.usefixtures("run")  # few scenes and the tiny backbone, in this process too


@pytest.fixture(scope="module")
def trained(runs, tmp_path_factory):
    """Return a finished run folder, and what its training printed."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    return folder, runs("program").copy(folder).done


# ------------------------------------------------------------------------------------------------------------ help
@pytest.fixture
def shown(command, monkeypatch):
    """Return a function that returns the help that a command prints."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: succeeded(command(*arguments)).stdout


def test_help_has_a_sentence_of_every_mode_on_one_screen(shown):
    text = shown("--help")
    assert all(re.search(rf"^ *{mode}\s+{re.escape(one.sentence)}$", text, re.M) for mode, one in COMMANDS.items())
    assert all(word in text for word in ("--mode", "--config.KEY=VALUE", "--help=optim", "docs/getting-started.md"))
    assert text.count("\n") <= 40
    assert shown("-h") == text
    assert shown("--version") == f"mlmoe_jax {__version__}\n"


@pytest.mark.parametrize("mode", COMMANDS)
def test_help_of_a_mode_has_its_sentence_its_flags_and_an_example(mode, shown):
    text, command = shown(mode, "--help"), COMMANDS[mode]
    assert command.sentence in text
    own = {*command.needs, *command.flags}
    assert own <= FLAGS.keys()
    assert set(re.findall(r"^  --([a-z-]+)", text, re.M)) == own | {"json"}
    example = text.splitlines()[-1].split()
    assert example[:2] == ["mlmoe", mode]
    flags, overrides = parse_flags(example[1:])
    assert flags.mode == mode
    for reference in [vars(flags).get("config"), *split_references(vars(flags).get("configs", ""))]:
        assert reference is None or load_config(reference, overrides)
    assert shown(f"--mode={mode}", "--help") == text


def test_a_mode_is_the_first_word_or_a_flag():
    command = ["--workdir=a", "--images=b"]
    for named in (["predict", *command], ["--mode=predict", *command], [*command, "--mode=predict"]):
        flags, overrides = parse_flags([*named, "--config.eval.dtype=float32"])
        assert (flags.mode, flags.workdir, flags.images) == ("predict", "a", ["b"])
        assert overrides == [("eval.dtype", "float32")]
    assert parse_flags(["--config=mlvpt_digits"])[0].mode == "train"


@pytest.mark.parametrize("words", [["--images", "b", "c"], ["--images=b", "--images=c"]])
def test_several_images_follow_one_flag_or_have_one_each(words):
    assert parse_flags(["predict", "--workdir=a", *words])[0].images == ["b", "c"]


# ------------------------------------------------------------------------------------------------- train and eval
def test_training_leaves_a_complete_run_folder(trained):
    folder, done = trained
    results = printed(done)
    assert set(results) == {"val", "test", "test_shift"}
    assert 0 < results["test"]["mAP"] < 1
    for name in ("config.json", "labels.txt", "label_space.npz", "preprocess.json", "thresholds.json", "backbone.json"):
        assert (folder / name).is_file(), name
    assert not (folder / "frozen.safetensors").exists(), "the catalogue has these weights"
    assert stored_metrics(folder) == results
    assert stored_scores(RunFolder(folder)).keys() == results.keys()
    assert "parameters trainable" in done.stderr


def test_eval_reproduces_training_to_the_last_digit(command, trained):
    folder, done = trained
    results, again = printed(done), printed(command("--mode=eval", f"--workdir={folder}", "--json"))
    assert again == {name: results[name] for name in ("test", "test_shift")}
    changes = ("--config.data.test_splits=val", "--config.report.samples=2")
    other = succeeded(command("--mode=eval", f"--workdir={folder}", *changes))
    index = json.loads((folder / "samples" / "index.json").read_text())
    assert (index["split"], len(index["samples"])) == ("val", 2)
    assert f"{100 * results['val']['mAP']:.2f}" in other.stdout
    assert [line.split()[0] for line in other.stdout.splitlines()] == [
        "metric,", "mAP", "CF1@0.5", "OF1@0.5", "AUC_macro", "precision@1"
    ]  # fmt: skip
    assert f"results go to {folder}/results.json" in other.stderr


def test_rerunning_a_finished_training_only_evaluates(command, trained):
    folder, done = trained
    before = RunFolder(folder).rows()
    assert printed(command("--config=mlvpt_digits", f"--workdir={folder}", "--json", *SMALL)) == printed(done)
    assert RunFolder(folder).rows() == before
    assert len(json.loads((folder / "starts.json").read_text())) == 1, "nothing was left to train"


@pytest.mark.slow
def test_results_of_an_older_checkpoint_have_their_own_exit_code(command, trained, photos, tmp_path):
    copy = tmp_path / "c"
    shutil.copytree(trained[0], copy)
    before, newest = sorted(int(path.name) for path in (copy / "checkpoints").iterdir())
    (copy / "checkpoints" / str(newest) / "notes" / "metadata").write_text("{}")
    warning = f"--checkpoint={before} uses it without this warning"
    fallen_back = command("--mode=eval", f"--workdir={copy}", "--json")
    assert fallen_back.returncode == 3, fallen_back.stderr
    assert warning in fallen_back.stderr
    asked_for = succeeded(command("--mode=eval", f"--workdir={copy}", "--json", f"--checkpoint={before}"))
    assert warning not in asked_for.stderr
    assert json.loads(asked_for.stdout) == json.loads(fallen_back.stdout)
    predict = ("--mode=predict", f"--workdir={copy}", f"--images={photos}", f"--output={tmp_path / 'p.csv'}")
    assert command(*predict).returncode == 3
    assert command(*predict, "--checkpoint=latest").returncode == 3
    assert command(*predict, f"--checkpoint={before}").returncode == 0


# --------------------------------------------------------------------------------------------------------- predict
@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.RandomState(0)
    for name in ("b.png", "a.jpg", "c.png"):
        Image.fromarray(random.randint(0, 255, (40, 60, 3), np.uint8)).save(folder / name)
    return folder


def test_predict_writes_one_row_per_image(command, trained, photos, tmp_path):
    predict = ("--mode=predict", f"--workdir={trained[0]}")
    done = succeeded(command(*predict, f"--images={photos}", f"--output={tmp_path / 'p.csv'}"))
    assert "3 of 3 images labeled" in done.stdout
    rows = csv_rows(tmp_path / "p.csv")
    assert [Path(row["image"]).name for row in rows] == ["a.jpg", "b.png", "c.png"]
    for row in rows:
        above = [str(k) for k in range(10) if float(row[str(k)]) >= 0.5]
        assert [name for name in row["labels"].split(";") if name] == above
    refused(command(*predict, f"--images={photos}", "--checkpoint=1"), "not of 1")


@pytest.mark.slow
def test_predict_gives_the_scores_of_eval(command, trained, tmp_path):
    """An image as a file, with the run folder alone, scores as it did as part of the data set."""
    folder, _ = trained
    (tmp_path / "scenes").mkdir()
    for row, image in enumerate(open_scenes("test").images.array[:5]):
        Image.fromarray(image).save(tmp_path / "scenes" / f"{row}.png")
    output = tmp_path / "p.jsonl"
    succeeded(command("--mode=predict", f"--workdir={folder}", f"--images={tmp_path / 'scenes'}", f"--output={output}"))
    ours = np.array([[*json.loads(line)["scores"].values()] for line in output.read_text().splitlines()])
    np.testing.assert_allclose(ours, StoredRun(RunFolder(folder)).split("test").scores[:5], rtol=1e-5)
