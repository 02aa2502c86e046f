"""Sharing a run on a local hub: what is uploaded, and that it is the same model for whoever downloads it."""

import functools
import io
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import hub_site
from helpers.drawn_images import noise
from helpers.refusals import run_command
from helpers.runs import CALIBRATION, scores_by, write_published
from helpers.scored_run import drawn_split, write_results
from safetensors.numpy import load, load_file, save

from mlmoe_jax.apps.cli.flags import parse_flags
from mlmoe_jax.apps.hub import card
from mlmoe_jax.apps.hub import push as share
from mlmoe_jax.apps.report import run_files, training
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.config import default_config, flatten, trusted
from mlmoe_jax.config.table import KEYS
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.main import main
from mlmoe_jax.runs import restore
from mlmoe_jax.runs.decisions import Thresholds, read_thresholds, write_thresholds
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.shared_model import FILES, LAYOUT, run_folder, selection_origin
from mlmoe_jax.runtime.files import cache_folder
from mlmoe_jax.runtime.keys import ChoiceKey, FlagKey, NumberKey, PathKey, RulesKey, to_tuples
from mlmoe_jax.training.initialization import find_origin
from mlmoe_jax.training.selection import Selection

IMAGES = list(noise(3))
FIXED_KEYS = {name: key for name, key in KEYS.items() if not name.startswith("model.adapters.")}
CUTS = {"a": 0.25, "b": float("inf"), "c": 0.5}
METRICS = {"mAP": 0.75, "CF1@0.5": 0.5, "ECE_pooled": 0.125, "precision@1": float("nan")}


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory):
    """A finished run whose config names places of this machine, and its config."""
    folder, places = tmp_path_factory.mktemp("shared"), {"data__root": "/home/me/images", "log__wandb": "my-project"}
    for key in ("corrections", "tree", "known_positives"):
        places[f"data__{key}"] = f"/home/me/{key}.txt"
    with runs.world():
        of_me = {"data__test_splits": ("test",), "serve__folder": "/home/me/images", "loss__kind": "an", **places}
        run, config, *_ = runs("published", **of_me).copy(folder / "run")
        write_thresholds(run, Thresholds(CUTS, {"split": "val", "goal": "f1"}, CALIBRATION))
        scores = np.array([[0.9, 0.1, 0.2], [0.4, 0.6, 0.3]])
        codes = np.array([[1, 0, 0], [0, 1, 0]], np.int8)
        scored = SplitScores("test", np.array(["/home/me/1.jpg", "2.jpg"]), scores, codes)
        write_results(run, {"val": METRICS, "test": METRICS}, scored)
        yield run, config


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "intervals", lambda files: training.intervals(files, resamples=20))
        yield


@pytest.fixture
def hub(monkeypatch):
    with hub_site.running(monkeypatch) as running:
        yield running


def push(run: RunFolder, *flags: str) -> int:
    return main(["--mode=push", f"--workdir={run}", "--repo=user/name", "--license=apache-2.0", *flags])


@pytest.fixture(scope="module")
def files(made):
    """The files of a pushed model."""
    with pytest.MonkeyPatch.context() as patch, hub_site.running(patch) as hub:
        assert push(made[0]) == 0
        return hub.repositories["user/name"]["main"]


@pytest.fixture
def pushed(files, hub):
    """The files of a model on the hub, which a test may change."""
    hub.repositories["user/name"] = {"main": dict(files)}
    return hub.repositories["user/name"]["main"]


