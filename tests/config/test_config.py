import json

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.config import (
    apply_overrides,
    default_config,
    flatten,
    from_json,
    load_config,
    parse_arg,
    set_key,
    to_json,
    validate,
)
from mlmoe_jax.models.build import HEADS
from mlmoe_jax.models.heads.group_experts import COMBINE
from mlmoe_jax.models.layers.activations import ACTIVATIONS
from mlmoe_jax.models.layers.batch_norm import BATCH_NORMS
from mlmoe_jax.models.prompts import MASKS

CONFIGS = sorted((REPOSITORY / "configs").glob("*.py"))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("loss.detach", "False", False),
        ("loss.detach", "0", False),
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
    ],
)
def test_an_override_is_read_as_the_type_of_its_default(key, text, value):
    changed = flatten(apply_overrides(default_config(), [(key, text)]))
    assert changed.pop(key) == value
    assert type(flatten(apply_overrides(default_config(), [(key, text)]))[key]) is type(value)
    assert changed == {name: default for name, default in flatten(default_config()).items() if name != key}


@pytest.mark.parametrize(
    ("key", "text", "kind"),
    [
        ("loss.detach", "maybe", "bool such as True"),
        ("train.epochs", "1.5", "int such as 40"),
        ("optim.learning_rate", "fast", "float such as 0.001"),
        ("data.test_splits", "('test'", "tuple such as ('test',)"),
        ("trainable", "[backbone]", "tuple such as"),
    ],
)
def test_an_override_of_another_type_is_refused(refusal, key, text, kind):
    sentence = refusal(apply_overrides, default_config(), [(key, text)])
    assert sentence.startswith(f"config key '{key}' takes a {kind}")
    assert sentence.endswith(f"not '{text}'")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("optim.lerning_rate", "no 'lerning_rate' under 'optim'; did you mean 'learning_rate'?"),
        ("optimm.learning_rate", "no 'optimm'; did you mean 'optim'?"),
        ("mesh.zzz", "no 'zzz' under 'mesh'; there are data, expert, fsdp"),
        ("seed.first", "no 'first' under 'seed'"),
    ],
)
def test_a_misspelt_key_gets_a_suggestion(refusal, key, says):
    sentence = refusal(set_key, default_config(), key, "1", what="config key")
    assert sentence == f"config key '{key}' does not exist: {says}"


def test_a_section_is_no_key(refusal):
    sentence = refusal(apply_overrides, default_config(), [("mesh", "4")])
    assert sentence == "config key 'mesh' is a section; set one of mesh.data, mesh.expert, mesh.fsdp"


def test_a_key_is_set_once(refusal):
    twice = [("seed", "1"), ("train.epochs", "2"), ("seed", "1")]
    assert refusal(apply_overrides, default_config(), twice) == "--config.seed is given twice"


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


