import json

import pytest
from helpers.documents import CONFIGS

from mlmoe_jax.config import (
    apply_overrides,
    config_options,
    default_config,
    flatten,
    from_json,
    load_config,
    loading,
    option,
    parse_arg,
    to_json,
    validate,
)
from mlmoe_jax.config.table import KEYS
from mlmoe_jax.runtime.keys import ChoiceKey


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("augment.flip", "False", False),
        ("augment.flip", "0", False),
        ("data.keep_empty", "true", True),
        ("data.keep_empty", "1", True),
        ("train.epochs", "7", 7),
        ("optim.learning_rate", "3e-4", 3e-4),
        ("ema.decay", "1", 1.0),
        ("model.head.kind", "group_experts", "group_experts"),
        ("data.val_split", "", ""),
        ("data.test_splits", "test,test_shift", ("test", "test_shift")),
        ("data.test_splits", "test", ("test",)),
        ("data.test_splits", "('test')", ("test",)),
        ("data.test_splits", "", ()),
        ("trainable", "[['^head/', True], ['', False]]", (("^head/", True), ("", False))),
        ("optim.decay_rules", '(("bias$", 0.0),)', (("bias$", 0.0),)),
        ("prune.token_levels", "0.5,0.25", (0.5, 0.25)),
        ("model.prompts.kept_segments", "10,01", ("10", "01")),
    ],
)
def test_an_override_is_read_as_its_key_says(key, text, value):
    changed = flatten(apply_overrides(default_config(), [(key, text)]))
    assert changed.pop(key) == value
    assert type(flatten(apply_overrides(default_config(), [(key, text)]))[key]) is type(value)
    assert changed == {name: default for name, default in flatten(default_config()).items() if name != key}


# ---------------------------------------------------------------------------------------------------------- files
FILE = """
from mlmoe_jax.config import default_config, parse_arg

def get_config(arg=""):
    config = default_config()
    config.train.epochs = parse_arg(arg, epochs=3).epochs
    return config
"""


def test_a_config_file_gets_its_argument_and_the_overrides(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert load_config(str(file), []).train.epochs == 3
    config = load_config(f"{file}:epochs=9", [("seed", "4")])
    assert (config.train.epochs, config.seed) == (9, 4)
    assert load_config(f"{tmp_path / 'mine'}:epochs=9", [("train.epochs", "1")]).train.epochs == 1


def test_a_bare_name_is_found_in_the_config_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "CONFIG_FOLDER", tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    assert load_config("mine", []) == load_config("mine.py", [])


def test_parse_arg():
    options = parse_arg("epochs=5,name=a=b", epochs=3, name="x", half=False)
    assert options.to_dict() == {"epochs": 5, "name": "a=b", "half": False}
    assert parse_arg("", epochs=3).epochs == 3


def test_a_plus_is_between_the_items_of_a_list():
    assert parse_arg("splits=a+b,seed=2", splits=("x",), seed=1).to_dict() == {"splits": ("a", "b"), "seed": 2}


def test_an_option_is_a_key_of_the_config_without_its_conditions():
    key = KEYS["model.prompts.gate_init"]
    assert key.only_if
    changed = option("model.prompts.gate_init", default=5.0)
    assert (changed.default, changed.doc, dict(changed.only_if)) == (5.0, key.doc, {})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_option_of_a_config_that_ships_has_a_sentence_and_values_that_it_takes(path):
    doc, options = config_options(path.stem)
    assert doc.partition("\n")[0].endswith(".")
    for name, key in options.items():
        assert key.doc[:1].isupper(), f"{name} of {path.name} has no sentence"
        assert key.doc.endswith("."), key.doc
        assert ". " not in key.doc, f"one sentence: {key.doc}"
        assert key.default == "" or key.allows(key.default), name
        load_config(f"{path.stem}:{name}={key.format(key.default)}" if key.default != "" else path.stem, [])
        for choice in key.choices if type(key) is ChoiceKey else ():
            load_config(f"{path.stem}:{name}={choice}", [])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_ships_is_valid(path):
    config = load_config(str(path), [])
    validate(config)
    further = {key for key in (*flatten(config), *KEYS) if key.startswith(("loss.terms.", "model.adapters."))}
    assert set(flatten(config)) - further == set(KEYS) - further, "a config sets keys that exist"
    assert from_json(to_json(config)) == config


# ----------------------------------------------------------------------------------------------------------- JSON
def test_keys_that_a_stored_config_lacks_get_their_default():
    stored = json.loads(to_json(default_config()))
    stored["train"]["epochs"] = 3
    del stored["augment"], stored["optim"]["decay_rules"], stored["loss"]["terms"]["logits"]
    config = from_json(json.dumps(stored), required=("data.name",))
    assert config.train.epochs == 3
    config.train.epochs = default_config().train.epochs
    assert flatten(config) == flatten(default_config())


def test_unknown_stored_keys_are_ignored_with_a_warning(caplog):
    config = from_json('{"seed": 7, "gone": {"key": 1}, "train": {"epocs": 1, "epochs": 3}}')
    assert flatten(config) == {**flatten(default_config()), "seed": 7, "train.epochs": 3}
    assert caplog.messages == ["the stored config has unknown keys, which are ignored: gone.key, train.epocs"]
