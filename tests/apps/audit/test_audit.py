"""The audit of labels: suggestions, their files, and the way back into a data set."""

import contextlib
import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny
from helpers.refusals import Refusal, each, run_command
from helpers.tables import settings
from PIL import Image

from mlmoe_jax.apps.audit import audit
from mlmoe_jax.apps.audit.audit import Audit, audit_split, probe_config
from mlmoe_jax.apps.audit.audit_page import _suggestions
from mlmoe_jax.apps.audit.suggestions import audit_document, audit_text, suggestions_table
from mlmoe_jax.config import load_config
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.label_codes import DIFFICULT, UNKNOWN
from mlmoe_jax.data.label_tree import INDEPENDENT, Attribute, LabelTree
from mlmoe_jax.data.sources.corrections import COLUMNS
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.main import main
from mlmoe_jax.training.logistic.penalty_search import LogisticFit, fit_logistic

COLORS = ("red", "green", "blue")


class Photos:
    """A folder of 60 images whose channels are bright if they have a label, the table of labels, and audits of it.

    Image 7 lacks red, image 9 has blue by mistake, and image 59 is image 58 with other labels.
    """

    def __init__(self, folder: Path):
        self.folder, self.table = folder, folder / "labels.csv"
        self.suggestions, self.page = folder / "audit" / "suggestions.csv", folder / "audit" / "audit.html"
        draw = np.random.default_rng(0)
        has = draw.random((60, 3)) < 0.5
        has[59] = has[58] = (True, False, True)
        pixels = np.where(has[:, None, None], 200, 40) + draw.integers(-30, 31, (60, 16, 16, 3))
        pixels[59] = pixels[58]
        has[7, 0], has[9, 2], has[59, 1] = False, True, True
        pixels[7, ..., 0], pixels[9, ..., 2] = 210, 30
        rows = ["image,labels"]
        for number, (image, labels) in enumerate(zip(pixels.astype(np.uint8), has, strict=True)):
            Image.fromarray(image).save(folder / f"{number}.png")
            rows.append(f"{number}.png,{';'.join(np.array(COLORS)[labels])}")
        self.table.write_text("\n".join(rows) + "\n")

    def command(self, *flags: str, output: str = "audit") -> list[str]:
        config = f"--config=own_csv:root={self.folder},backbone=efficientnet_lite0"
        return ["data", "--audit", config, f"--output={self.folder / output}", *flags]

    def audit(self, *flags: str, **output: str) -> tuple[dict, str]:
        """Return the report and the warnings of an audit."""
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            assert main(self.command("--json", *flags, **output)) == 0
        return json.loads(out.getvalue()), err.getvalue()

    def rows(self) -> list[dict[str, str]]:
        """The rows of the table of suggestions."""
        return list(csv.DictReader(io.StringIO(self.suggestions.read_text(), newline="")))

    def open(self, corrections: str = "") -> Split:
        return open_split(settings(self.folder, table="labels.csv", corrections=corrections), "train")


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """The folder, and a stand-in for the backbone."""

    def colors(split: Split, config) -> tuple[Split, np.ndarray]:
        return split, np.stack([split.images.read(row).mean(axis=(0, 1)) / 50 for row in range(len(split))]).astype(
            np.float32
        )

    monkeypatch.setattr(audit, "extract_features", colors)
    return Photos(tmp_path)


def test_wrong_labels_come_first_and_accepted_ones_correct_the_table(photos, capsys):
    assert main(photos.command()) == 0
    assert "of split train" in capsys.readouterr().out
    rows = photos.rows()
    assert tuple(rows[0]) == COLUMNS
    first = {tuple(row[name] for name in ("image", "label", "given", "suggested", "accept")) for row in rows[:3]}
    assert first == {("7.png", "red", "0", "1", ""), ("9.png", "blue", "1", "0", ""), ("59.png", "green", "1", "0", "")}
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores)
    assert scores[-1] < 0.5
    photos.suggestions.write_text(photos.suggestions.read_text().replace(",\n", ",yes\n", 2))
    before, after = photos.open(), photos.open("audit/suggestions.csv")
    changed = np.argwhere(before.labels[:] != after.labels)
    assert {(after.ids[row], after.classes[label]) for row, label in changed} == {
        (row["image"], row["label"]) for row in rows[:2]
    }