@pytest.fixture
def own(made, tmp_path) -> RunFolder:
    """A copy of the run that a test may change."""
    shutil.copytree(made[0].path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def card_of(run: RunFolder) -> str:
    """Return the model card of a run."""
    output = Path(run.path).with_name("out")
    assert main(["--mode=push", f"--workdir={run}", "--repo=user/name", f"--output={output}"]) == 0
    return (output / "README.md").read_text()


# ------------------------------------------------------------------------------------------------------- what is shared
def test_a_push_is_one_commit_without_the_backbone_and_without_places(made, hub, capsys):
    assert push(made[0]) == 0
    pushed = hub.repositories["user/name"]["main"]
    assert set(pushed) == set(FILES) - {"frozen.safetensors"}
    assert [path.rpartition("/")[0] for method, path, _ in hub.requests if "/commit/" in path] == [
        "/api/models/user/name/commit"
    ]
    everything = b"".join(pushed.values())
    assert b"/home/me" not in everything
    assert b"my-project" not in everything
    assert b"2.jpg" not in everything
    test = json.loads(pushed["results.json"])["test"]
    assert test["metrics"]["mAP"] == 0.75
    assert test["scores"] == "", "the file of the scores, which names images, stays here"
    assert json.loads(pushed["thresholds.json"])["thresholds"] == {"a": 0.25, "b": None, "c": 0.5}
    assert hub_site.TOKEN not in "".join(capsys.readouterr())


def test_the_model_card(pushed):
    text = pushed["README.md"].decode()
    _, metadata, body = text.split("---\n", 2)
    about = yaml.safe_load(metadata)
    assert (about["license"], about["library_name"], about["pipeline_tag"]) == (
        "apache-2.0",
        "mlmoe_jax",
        "image-classification",
    )
    assert {"mlmoe_jax", "multi-label", "tiny"} <= set(about["tags"])
    assert about["metrics"] == ["mAP", "CF1@0.5", "precision@1"]
    [result] = about["model-index"][0]["results"]
    assert result["dataset"]["split"] == "test"
    assert [(one["type"], one["value"]) for one in result["metrics"]] == [("mAP", 75.0), ("CF1@0.5", 50.0)]
    assert "--workdir=hf:user/name --images" in body
    assert "| a | 2 | 100.00 | 0.25 | 100.00 |" in body, "label, training images, AP, threshold, recall"
    assert "| b | 3 | 100.00 | never | 0.00 |" in body
    assert "| c | 4 | – | 0.5 | – |" in body
    assert "Its probabilities were calibrated on val; `results.json` has the calibration errors before." in body
    assert "fitted on val" in body
    assert json.loads(pushed["backbone.json"])["fingerprint"] in body


def test_the_model_card_says_what_out_of_fold_is(own):
    write_results(own, {"out_of_fold": METRICS}, replace(StoredRun(own).split("test"), name="out_of_fold"))
    text = card_of(own)
    assert "`out_of_fold` are the training images, each scored by a fit without the image." in text
    assert "AP is the average precision on out\\_of\\_fold, and" in text


@pytest.mark.parametrize("notes", [{}, {"step": 1, "kind": "ema"}, {"step": "1", "kind": "ema", "split": ""}])
def test_the_origin_of_selected_values_is_read_completely_or_not_at_all(notes):
    with pytest.raises(ValueError, match="its notes give "):
        selection_origin(notes)


def test_the_model_card_says_when_its_numbers_are_rough(own, monkeypatch):
    config = own.read_json("config.json")
    config["data"] |= {"name": "csv", "test_splits": []}
    own.write_json("config.json", config)
    write_results(own, {"val": METRICS}, drawn_split(rows=20))
    assert "rough: its images have" in training.why_rough(RunFiles(own)), "no split selected these weights"
    chosen = Selection({}, "mAP")
    chosen.keep(20, "raw", "val", {})
    monkeypatch.setattr(run_files, "newest_notes", lambda folder: chosen.notes())
    text = card_of(own)
    reasons = "its images selected the weights and have a median of 9 positives per label"
    assert f"The metrics on val are rough: {reasons}." in text
    assert "In brackets: 95 % intervals over resamples of the images." in text
    low, high = card.intervals(RunFiles(own))["mAP"]
    assert f"| mAP | 75.00 ({100 * low:.1f} to {100 * high:.1f}) |" in text
    assert "Trained on 10 images of a data set of the owner at" in text
    assert 'In the source folder of mlmoe_jax:\n\n```bash\npip install -e ".[serve]"\n' in text


def test_a_dry_run_writes_the_same_and_uploads_nothing(made, pushed, hub, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert push(made[0], f"--output={tmp_path / 'out'}") == 0
    assert "nothing was uploaded" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == pushed
    assert hub.requests == []
    assert push(made[0], f"--output={tmp_path / 'out'}") == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.slow
def test_frozen_weights_that_are_not_published_are_shared(made, hub, tmp_path, refusal):
    _, config = made
    own = config.copy_and_resolve_references()
    own.model.backbone.weights = str(tmp_path / "mine.safetensors")
    shutil.copy(cache_folder() / "tiny.safetensors", own.model.backbone.weights)
    run = RunFolder(tmp_path / "run")
    write_published(run, own)
    write_results(run, {"test": METRICS}, StoredRun(made[0]).split("test"))
    assert share.push(run, "user/own").exit_code == 0
    files = hub.repositories["user/own"]["main"]
    assert json.loads(files["config.json"])["model"]["backbone"]["weights"] == "mine.safetensors"
    Path(own.model.backbone.weights).unlink()
    shutil.rmtree(tmp_path / "run")
    assert len(Predictor.from_run("hf:user/own")(IMAGES)) == 3
    del files["frozen.safetensors"]
    files["config.json"] = files["config.json"].replace(b"mine.safetensors", b"/etc/passwd")
    assert "it lacks weights that are not published, such as backbone/" in refusal(Predictor.from_run, "hf:user/own")


# ---------------------------------------------------------------------------------------------------------- using one
def test_a_shared_model_gives_the_same_probabilities_and_thresholds(made, pushed):
    ours, theirs = Predictor.from_run(made[0].path), Predictor.from_run("hf:user/name")
    assert ours(IMAGES) == theirs(IMAGES)
    assert ours.thresholds.tolist() == theirs.thresholds.tolist() == list(CUTS.values())
    assert theirs.run.step == 20, "at which the values were selected"
    raw = Predictor.from_run("hf:user/name", {"calibration.use": False})
    scores, uncorrected = scores_by(theirs, IMAGES), scores_by(raw, IMAGES)
    np.testing.assert_allclose(scores, read_thresholds(made[0]).correct(uncorrected, "abc"), rtol=1e-9)
    assert np.abs(scores - uncorrected).min() > 1e-3
    assert raw.thresholds.tolist() == [0.5] * 3, "the fitted ones are of corrected scores"


def test_predict_writes_into_the_working_directory(pushed, tmp_path, monkeypatch, capsys):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.fromarray(IMAGES[0]).save("a.png")
    assert main(["--mode=predict", "--workdir=hf:user/name@main", "--images=a.png"]) == 0
    assert Path("predictions.csv").is_file()
    assert not (run_folder("hf:user/name") / "predictions.csv").exists()
    assert main(["--mode=predict", "--workdir=hf:user/name", "--images=a.png", "--checkpoint=latest"]) == 2
    assert "selected values only" in capsys.readouterr().err


def test_a_run_starts_from_a_shared_model(made, pushed):
    run, config = made
    assert parse_flags(["--config=x", "--init-from=hf:user/name"])[1] == [("init_from", "hf:user/name")]
    started = config.copy_and_resolve_references()
    started.init_from = "hf:user/name"
    space = Predictor.from_run(run.path).run.label_space
    parts = find_origin(started).parts(space)
    expected = load_file(run_folder("hf:user/name") / "adapter.safetensors")
    for path, value in parts.trainable.items():
        np.testing.assert_array_equal(value, expected[path])


def test_a_revision_is_kept_apart(made, pushed, hub):
    before = dict(pushed)
    assert main(["--mode=push", f"--workdir={made[0]}", "--repo=user/name", "--revision=v2", "--license=mit"]) == 0
    assert pushed == before
    assert "license: mit" in run_folder("hf:user/name@v2").read_text("README.md")
    assert "apache-2.0" in run_folder("hf:user/name").read_text("README.md")
    pushed |= {"frozen.safetensors": b"old", "notes.txt": b"of the user"}
    assert share.push(made[0], "user/name").exit_code == 0
    assert set(pushed) == set(FILES) - {"frozen.safetensors"} | {"notes.txt"}, "files of other names stay"


# ------------------------------------------------------------------------------------------------------------- refusals
def changed(content: bytes, tensors: dict | None = None, **about) -> bytes:
    """Return an adapter with other tensors, or other entries of its description."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    described = json.loads(header["__metadata__"]["mlmoe_jax"]) | about
    return save({**load(content), **(tensors or {})}, {"mlmoe_jax": json.dumps(described)})


TWO = np.zeros((1, 2), np.float32)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("adapter.safetensors", lambda b: b[: len(b) // 2], "is damaged"),
        ("adapter.safetensors", lambda b: save({"x": np.zeros(3, np.float32)}), "has no 'mlmoe_jax'"),
        ("adapter.safetensors", lambda b: changed(b, layout=LAYOUT + 1), "update mlmoe_jax"),
        ("adapter.safetensors", lambda b: changed(b, origin=[]), "is damaged"),
        ("adapter.safetensors", lambda b: changed(b, {min(load(b)): TWO}), "1 tensors do not fit its config, such as "),
        ("adapter.safetensors", lambda b: changed(b, {min(load(b)): TWO, "x": TWO}), "2 tensors do not fit its config"),
        ("backbone.json", lambda b: b.replace(b'"fingerprint": "', b'"fingerprint": "0'), "differ from the weights"),
        ("config.json", lambda b: b"\x80\x04", "is damaged"),
        ("label_space.npz", lambda b: b"PK", "is damaged"),
        ("thresholds.json", lambda b: b'{"thresholds": {"a": "x"}}', "could not convert string to float"),
    ],
)
def test_a_damaged_model_is_one_sentence(made, pushed, refusal, name, change, expected):
    pushed[name] = change(pushed[name])
    assert expected in refusal(Predictor.from_run, "hf:user/name")


NAMED = ["--repo=user/name"]


@pytest.mark.parametrize(
    ("flags", "fail", "says"),
    [
        (["--repo=name"], {}, "is not the name of a model on the hub"),
        ([*NAMED, "--revision=../x"], {}, "is not the name of a branch"),
        ([], {}, "required: --repo"),
        ([*NAMED, "--config.seed=1"], {}, "unrecognized arguments: --config.seed=1"),
        (["--repo=user/public", "--private"], {}, "user/public exists and is public"),
        (NAMED, {"/commit/": (403,)}, "the hub refuses user/name with the status 403"),
        (NAMED, {"/commit/": (500,)}, "cannot be uploaded, because the hub responds with 500"),
    ],
)
def test_what_a_push_refuses(made, hub, refusal, monkeypatch, flags, fail, says):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.fail, hub.repositories["user/public"] = fail, {"main": {}}
    text = refusal(run_command, "--mode=push", f"--workdir={made[0]}", *flags)
    assert says in text
    assert hub_site.TOKEN not in text
    assert fail or not hub.requests or "--private" in flags
    assert not any(hub.repositories["user/public"].values())


def test_without_results_or_token_nothing_is_uploaded(made, own, hub, refusal, monkeypatch, tmp_path):
    (own / "results.json").unlink()
    assert "has no results.json; run mlmoe eval" in refusal(share.push, own, "user/name")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no token for the hub" in refusal(share.push, made[0], "user/name")
    assert hub.requests == []


def test_a_private_model_is_shared(made, hub):
    assert share.push(made[0], "user/secret", private=True).exit_code == 0
    assert hub.private == {"user/secret"}


def test_names_of_others_are_text_in_markdown():
    assert card._plain("a|b <img src=x>\n`c` [d](e)") == r"a\|b &lt;img src=x&gt; \`c\` \[d\](e)"


# ------------------------------------------------------------------------------------------------- a stranger's config
SLOW_RULE = [["^(.+)+X$", True], ["", False]]  # takes for ever on a path
OF_TEXTS = ("http://stranger.example", "/etc")


def hostile(key):
    """Return another allowed value of a key than its default, as a stranger could choose it."""
    value = key.default
    if isinstance(key, RulesKey):
        return SLOW_RULE
    if isinstance(key, NumberKey):
        numbers = map(type(value), (value + 1, value / 2, 0.5, 500, 512))
        return next(new for new in numbers if new != value and key.allows(new))
    if isinstance(key, FlagKey):
        return not value
    if isinstance(key, ChoiceKey):
        return next(choice for choice in key.choices if choice != value)
    candidates = [OF_TEXTS[0], list(OF_TEXTS), [0.1, 0.2], [0.1], *[[choice] for choice in getattr(key, "choices", ())]]
    candidates = [*candidates, (0.1, 0.2, 0.3)]  # a color
    return next(new for new in candidates if key.allows(new) and new != value)


def test_a_config_of_a_stranger_decides_the_model_and_nothing_else():
    config = default_config()
    config.update_from_flattened_dict({name: to_tuples(hostile(key)) for name, key in FIXED_KEYS.items()})
    opened = flatten(trusted(config))
    for name, key in FIXED_KEYS.items():
        of_model = (
            name.startswith(("model.", "data.", "eval.", "calibration.", "loss.terms.")) and key.shared == "value"
        )
        assert (opened[name] == key.default) != of_model or isinstance(key, PathKey), name
    assert {name for name, key in KEYS.items() if key.shared == "value" and not name.startswith("model.")} == {
        *("data.image_size", "data.resize", "data.crop_fraction", "data.reduced_decoding", "data.truncated"),
        *(
            "data.fill",
            "eval.flips",
            "data.exif",
            "data.gray_bits",
            "eval.dtype",
            "eval.threshold",
            "eval.consistent",
            "calibration.use",
        ),
        "loss.terms.logits",
    }, "a further key that a stranger may set is a decision"


def test_no_key_of_a_stranger_changes_what_a_prediction_does(made, pushed, monkeypatch):
    before = scores_by(Predictor.from_run("hf:user/name"), IMAGES)
    stored = json.loads(pushed["config.json"])
    for name, key in FIXED_KEYS.items():
        *sections, last = name.split(".")
        if key.shared != "value":
            functools.reduce(dict.__getitem__, sections, stored)[last] = hostile(key)
    pushed["config.json"] = json.dumps(stored).encode()
    theirs = Predictor.from_run("hf:user/name")
    np.testing.assert_array_equal(scores_by(theirs, IMAGES), before)
    own = default_config()
    assert theirs.run.config.serve == own.serve
    assert (theirs.run.config.data.workers, theirs.run.config.data.root) == (own.data.workers, "")
    with pytest.raises(UserError, match="a shared model names no data"):
        theirs.run.open_split("test")
    asked = Predictor.from_run("hf:user/name", {"data.workers": 2, "eval.batch_size": 3}).run.config
    assert (asked.data.workers, asked.eval.batch_size) == (2, 3), "the user decides"


@pytest.mark.parametrize("named", [False, True])
def test_a_stranger_does_not_decide_on_images_that_need_all_memory(named, made, pushed):
    stored = json.loads(pushed["config.json"])
    stored["data"]["image_size"] = 8192
    pushed["config.json"] = json.dumps(stored).encode()
    if named:
        assert Predictor.from_run("hf:user/name", {"data.image_size": 28}).run.preprocess.image_size == 28
    else:
        with pytest.raises(UserError, match=r"8,192 × 8,192 pixels, .*set --config\.data\.image_size=8192"):
            Predictor.from_run("hf:user/name")


def test_a_model_of_a_stranger_has_few_tensors_and_a_small_label_space(made, pushed):
    empty = {f"t{at}": np.zeros(0, np.float32) for at in range(10_001)}
    whole, pushed["adapter.safetensors"] = pushed["adapter.safetensors"], save(empty)
    with pytest.raises(UserError, match="has 10,001 tensors, more than 10,000"):
        Predictor.from_run("hf:user/name")
    buffer = io.BytesIO(pushed["label_space.npz"])
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("noise.npy", np.random.default_rng(0).bytes(3 << 20))
        archive.writestr("zeros.npy", bytes(260 << 20))
    pushed["adapter.safetensors"], pushed["label_space.npz"] = whole, buffer.getvalue()
    with pytest.raises(UserError, match=r"label_space\.npz is damaged: it would unpack to"):
        Predictor.from_run("hf:user/name")


def test_a_local_copy_of_a_shared_model_does_not_decide_either(made, pushed, tmp_path):
    stored = json.loads(pushed["config.json"])
    stored["serve"]["folder"], stored["trainable"] = "/etc", SLOW_RULE
    pushed["config.json"] = json.dumps(stored).encode()
    for name, content in pushed.items():
        (tmp_path / name).write_bytes(content)
    assert Predictor.from_run(tmp_path).run.config.serve.folder == ""
    assert restore.open_run(RunFolder(tmp_path), own=True).config.serve.folder == "/etc", "as one's own, for mlmoe eval"
