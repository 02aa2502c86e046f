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
    warnings,
)
from mlmoe_jax.config.defaults import KEYS
from mlmoe_jax.config.keys import ANY, Choice, Number
from mlmoe_jax.config.loading import RENAMED
from mlmoe_jax.models.experts import EXPERTS, GATES, SHARES, SPREADS
from mlmoe_jax.models.heads.catalog import HEADS
from mlmoe_jax.models.heads.group_experts import COMBINE
from mlmoe_jax.models.heads.linear import POOLS
from mlmoe_jax.models.heads.routed_experts import ENTROPY
from mlmoe_jax.models.layers.activations import ACTIVATIONS
from mlmoe_jax.models.layers.batch_norm import BATCH_NORMS
from mlmoe_jax.models.layers.detr import INITS
from mlmoe_jax.models.loss_kinds import LOSSES
from mlmoe_jax.models.prompts import MASKS, SIDES
from mlmoe_jax.models.query_decoder import POSITIONS, PROJECTIONS, QUERY_ROLES, SELF_ATTENTION

CONFIGS = sorted((REPOSITORY / "configs").glob("*.py"))


POSITIVE = (
    "data.image_size",
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
)
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
COUNTS = ("data.workers", "pack.short_side", "pack.processes", "augment.margin")


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
        ("loss.detach", "maybe", "true or false such as true"),
        ("train.epochs", "1.5", "a whole number above 0 such as 40"),
        ("optim.learning_rate", "fast", "a number above 0 such as 0.001"),
        ("optim.milestones", "half", "one or more numbers from 0 to below 1 such as 0.6,0.8"),
        ("data.test_splits", "('test'", "texts with commas between them such as test"),
        ("trainable", "[backbone]", "(regex, value) pairs such as (('^backbone/', False), ('', True))"),
    ],
)
def test_an_override_of_another_type_is_refused(refusal, key, text, kind):
    sentence = refusal(apply_overrides, default_config(), [(key, text)])
    assert sentence.startswith(f"config key '{key}' takes {kind}")
    assert sentence.endswith(f"not '{text}'")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("optim.lerning_rate", "; did you mean 'optim.learning_rate'?"),
        ("optimm.learning_rate", "; did you mean 'optim.learning_rate'?"),
        ("learning_rate", "; did you mean 'optim.learning_rate'?"),
        ("optim.epochs", "; did you mean 'train.epochs'?"),
        ("prompts.num_groups", "; did you mean 'model.prompts.num_groups'?"),
        ("model.dropout", "; did you mean 'model.prompts.dropout'?"),
        ("optm", "; did you mean 'optim'?"),
        ("mesh.zzz", "; 'mesh' has data, fsdp, expert"),
        ("mesh.zzz.zzz", "; 'mesh' has data, fsdp, expert"),
        ("model.promts", "; did you mean 'model.prompts'?"),
        ("zzz", "; the config has seed, data, augment, "),
        ("seed.first", ": 'seed' is a key, not a section"),
        ("", "; the config has seed, data, augment, "),
    ],
)
def test_a_misspelt_key_gets_the_nearest_of_the_whole_config(refusal, key, says):
    sentence = refusal(set_key, default_config(), key, "1", what="config key")
    assert sentence.startswith(f"config key '{key}' does not exist{says}")


def test_a_section_is_no_key(refusal):
    sentence = refusal(apply_overrides, default_config(), [("mesh", "4")])
    assert sentence == "config key 'mesh' is a section; set one of mesh.data, mesh.fsdp, mesh.expert"


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
    monkeypatch.setattr(loading, "CONFIG_FOLDER", tmp_path)
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
        ("epoch=1", "config argument 'epoch' does not exist; did you mean 'epochs'?"),
        ("epochs=x", "config argument 'epochs' takes any whole number such as 3, not 'x'"),
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
        "loss.reduce is 'max' and must be one of mean, sum",
        "optim.rate_rules is ('bias',) and must be (regex, value) pairs",
        "ema.decay is 1.5 and must be a number from 0 to 1",
        "train.batch_size is 0 and must be a whole number above 0",
        "model.head.kind=group_experts reads group prompts: set model.prompts.kind=group",
        "eval.select_on=val needs data.val_split",
    ]


def listed_for(refusal, key: str, value) -> list[str]:
    """The mistakes in the default config with one key changed."""
    return mistakes(refusal, **{key.replace(".", "__"): value})


@pytest.mark.parametrize("key", [name for name, key in KEYS.items() if isinstance(key, Choice)])
def test_a_value_beyond_the_choices_is_refused(refusal, key):
    sentence, *_ = listed_for(refusal, key, "zzz")
    assert sentence == f"{key} is 'zzz' and must be one of {', '.join(KEYS[key].of)}"