def test_a_bare_name_is_looked_for_in_the_config_folder(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr("mlmoe_jax.config.loading.CONFIG_FOLDER", tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    assert load_config("mine", []) == load_config("mine.py", [])
    assert refusal(load_config, "mien", []) == "there is no config 'mien'; did you mean 'mine'?"
    assert refusal(load_config, "configs/zzz.py", []) == "there is no config 'configs/zzz.py'; there are mine"


def test_files_that_are_no_config_are_refused(tmp_path, refusal):
    file = tmp_path / "mine.py"
    file.write_text("x = 1\ny = (\n")
    assert refusal(load_config, str(file), []).startswith(f"config {file} is not valid Python: line 2, ")
    file.write_text("x = 1\n")
    assert refusal(load_config, str(file), []) == f"config {file} defines no get_config(arg) function"
    other = tmp_path / "config.json"
    other.write_text("{}")
    assert refusal(load_config, str(other), []) == f"config {other} is not a Python file"


def test_parse_arg():
    options = parse_arg("epochs=5,name=a=b", epochs=3, name="x", half=False)
    assert options.to_dict() == {"epochs": 5, "name": "a=b", "half": False}
    assert parse_arg("", epochs=3).epochs == 3


@pytest.mark.parametrize(
    ("arg", "sentence"),
    [
        ("epochs", "'epochs' after the config's colon is not key=value; it takes epochs, name"),
        ("epoch=1", "config argument 'epoch' does not exist: no 'epoch'; did you mean 'epochs'?"),
        ("epochs=x", "config argument 'epochs' takes a int such as 3, not 'x'"),
        ("epochs=1,epochs=2", "config argument 'epochs' is given twice"),
    ],
)
def test_parse_arg_refuses(refusal, arg, sentence):
    assert refusal(parse_arg, arg, epochs=3, name="") == sentence


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_ships_is_valid(path, refusal):
    config = load_config(str(path), [])
    validate(config)
    assert set(flatten(config)) == set(flatten(default_config())), "a config sets keys that exist"
    assert from_json(to_json(config)) == config
    assert "not_an_option" in refusal(load_config, f"{path}:not_an_option=1", [])


def test_an_option_of_a_config_that_ships_is_used():
    assert load_config("linear_probe:dataset=voc2012", []).data.name == "voc2012"
    assert load_config("pretrain_digits:epochs=8", []).train.epochs == 8


# ------------------------------------------------------------------------------------------------------- validate
def mistakes(refusal, **changes):
    config = default_config()
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node = config
        for name in parents:
            node = node[name]
        node[leaf] = value
    return refusal(validate, config).removeprefix("the config has mistakes: ").split("; ")


def test_the_defaults_are_valid():
    validate(default_config())


def test_every_mistake_is_listed_at_once(refusal):
    listed = mistakes(
        refusal,
        loss__reduce="max",
        train__batch_size=0,
        ema__decay=1.5,
        model__head__kind="group_experts",
        optim__rate_rules=("bias",),
        data__val_split="",
    )
    assert listed == [
        "loss.reduce is 'max', which is none of mean, sum",
        "train.batch_size is 0 and must be above 0",
        "ema.decay is 1.5 and must be within 0 and 1",
        "optim.rate_rules is ('bias',) and must be (regex, value) pairs",
        "model.head.kind=group_experts reads group prompts: set model.prompts.kind=group",
        "eval.select_on=val needs data.val_split",
    ]


@pytest.mark.parametrize(
    ("key", "choices"),
    {
        "data.resize": "square, crop",
        "data.bad_images": "error, skip",
        "data.difficult": "negative, ignore, positive",
        "augment.where": "device, host",
        "augment.geometry": "none, random_resized_crop, multi_scale_crop",
        "augment.randaugment": "none, uda, standard",
        "model.head.pool": "cls, patches, both",
        "model.dtype": "float32, bfloat16",
        "model.frozen_dtype": "float32, bfloat16",
        "model.backbone.final_norm": "auto, yes, no",
        "model.backbone.batch_norm": ", ".join(BATCH_NORMS),
        "model.matmul_precision": "default, high, highest",
        "model.prompts.kind": "none, deep, shallow, e2vpt, group",
        "model.prompts.mask": ", ".join(MASKS),
        "model.head.kind": ", ".join(HEADS),
        "model.head.activation": ", ".join(ACTIVATIONS),
        "model.head.gate_bias": "unused, used",
        "model.head.combine": ", ".join(COMBINE),
        "loss.kind": "asymmetric, bce, focal, softmax",
        "loss.reduce": "mean, sum",
        "optim.name": "adamw, adam, sgd, muon",
        "optim.schedule": "one_cycle, cosine, constant, multi_step",
        "eval.select_on": "val, test, none",
        "checkpoint.include_frozen": "auto, always, never",
    }.items(),
)
def test_a_value_beyond_the_choices_is_refused(refusal, key, choices):
    (sentence, *_) = mistakes(refusal, **{key.replace(".", "__"): "zzz"})
    assert sentence == f"{key} is 'zzz', which is none of {choices}"


@pytest.mark.parametrize(
    "key",
    [
        "data.image_size",
        "data.crop_fraction",
        "data.threads",
        "model.prompts.num_groups",
        "model.prompts.per_group",
        "model.prompts.tau_co",
        "model.prompts.tau_dc",
        "model.head.expert_hidden",
        "loss.scale",
        "optim.learning_rate",
        "train.epochs",
        "train.batch_size",
        "train.log_every",
        "eval.batch_size",
        "eval.every_epochs",
        "checkpoint.every_epochs",
        "checkpoint.keep",
        "pack.shard_images",
        "pack.quality",
    ],
)
def test_sizes_and_rates_are_above_0(refusal, key):
    zero = type(flatten(default_config())[key])(0)
    assert mistakes(refusal, **{key.replace(".", "__"): zero}) == [f"{key} is {zero!r} and must be above 0"]


FRACTIONS = (
    "ema.decay",
    "eval.threshold",
    "augment.cutout",
    "augment.shift",
    "augment.brightness",
    "augment.contrast",
    "augment.saturation",
    "data.val_fraction",
)


def test_limits_of_the_data_keys(refusal):
    above = mistakes(refusal, data__crop_fraction=1.1)
    assert above == ["data.crop_fraction is 1.1 and must be within 0 and 1"]
    assert mistakes(refusal, pack__quality=101) == ["pack.quality is 101 and must be at most 100"]
    assert mistakes(refusal, data__val_fraction=0.1, data__val_split="", eval__select_on="none") == [
        "data.val_fraction holds out data.val_split, which is empty"
    ]
    for key in ("augment.crop_scale", "augment.crop_ratio"):
        for pair in ((0.5,), (0.0, 1.0), (1.0, 0.5), ("a", "b")):
            wrong = [f"{key} is {pair!r} and must be two numbers above 0, the smaller one first"]
            assert mistakes(refusal, **{key.replace(".", "__"): pair}) == wrong
    (blanks,) = mistakes(refusal, data__bad_images="skip", model__backbone__batch_norm="trainable")
    assert blanks.startswith("model.backbone.batch_norm=trainable would count the blanks")
    for key in ("data.workers", "pack.short_side", "pack.processes", "augment.margin"):
        assert mistakes(refusal, **{key.replace(".", "__"): -1}) == [f"{key} is -1 and must be 0 or more"]


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("key", FRACTIONS)
def test_fractions_are_within_0_and_1(refusal, key, value):
    assert mistakes(refusal, **{key.replace(".", "__"): value}) == [f"{key} is {value!r} and must be within 0 and 1"]


def test_terms_must_be_given_by_the_head(refusal):
    needs = mistakes(refusal, loss__terms={"logits": 0.0, "co": 1.0, "dc": 1.0})
    assert needs == ["loss.terms names co, dc, which head linear does not give"]
    assert mistakes(refusal, loss__terms__logits=0.0) == ["loss.terms has no term with a weight other than 0"]


def test_selecting_on_test_needs_a_test_split(refusal):
    listed = mistakes(refusal, eval__select_on="test", data__test_splits=())
    assert listed == ["eval.select_on=test needs data.test_splits"]


def test_something_must_be_evaluated(refusal):
    listed = mistakes(refusal, eval__select_on="none", data__val_split="", data__test_splits=())
    assert listed == ["data.val_split and data.test_splits are both empty, so that there is nothing to evaluate"]


# ----------------------------------------------------------------------------------------------------------- JSON
def test_json_gives_the_same_config_back():
    config = default_config()
    config.trainable = ((r"^backbone/blocks/\d+/norm", True), (r"^backbone/", False), (r"", True))
    config.loss.scale = 1e-7
    again = from_json(to_json(config))
    assert flatten(again) == flatten(config)
    assert again.trainable == config.trainable, "rules stay tuples of tuples"
    assert isinstance(again.trainable[0], tuple)


def test_an_older_stored_config_gets_the_defaults_of_newer_keys():
    stored = json.loads(to_json(default_config()))
    stored["train"]["epochs"] = 3
    del stored["augment"], stored["optim"]["decay_rules"], stored["loss"]["terms"]["co"]
    config = from_json(json.dumps(stored))
    assert config.train.epochs == 3
    config.train.epochs = default_config().train.epochs
    assert flatten(config) == flatten(default_config())


@pytest.mark.parametrize("text", ['{"seed": ', '["seed"]', '{"gone": {"key": 1}}', '{"train": {"epochs": "many"}}'])
def test_a_damaged_stored_config_is_one_sentence(refusal, text):
    assert refusal(from_json, text).startswith("the stored config is damaged: ")


def test_flatten_names_every_key():
    flat = flatten(default_config())
    assert flat["loss.terms.logits"] == 1.0
    assert flat["seed"] == 0
    assert "loss" not in flat