def spreadsheet(rows: list[list[str]]) -> bytes:
    """The rows as a spreadsheet program saves them in Germany: the last without its empty cells, then an empty row."""
    lines = [";".join(f'"{cell}"' for cell in row) for row in rows]
    return ("\ufeff" + "\r\n".join(lines).rstrip(';"') + '"\r\n;;;;;;\r\n').encode()


@pytest.mark.parametrize("saved", ["as it was", "by a spreadsheet program"])
def test_what_a_person_writes_during_an_audit_and_before_the_next_is_kept(saved, photos, monkeypatch):
    photos.audit()
    table, fit, answers = photos.suggestions, audit.fit_logistic, ["yes", "No", "maybe"]
    heading, *rows = [line.split(",") for line in table.read_text().splitlines()]
    rows = [[*row[:-1], answer, f"why {answer}"] for row, answer in zip(rows, answers, strict=True)]
    rows.append(["2.png", "red", "", "0", "", "", ""])  # of the person
    edited = [[*heading, ""], *rows]
    file = spreadsheet(edited) if saved != "as it was" else "\n".join(map(",".join, edited)).encode()
    with monkeypatch.context() as patch:
        patch.setattr(audit, "fit_logistic", lambda *values, **keys: table.write_bytes(file) and fit(*values, **keys))
        assert "4 rows with answers or notes kept" in photos.audit()[1]
    assert photos.audit()[0]["suggestions"] == [], "an answer is not asked for again"
    assert "7.png" not in photos.page.read_text()
    kept = [list(row.values()) for row in photos.rows()]
    assert kept == [*rows[:3], [*rows[3][:5], "", ""]]
    table.write_text(table.read_text().replace("maybe", ""))
    answered = photos.open("audit/suggestions.csv").labels[:]
    assert (answered != photos.open().labels[:]).sum() == 1, "yes, once"
    photos.audit(f"--config.data.corrections={table}", output="second")
    second = photos.open("second/suggestions.csv").labels[:]
    np.testing.assert_array_equal(second, answered, "another folder has the answers too")
    photos.audit(f"--config.data.corrections={table}")
    assert sum(bool(row["column 7"]) for row in photos.rows()) == 3, "each row once"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (".~lock.suggestions.csv#", b"me", "open in an editor, as .~lock.suggestions.csv# says; close it"),
        ("suggestions.csv", "image,label\n1.png,Stra\u00dfe".encode("latin-1"), "is not UTF-8; save it as UTF-8"),
        ("suggestions.csv", b'image,label,suggested,accept\n7.png,red,1,"yes', "damaged: unexpected end of data"),
        ("suggestions.csv", b"image,label,suggested,accept\n7.png,red,1,yes,fine", "line 2 has 5 cells"),
        ("suggestions.csv", b"image,label,suggested,accept,why,why\n", "has two columns 'why'; rename one"),
    ],
)
def test_in_doubt_suggestions_are_written_beside(photos, name, content, says):
    photos.audit()
    photos.suggestions.with_name(name).write_bytes(content)
    before = photos.suggestions.read_bytes()
    _, warnings = photos.audit()
    assert says in warnings
    assert "until then, the suggestions are in" in warnings
    assert photos.suggestions.read_bytes() == before
    assert photos.suggestions.with_name("suggestions-2.csv").read_text().count("\n") == 4


def test_answers_of_two_files_that_differ_are_both_kept_and_equal_ones_once(photos):
    photos.suggestions.parent.mkdir()
    answers = {"suggestions.csv": "yes,", "suggestions-2.csv": "no,", "suggestions-3.csv": "yes,surely"}
    for name, answer in answers.items():
        photos.suggestions.with_name(name).write_text(f"image,label,suggested,accept,note\n7.png,red,1,{answer}\n")
    photos.audit()
    assert [row["accept"] for row in photos.rows() if row["image"] == "7.png"] == ["yes", "no"]


def test_similar_images_with_other_labels_and_the_page(photos):
    report, _ = photos.audit()
    assert report["similar_images_with_other_labels"] == [["58.png", "59.png"]]
    assert report["missing"] + report["superfluous"] == len(report["suggestions"]) == len(photos.rows())
    page = photos.page.read_text()
    for text in ("Audit of labels", "Suggested corrections", "Similar images with different labels", "58.png"):
        assert text in page
    assert page.count("data:image/jpeg;base64,") >= 4