@pytest.mark.parametrize(
    ("key", "implemented"),
    {
        "model.backbone.batch_norm": BATCH_NORMS,
        "model.prompts.attention_mask": MASKS,
        "model.prompts.sides": SIDES,
        "model.head.kind": HEADS,
        "model.head.pool": POOLS,
        "model.head.activation": ACTIVATIONS,
        "model.head.combine": COMBINE,
        "model.head.decoder.activation": ACTIVATIONS,
        "model.head.decoder.query_role": QUERY_ROLES,
        "model.head.decoder.positions": POSITIONS,
        "model.head.decoder.self_attention": SELF_ATTENTION,
        "model.head.decoder.project": (*PROJECTIONS, "auto"),
        "model.head.decoder.init": INITS,
        "model.head.routing.expert": EXPERTS,
        "model.head.routing.gate": GATES,
        "model.head.routing.gate_share": SHARES,
        "model.head.routing.classifier": SHARES,
        "model.head.routing.spread": SPREADS,
        "model.head.routing.entropy": ENTROPY,
        "loss.kind": LOSSES,
    }.items(),
)
def test_the_choices_are_what_the_models_can_do(key, implemented):
    assert set(KEYS[key].of) == set(implemented)


@pytest.mark.parametrize("key", [name for name, key in KEYS.items() if isinstance(key, Number)])
def test_numbers_are_within_their_limits(refusal, key):
    limits, said = KEYS[key], f"and must be {KEYS[key].takes}"
    kind = type(limits.default)
    if limits.least == ANY:
        assert said == "and must be any number"
        return
    low = kind(limits.above) if limits.least is None else kind(limits.least - 1)
    assert f"{key} is {low!r} {said}" in listed_for(refusal, key, low)
    for limit, inside in ((limits.most, True), (limits.below, False)):
        if limit is not None:
            high = kind(limit + 1 if inside else limit)
            assert f"{key} is {high!r} {said}" in listed_for(refusal, key, high)
    if kind is float:
        assert f"{key} is nan {said}" in listed_for(refusal, key, float("nan"))


@pytest.mark.parametrize(
    ("key", "limits"),
    {
        **dict.fromkeys(POSITIVE, "above 0"),
        **dict.fromkeys(FRACTIONS, "from 0 to 1"),
        **dict.fromkeys(COUNTS, "of at least 0"),
        "data.crop_fraction": "above 0 and at most 1",
        "metrics.pair_level": "above 0 and at most 1",
        "pack.quality": "from 1 to 100",
        "optim.b1": "from 0 to below 1",
        "mesh.data": "of at least -1",
    }.items(),
)
def test_sizes_rates_and_shares_have_these_limits(key, limits):
    assert KEYS[key].takes in (f"a number {limits}", f"a whole number {limits}")


def test_limits_of_the_data_keys(refusal):
    above = mistakes(refusal, data__crop_fraction=1.1)
    assert above == ["data.crop_fraction is 1.1 and must be a number above 0 and at most 1"]
    assert mistakes(refusal, pack__quality=101) == ["pack.quality is 101 and must be a whole number from 1 to 100"]
    assert mistakes(refusal, data__val_fraction=0.1, data__val_split="", eval__select_on="none") == [
        "data.val_fraction holds out data.val_split, which is empty"
    ]
    for key in ("augment.crop_scale", "augment.crop_ratio"):
        for pair in ((0.5,), (0.0, 1.0), (1.0, 0.5), ("a", "b")):
            wrong = [f"{key} is {pair!r} and must be two numbers above 0, the smaller one first"]
            assert listed_for(refusal, key, pair) == wrong
    for key in ("prune.token_levels", "prune.segment_levels", "optim.milestones"):
        for shares in ((), (1.0,), (-0.1,), ("a",)):
            wrong = [f"{key} is {shares!r} and must be one or more numbers from 0 to below 1"]
            assert listed_for(refusal, key, shares) == wrong
    for key in ("trainable", "optim.rate_rules", "optim.decay_rules", "optim.muon_rules"):
        assert listed_for(refusal, key, (("a",),)) == [f"{key} is (('a',),) and must be (regex, value) pairs"]
    assert listed_for(refusal, "data.test_splits", (1,)) == [
        "data.test_splits is (1,) and must be texts with commas between them"
    ]
    (blanks,) = mistakes(refusal, data__bad_images="skip", model__backbone__batch_norm="trainable")
    assert blanks.startswith("model.backbone.batch_norm=trainable would count the blanks")


