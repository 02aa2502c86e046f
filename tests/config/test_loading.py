import json

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.config import (
    apply_overrides,
    default_config,
    flatten,
    from_json,
    load_config,
    loading,
    parse_arg,
    set_key,
    to_json,
    validate,
)
from mlmoe_jax.config.defaults import KEYS

CONFIGS = sorted((REPOSITORY / "configs").glob("*.py"))


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


@pytest.mark.parametrize(
    ("key", "text", "kind"),
    [
        ("augment.flip", "maybe", "true or false such as false"),
        ("train.epochs", "1.5", "an integer above 0 such as 40"),
        ("optim.learning_rate", "fast", "a number above 0 such as 0.001"),
        ("optim.milestones", "half", "one or more numbers from 0 to below 1 such as 0.6,0.8"),
        ("optim.milestones", "({[]: 1},)", "one or more numbers from 0 to below 1 such as 0.6,0.8"),
        ("data.test_splits", "('test'", "strings separated by commas such as test"),
        ("trainable", "[backbone]", "(regex, True or False) pairs such as (('^backbone/', False), ('', True))"),
    ],
)
def test_an_override_of_another_type_is_refused(refusal, key, text, kind):
    sentence = refusal(apply_overrides, default_config(), [(key, text)])
    assert sentence.startswith(f"config key '{key}' takes {kind}")
    assert sentence.endswith(f"not '{text}'")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("optim.lerning_rate", "; did you mean 'learning_rate'?"),
        ("optim.lr", "; there are name, learning_rate, schedule, "),
        ("optimm.learning_rate", "; did you mean 'optim.learning_rate'?"),
        ("learning_rate", "; did you mean 'optim.learning_rate'?"),
        ("prompts.num_groups", "; did you mean 'model.prompts.num_groups'?"),
        ("optm", "; did you mean 'optim'?"),
        ("mesh.zzz", "; there are fsdp, expert"),
        ("model.promts", "; did you mean 'prompts'?"),
        ("zzz", "; there are seed, data, augment, "),
        ("seed.first", "; there are seed, data, augment, "),
    ],
)
def test_an_unknown_key_gets_the_nearest_or_the_keys_beside_it(refusal, key, says):
    sentence = refusal(set_key, default_config(), key, "1", role="config key")
    assert sentence.startswith(f"config key '{key}' does not exist{says}")


def test_a_section_is_not_a_key(refusal):
    sentence = refusal(apply_overrides, default_config(), [("mesh", "4")])
    assert sentence == "config key 'mesh' is a section with fsdp, expert; set one of them"


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


def test_a_bare_name_is_found_in_the_config_folder(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(loading, "CONFIG_FOLDER", tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    assert load_config("mine", []) == load_config("mine.py", [])
    assert refusal(load_config, "mien", []) == "there is no config 'mien'; did you mean 'mine'?"
    assert refusal(load_config, "configs/zzz.py", []) == "there is no config 'configs/zzz.py'; there are mine"


def test_files_that_are_not_configs_are_refused(tmp_path, refusal):
    file = tmp_path / "mine.py"
    file.write_text("x = 1\ny = (\n")
    assert refusal(load_config, str(file), []).startswith(f"config {file} is not valid Python: line 2, ")
    file.write_text("x = 1\n")
    assert refusal(load_config, str(file), []) == f"config {file} defines no get_config(arg) function"
    other = tmp_path / "config.json"
    other.write_text("{}")
    assert refusal(load_config, str(other), []) == f"config {other} defines no get_config(arg) function"


def test_parse_arg():
    options = parse_arg("epochs=5,name=a=b", epochs=3, name="x", half=False)
    assert options.to_dict() == {"epochs": 5, "name": "a=b", "half": False}
    assert parse_arg("", epochs=3).epochs == 3


def test_a_config_without_arguments_says_so(refusal):
    assert refusal(parse_arg, "a=1") == "config argument 'a' does not exist; this config takes no arguments"


@pytest.mark.parametrize(
    ("arg", "sentence"),
    [
        ("epochs", "'epochs' after the config's colon is not key=value; this config takes epochs, name"),
        ("zzz=1", "config argument 'zzz' does not exist; this config takes epochs, name"),
        ("epoch=1", "config argument 'epoch' does not exist; did you mean 'epochs'?"),
        ("epochs=1,epochs=2", "config argument 'epochs' is given twice"),
        ("epochs=x", "config argument 'epochs' takes an integer such as 3, not 'x'"),
    ],
)
def test_parse_arg_refuses(refusal, arg, sentence):
    assert refusal(parse_arg, arg, epochs=3, name="") == sentence


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_ships_is_valid(path, refusal):
    config = load_config(str(path), [])
    validate(config)
    further = {key for key in flatten(config) if key.startswith(("loss.terms.", "model.adapters."))}
    assert set(flatten(config)) - further == set(KEYS) - further, "a config sets keys that exist"
    assert from_json(to_json(config)) == config
    assert "not_an_option" in refusal(load_config, f"{path}:not_an_option=1", [])


# ----------------------------------------------------------------------------------------------------------- JSON
def test_json_gives_the_same_config_back():
    config = default_config()
    config.trainable = ((r"^backbone/blocks/\d+/norm", True), (r"^backbone/", False), (r"", True))
    config.loss.scale = 1e-7
    again = from_json(to_json(config))
    assert flatten(again) == flatten(config)
    assert again.trainable == config.trainable, "rules stay tuples of tuples"
    assert isinstance(again.trainable[0], tuple)


def test_keys_that_a_stored_config_lacks_get_their_default():
    stored = json.loads(to_json(default_config()))
    stored["train"]["epochs"] = 3
    del stored["augment"], stored["optim"]["decay_rules"], stored["loss"]["terms"]["logits"]
    config = from_json(json.dumps(stored))
    assert config.train.epochs == 3
    config.train.epochs = default_config().train.epochs
    assert flatten(config) == flatten(default_config())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"seed": ', "Expecting value"),
        ('["seed"]', ""),
        ('{"train": 1}', ""),
        ('{"train": {"epochs": "many"}}', "Could not override field 'epochs'"),
    ],
)
def test_a_damaged_stored_config_is_one_sentence(refusal, text, says):
    assert refusal(from_json, text).startswith(f"the stored config is damaged: {says}")


def test_a_stored_config_without_a_required_key_is_damaged(refusal):
    sentence = "run/config.json is damaged: it has no 'data.name'"
    for text in ("{}", '{"model": {"backbone": {"name": "vit_digits"}}}'):
        assert refusal(from_json, text, "run/config.json", required=("data.name",)) == sentence
    assert from_json('{"data": {"name": "digits"}}', required=("data.name",)).data.name == "digits"


def test_unknown_stored_keys_are_ignored_with_a_warning(caplog):
    config = from_json('{"seed": 7, "gone": {"key": 1}, "train": {"epocs": 1, "epochs": 3}}')
    assert flatten(config) == {**flatten(default_config()), "seed": 7, "train.epochs": 3}
    assert caplog.messages == ["the stored config has unknown keys, which are ignored: gone.key, train.epocs"]


def test_a_key_is_set_once(refusal):
    twice = [("seed", "1"), ("train.epochs", "2"), ("seed", "1")]
    assert refusal(apply_overrides, default_config(), twice) == "--config.seed is given twice"


def test_only_python_files_are_configs(refusal, tmp_path):
    (tmp_path / "config.json").write_text('{"seed": false}')
    assert "defines no get_config(arg) function" in refusal(load_config, str(tmp_path / "config.json"), [])