# ---------------------------------------------------------------------------------------------------- what is suggested
def judged(codes, scores, groups=None, tree=INDEPENDENT) -> Audit:
    codes = np.array(codes, np.int8)
    images = ArrayImages(np.zeros((len(codes), 4, 4, 3), np.uint8))
    split = Split("train", ("a", "b"), codes, [f"{row}.png" for row in range(len(codes))], images, groups, tree=tree)
    return Audit(split, np.array(scores, np.float64), [(0, 1), (2, 3)], [])


def test_unknown_labels_can_be_missing_and_difficult_ones_are_left_out():
    codes = [[1, 1], [0, 0]] * 5 + [[UNKNOWN, DIFFICULT], [UNKNOWN, 1]]
    scores = [[0.9, 0.8], [0.1, 0.2]] * 5 + [[0.95, 0.1], [0.2, 0.1]]
    result = judged(codes, scores)
    assert [row[:4] for row in suggestions_table(result).rows] == [["10.png", "a", "", "1"], ["11.png", "b", "1", "0"]]
    assert result.twins == [(0, 1), (2, 3)]
    assert "1 missing and 1 superfluous labels suggested on 2 images" in audit_text(result)


def test_the_page_has_the_given_value_beside_another_that_is_suggested():
    codes = [[1, 0], [0, 1]] * 5 + [[1, 0], [UNKNOWN, UNKNOWN]]
    scores = [[0.9, 0.1], [0.1, 0.9]] * 5 + [[0.05, 0.95], [0.06, 0.94]]
    result = judged(codes, scores, tree=LabelTree(attributes=(Attribute("kind", (0, 1)),)))
    shown = {"10.png": b"", "11.png": b""}
    *_, cards = _suggestions(result, result.worst_images, shown).parts
    labels = {card["id"]: card["labels"] for card in cards.data["cards"]}
    assert labels == {"10.png": [("b", "missed", 0.95), ("a", "false", 0.05)], "11.png": [("b", "missed", 0.94)]}


FEW = "fewer than 5 {} have the label or are known not to have it"
WEAK = "the fit hardly finds the label"


def test_labels_of_few_images_or_groups_are_not_judged():
    """A fit without a group may have none of its images."""
    codes = np.array([[1, 1]] * 4 + [[0, 1]] * 4 + [[0, 0]] * 8)
    scores = np.where(codes, 0.9, 0.1)
    scores[[7, 8]] = [[0.95, 0.05], [0.95, 0.95]]
    few = judged(codes, scores)
    assert few.suggestions.tolist() == [[7, 1], [8, 1]]
    assert audit_document(few)["not_judged"] == {FEW.format("images"): ["a"]}
    assert f"not judged, because {FEW.format('images')}: a" in audit_text(few)
    codes = np.array([[1, 1], [0, 0]] * 10)
    scores = np.where(codes, 0.9, 0.1)
    scores[1] = 0.95
    for sick, is_judged in ((6, True), (10, False)):
        groups = ["sick" if row % 2 == 0 and row < 2 * sick else f"p{row}" for row in range(20)]
        result = judged(codes, scores, groups=groups)
        assert (result.judged.all(), len(result.suggestions) > 0) == (is_judged, is_judged)
    assert f"{FEW.format('groups of images')}: a, b" in audit_text(result)


def test_labels_that_the_fit_hardly_finds_are_not_judged(photos, monkeypatch):
    """Below a half, a label and its absence differ too little to call a given label superfluous."""
    codes = np.array([[1, 1], [0, 0]] * 6)
    scores = np.where(codes, [0.8, 0.3], 0.1)
    scores[:2] = [[0.05, 0.05], [0.9, 0.9]]
    result = judged(codes, scores)
    assert result.suggestions.tolist() == [[0, 0], [1, 0]]
    assert audit_document(result)["not_judged"] == {WEAK: ["b"]}
    assert "too weak" not in audit_text(result)
    monkeypatch.setattr(LogisticFit, "held_out_scores", property(lambda fit: np.full((60, 3), 0.4)))
    report, _ = photos.audit()
    assert (report["suggestions"], report["not_judged"]) == ([], {WEAK: sorted(COLORS)})
    page = photos.page.read_text()
    for text in (WEAK, "the fit is too weak to judge any label, so nothing is suggested; label more images"):
        assert text in page