def test_keys_that_do_not_exist_are_mistakes(refusal):
    assert mistakes(refusal, train__epocs=3) == ["train.epocs does not exist", "did you mean 'train.epochs'?"]
    assert mistakes(refusal, model__prompts__masks="fixed") == [
        "model.prompts.masks has been renamed",
        "use 'model.prompts.pruning'",
    ]


def test_keys_that_are_missing_are_named(refusal):
    config = default_config()
    del config.train, config.optim.eps
    sentence = refusal(validate, config)
    assert sentence.startswith("the config lacks optim.eps, train.epochs, train.batch_size, ")
    assert sentence.endswith("; let it start from default_config()")


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("key", FRACTIONS)
def test_fractions_are_within_0_and_1(refusal, key, value):
    assert listed_for(refusal, key, value) == [f"{key} is {value!r} and must be a number from 0 to 1"]


def test_terms_must_be_given_by_the_head(refusal):
    needs = mistakes(refusal, loss__terms={"logits": 0.0, "co": 1.0, "dc": 1.0})
    assert needs == ["loss.terms names co, dc, which head linear does not give"]
    assert mistakes(refusal, loss__terms__logits=0.0) == ["loss.terms has no term with a weight other than 0"]


def test_a_head_may_define_terms_of_its_own(refusal):
    config = apply_overrides(default_config(), [("loss.terms.mine", "0.5")])
    assert config.loss.terms.mine == 0.5
    config.loss.terms.other = 1.0
    assert from_json(to_json(config)) == config
    assert refusal(validate, config).endswith("loss.terms names mine, other, which head linear does not give")
    config.loss.terms.mine = config.loss.terms.other = 0.0
    validate(config)
    assert refusal(apply_overrides, config, [("loss.terms.mine", "much")]).endswith(
        "takes any number such as 0.0, not 'much'"
    )
    config.loss.terms.third = "much"
    assert "loss.terms.third is 'much' and must be any number" in refusal(validate, config)


def test_the_exponent_of_focal_is_not_that_of_the_asymmetric_loss():
    config = default_config()
    config.loss.kind, config.loss.gamma_neg = "focal", 3.0
    assert warnings(config) == [
        "loss.gamma_neg=3 is for the asymmetric loss; the exponent of focal is loss.gamma, which is 2"
    ]
    config.loss.gamma_neg = default_config().loss.gamma_neg
    assert warnings(config) == []


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


def test_renamed_keys_of_an_older_stored_config_are_read():
    stored = json.loads(to_json(default_config()))
    prompts, loss = stored["model"]["prompts"], stored["loss"]
    del prompts["attention_mask"], prompts["pruning"], loss["gamma"]
    prompts["mask"], prompts["masks"], loss["gamma_neg"] = "cross_group", "fixed", 3.0
    config = from_json(json.dumps(stored))
    assert (config.model.prompts.attention_mask, config.model.prompts.pruning) == ("cross_group", "fixed")
    assert (config.loss.gamma_neg, config.loss.gamma) == (3.0, default_config().loss.gamma)
    assert set(flatten(config)) == set(flatten(default_config()))
    loss["kind"] = "focal"
    focal = from_json(json.dumps(stored)).loss
    assert (focal.gamma, focal.gamma_neg) == (3.0, default_config().loss.gamma_neg), "gamma_neg was that of focal too"
    loss["gamma"] = 1.0
    assert from_json(json.dumps(stored)).loss.gamma == 1.0


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_override_by_an_old_name_is_told_the_new_one(refusal, old, new):
    sentence = refusal(apply_overrides, default_config(), [(old, "none")])
    assert sentence == f"config key '{old}' has been renamed; use '{new}'"
    assert new in KEYS
    assert old not in KEYS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"gone": {"key": 1}}', "its key 'gone.key' does not exist"),
        ('{"train": {"epocs": 1}}', "its key 'train.epocs' does not exist; did you mean 'train.epochs'?"),
        ('{"train": 1}', "its key 'train' does not exist"),
        ('{"train": {"epochs": "many"}}', "its key 'train.epochs' is 'many' and must be a whole number above 0"),
    ],
)
def test_a_damaged_stored_config_names_the_key(refusal, text, says):
    assert refusal(from_json, text).startswith(f"the stored config is damaged: {says}")


@pytest.mark.parametrize("text", ['{"seed": ', '["seed"]', '{"gone": {"key": 1}}', '{"train": {"epochs": "many"}}'])
def test_a_damaged_stored_config_is_one_sentence(refusal, text):
    assert refusal(from_json, text).startswith("the stored config is damaged: ")


def test_flatten_names_every_key():
    flat = flatten(default_config())
    assert flat["loss.terms.logits"] == 1.0
    assert flat["seed"] == 0
    assert "loss" not in flat
