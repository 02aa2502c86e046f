"""What a key means is declared once, and everything else follows from its declaration."""

import ast
import re

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.apps.cli.commands import COMMANDS
from mlmoe_jax.config import default_config, find_unread, flatten, portable, use_adapter
from mlmoe_jax.config.table import KEYS, REQUIRED, SECTIONS, entry_named, keys_read
from mlmoe_jax.runtime.keys import (
    ON_RESUME,
    SHARED,
    IntegerKey,
    PathKey,
    TextKey,
    keys_of,
    others,
    resolve,
    section,
)
from mlmoe_jax.runtime.registry import Registry, component
from mlmoe_jax.runtime.stages import STAGES
from tools.docs.source import parse_source


@pytest.mark.parametrize("name", [*SECTIONS, *KEYS])
def test_a_meaning_is_whole_and_its_conditions_are_values_of_other_keys(name):
    entry = entry_named(name)
    assert entry.stages
    assert entry.on_resume in ON_RESUME
    assert entry.shared in SHARED
    for key, values in entry.only_if.items():
        assert key in KEYS, f"{name} depends on {key}"
        assert key != name
        assert all(KEYS[key].allows(value) for value in getattr(values, "values", values)), f"{name} depends on {key}"


def test_every_stage_is_run_by_a_command_and_read_by_a_key():
    """The config of a training has the keys of later stages, which therefore are not without an effect there."""
    run = {stage for command in COMMANDS.values() for stage in command.stages}
    assert run == set(STAGES)
    assert all(keys_read(stage) for stage in STAGES)


@pytest.mark.parametrize(
    ("mode", "unread"),
    {
        "train": ["pack.short_side", "prune.token_levels"],
        "prune": ["pack.short_side"],
        "eval": ["optim.b1", "pack.short_side", "prune.token_levels", "model.adapters.lora.rank"],
        "predict": [
            "data.tree",
            "metrics.preset",
            "optim.b1",
            "report.samples",
            "pack.short_side",
            "prune.token_levels",
        ],
        "export": ["metrics.preset", "optim.b1", "report.samples", "pack.short_side", "prune.token_levels"],
        "encode": [name for name in KEYS if name not in ("model.backbone.weights", "model.backbone.canonical_texts")],
        "thresholds": ["calibration.method", "thresholds.at_end", "eval.threshold"],
        "calibrate": ["thresholds.goal", "thresholds.precision", "eval.threshold"],
    }.items(),
)
def test_what_a_command_does_not_read(mode, unread):
    found = find_unread(KEYS.items(), COMMANDS[mode].stages)
    assert set(unread) <= set(found)
    images = {"data.image_size", "data.resize", "data.gray_bits", "data.exif", "data.workers", "data.crop_fraction"}
    if mode in ("train", "prune", "eval", "predict", "serve", "export"):
        assert not images & set(found), "how an image is read counts wherever images are read"


def test_an_entry_inherits_what_it_does_not_give():
    inner = section("Inner.", only_if={"kind": ("a",)}, deep=TextKey("", "Deep.", only_if={"other": ("b",)}))
    outer = section(
        "Outer.",
        stages=("train",),
        on_resume="free",
        shared="default",
        kind=TextKey("", "Kind."),
        own=TextKey("", "Own.", stages=("score",), on_resume="reported", only_if={"far.key": ("c",)}),
        inner=inner,
    )
    whole = section("Whole.", on_resume="fixed", shared="value", outer=outer)
    resolved = resolve(whole, "", whole).entries["outer"]
    deep, own = resolved.entries["inner"].entries["deep"], resolved.entries["own"]
    assert deep.only_if == {"outer.kind": ("a",), "outer.inner.other": ("b",)}
    assert (deep.stages, deep.on_resume, deep.shared) == (("train",), "free", "default")
    assert (own.stages, own.on_resume, own.only_if) == (("score",), "reported", {"far.key": ("c",)})
    for wrong in ({"stages": ("trian",)}, {"on_resume": "train"}, {"shared": "free"}):
        with pytest.raises(ValueError, match="is none of"):
            TextKey("", "Wrong.", **wrong)


def test_entries_of_a_registry_share_a_key_or_have_different_ones():
    shared = IntegerKey(1, "Shared.", only_if={"mode": ("x",)})
    kinds = {"a": component("m:A", n=shared), "b": component("m:B", n=shared, own=TextKey("", "Own.")), "c": "m:C"}
    keys = keys_of(Registry("kind", kinds), "kind")
    assert keys["n"].only_if == {"kind": ("a", "b"), "mode": ("x",)}
    assert keys["own"].only_if == {"kind": ("b",)}
    with pytest.raises(ValueError, match="a and d declare different keys n"):
        keys_of(Registry("kind", kinds | {"d": component("m:D", n=IntegerKey(2, "Mine."))}), "kind")
    with pytest.raises(ValueError, match="the family f:NAME declares keys"):
        keys_of(Registry("kind", {"f:NAME": component("m:F", n=shared)}), "kind")


def test_a_condition_may_be_all_other_values():
    assert "cosine" in others("one_cycle")
    assert "one_cycle" not in others("one_cycle")


def test_a_shared_model_keeps_nothing_of_this_machine():
    config = default_config()
    use_adapter(config, "lora", rank=3)
    given = {}
    for name, key in KEYS.items():
        if isinstance(key, PathKey) or name.startswith(("log.", "serve.")):
            place = "/home/ada/private/photos.txt"
            given[name] = {bool: True, str: place, tuple: (place,)}[type(key.default)]
    config.update_from_flattened_dict({**given, "mesh.fsdp": 8, "loss.terms.cls": 0.5})
    shared = flatten(portable(config))
    assert not [name for name, value in shared.items() if "/home" in str(value)]
    assert shared["data.known_positives"] == shared["model.backbone.weights"] == "photos.txt"
    assert (shared["mesh.fsdp"], shared["model.adapters.lora.rank"], shared["loss.terms.cls"]) == (1, 3, 0.5)
    config.model.prompts.groups = "published"
    assert portable(config).model.prompts.groups == "published", "a word, and no path"


def test_keys_that_name_a_file_or_a_folder_are_paths():
    """A path that is only a text would be shared as it is."""
    words = re.compile(r"\b(file|folder|\.csv|\.txt|path)\b", re.IGNORECASE)
    texts = [name for name, key in KEYS.items() if type(key) is TextKey and words.search(key.doc)]
    assert texts == ["data.image_column", "log.mlflow"], "a column with paths; a section that is not shared"


def test_the_keys_that_every_run_has():
    assert set(REQUIRED) == {"data.name", "model.backbone.name", "model.head.kind"}


def test_no_list_of_key_names_stands_outside_the_declarations():
    """Such a list is a second place for what a key means, and the next key is forgotten there."""
    wrong, known = [], {name for name in (*KEYS, *SECTIONS) if "." in name}
    for path in (REPOSITORY / "mlmoe_jax").rglob("*.py"):
        for node in ast.walk(parse_source(path.read_text())):
            if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
                items = node.keys if isinstance(node, ast.Dict) else node.elts
                names = [one.value for one in items if isinstance(one, ast.Constant) and one.value in known]
                if len(names) > 1:
                    wrong.append(f"{path}:{node.lineno} {names}")
    assert not wrong, "\n".join(wrong)