def test_suggestions_agree_with_the_tree(photos, monkeypatch):
    """A probable red makes what it implies probable too; that red implies it is no news."""
    photos.table.write_text(photos.table.read_text().replace("red", "red;warm"))
    (photos.folder / "tree.yaml").write_text("implies: {red: warm}")
    monkeypatch.setattr(audit, "SUPPORT", 10)
    opened = photos.open()
    red, warm = map(opened.classes.index, ("red", "warm"))
    scores = np.where(opened.labels[:] == 1, 0.9, 0.1)
    has = np.flatnonzero(opened.labels[:][:, red])
    scores[7, red], scores[has[0], warm] = 0.95, 0.05
    monkeypatch.setattr(LogisticFit, "held_out_scores", property(lambda fit: scores))
    report, _ = photos.audit("--config.data.tree=tree.yaml")
    assert [(row["image"], row["label"]) for row in report["suggestions"]] == [("7.png", "red"), ("7.png", "warm")]
    assert ("red", "warm") not in [(pair["label"], pair["with"]) for pair in report["together"]]


def of_no_images(at):
    photos = Photos(at)
    for number in range(60):
        (at / f"{number}.png").write_text("no image")
    return photos.command("--config.data.bad_images=skip")


def audit_few(at):
    config = probe_config(load_config("linear_probe:dataset=digits", []))
    audit_split(judged([[1, 0]] * 9, np.zeros((9, 2))).split, config)


NO_LABEL = (
    "no label can be judged: a label needs 5 images of split train that have it and 5 that are known not to have it"
)
REFUSALS = [
    Refusal("no images", of_no_images, lambda flags: run_command(*flags), "16 of 16 images of split train"),
    Refusal("few labels", None, audit_few, NO_LABEL),
]


@each(REFUSALS)
def test_what_cannot_be_judged_is_refused_at_once(case, tmp_path):
    case.check(tmp_path)


def test_labels_that_are_nearly_always_together(photos, monkeypatch):
    photos.table.write_text(photos.table.read_text().replace("blue", "blue;sky"))
    monkeypatch.setattr(audit, "SUPPORT", 10)
    together = {(pair["label"], pair["with"]) for pair in photos.audit()[0]["together"]}
    assert together == {("blue", "sky"), ("sky", "blue")}


def test_the_images_of_a_group_are_in_one_fold(photos, monkeypatch):
    patients = [f"p{number // 2}" for number in range(60)]
    lines = zip(photos.table.read_text().splitlines(), ["patient", *patients], strict=True)
    photos.table.write_text("".join(f"{line},{patient}\n" for line, patient in lines))
    options, fit = {}, audit.fit_logistic
    monkeypatch.setattr(audit, "fit_logistic", lambda *values, **keys: options.update(keys) or fit(*values, **keys))
    photos.audit("--config.data.group_column=patient")
    assert options["units"] == patients


@pytest.mark.slow
def test_images_with_similar_features_are_in_one_fold(photos, monkeypatch):
    seen = []

    def joined(split, data_config, features):
        seen.append((features.shape, data_config.join_twins))
        return replace(split, groups=[str(row // 3) for row in range(len(split))])

    monkeypatch.setattr(audit, "join_twins", joined)
    monkeypatch.setattr(audit, "fit_logistic", lambda *a, **k: seen.append(k["units"]) or fit_logistic(*a, **k))
    photos.audit()
    assert seen == [((60, 3), True), [str(row // 3) for row in range(60)]]


def test_the_features_are_those_of_the_frozen_backbone_without_prompts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    tiny.use_vit(monkeypatch, patch=16)
    tiny.use_scenes(monkeypatch, train=50, val=20, test=20, test_shift=20)
    keys = ["--config.model.backbone.weights=none", "--config.eval.batch_size=16"]
    assert main(["data", "--audit", "--config=mlvpt_digits", f"--output={tmp_path / 'audit'}", *keys, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["images"] == 50
    assert (tmp_path / "audit" / "audit.html").exists()
    [stored] = (tmp_path / "cache" / "features").glob("*/00000.cls.npy")
    assert len(np.load(stored)) == 50
