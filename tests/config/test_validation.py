import math
import re

import pytest

from mlmoe_jax.apps.cli.reference import describe_config
from mlmoe_jax.config import apply_overrides, default_config, find_unused, find_warnings, from_json, to_json, validate
from mlmoe_jax.config.defaults import KEYS, SECTIONS
from mlmoe_jax.config.keys import AutoIntegerKey, ChoiceKey, NumberKey
from mlmoe_jax.data.sources.open import DATA_SETS
from mlmoe_jax.evaluation.metrics.published import EVALUATORS
from mlmoe_jax.models.adapters.group_prompts import SIDES
from mlmoe_jax.models.experts import ACTIVATIONS, EXPERTS
from mlmoe_jax.models.heads.dr_moe import ENTROPY
from mlmoe_jax.models.heads.linear import POOLS
from mlmoe_jax.models.query_decoder import STYLES
from mlmoe_jax.models.registries import HEADS, LOSSES


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
        "ema.decay is 1.5 and must be a number of at least 0 and at most 1",
        "loss.reduce is 'max' and must be one of mean, sum",
        "optim.rate_rules is ('bias',) and must be (regex, number) pairs",
        "train.batch_size is 0 and must be an integer above 0",
        "model.head.kind=group_experts reads group prompts: set model.prompts.kind=group",
        "eval.select_on=val needs data.val_split",
    ]


def listed_for(refusal, key: str, value) -> list[str]:
    """The mistakes in the default config with one key changed."""
    return mistakes(refusal, **{key.replace(".", "__"): value})


@pytest.mark.parametrize("key", [name for name, key in KEYS.items() if isinstance(key, ChoiceKey)])
def test_a_value_beyond_the_choices_is_refused(refusal, key):
    sentence, *_ = listed_for(refusal, key, "zzz")
    assert sentence == f"{key} is 'zzz' and must be one of {', '.join(KEYS[key].choices)}"


def test_a_misspelt_choice_gets_the_nearest(refusal):
    sentence, nearest = listed_for(refusal, "model.head.kind", "linaer")
    assert sentence == f"model.head.kind is 'linaer' and must be one of {', '.join(HEADS)}"
    assert nearest == "did you mean 'linear'?"
    assert listed_for(refusal, "metrics.preset", "mlgnc")[1:] == ["did you mean 'mlgcn'?"]


@pytest.mark.parametrize(("name", "nearest"), [("digit", "digits"), ("coco14", "coco2014"), ("tfds:", "tfds:NAME")])
def test_an_unknown_data_set_is_refused(refusal, name, nearest):
    sentence, *rest = listed_for(refusal, "data.name", name)
    assert sentence == f"data.name is '{name}' and must be one of {', '.join(DATA_SETS)}"
    assert rest == [f"did you mean '{nearest}'?"]


@pytest.mark.parametrize("name", ["digits", "csv", "tfds:coco/2014", "tfds:voc/2007:5.0.0"])
def test_known_data_sets_and_members_of_a_family_are_allowed(name):
    validate(apply_overrides(default_config(), [("data.name", name)]))


@pytest.mark.parametrize(
    ("key", "implemented"),
    {
        "model.prompts.attention_mask": ("none", "all_prompts", "cross_group"),
        "model.prompts.sides": SIDES,
        "model.head.kind": HEADS,
        "model.head.pool": POOLS,
        "model.head.activation": ACTIVATIONS,
        "model.head.decoder.style": STYLES,
        "model.head.routing.expert": EXPERTS,
        "model.head.routing.gate": ("static", "linear", "mlp"),
        "model.head.routing.entropy": ENTROPY,
        "loss.kind": LOSSES,
        "data.name": DATA_SETS,
        "metrics.preset": ("none", *EVALUATORS),
    }.items(),
)
def test_the_choices_are_those_that_are_implemented(key, implemented):
    assert set(KEYS[key].choices) == set(implemented)


@pytest.mark.parametrize("key", [name for name, key in KEYS.items() if isinstance(key, NumberKey)])
def test_numbers_are_within_their_limits(refusal, key):
    limits, said = KEYS[key], f"and must be {KEYS[key].allowed}"
    kind = type(limits.default)
    wrong = [limits.least - 1, limits.most + 1, limits.above, limits.below]
    values = [kind(number) for number in wrong if kind is float or math.isfinite(number)]
    for value in [*values, kind(1e30), *([float("nan")] if kind is float else [])]:
        if not (isinstance(limits, AutoIntegerKey) and value == limits.AUTO):
            assert f"{key} is {value!r} {said}" in listed_for(refusal, key, value)


@pytest.mark.parametrize("key", ["data.threads", "data.workers"])
def test_a_number_may_be_left_to_the_program(refusal, key):
    config = apply_overrides(default_config(), [(key, "3")])
    assert validate(apply_overrides(config, [(key, "auto")])) is None
    section, leaf = key.split(".")
    assert config[section][leaf] == default_config()[section][leaf] == AutoIntegerKey.AUTO
    assert describe_config(key).startswith(f"{key}=auto (auto or an integer ")
    sentence = refusal(apply_overrides, config, [(key, "many")])
    assert sentence == f"config key '{key}' takes {KEYS[key].allowed} such as auto, not 'many'"


@pytest.mark.parametrize(
    ("key", "takes", "values"),
    [
        ("seed", "an integer of at least 0 and at most 4,294,967,295", [-1]),
        ("data.crop_fraction", "a number above 0 and at most 1", [1.1]),
        ("data.test_splits", "strings separated by commas", [(1,)]),
        ("model.prompts.kept_segments", "strings separated by commas", [(10, 1)]),
        (
            "augment.crop_scale",
            "two numbers above 0, the smaller one first",
            [(0.5,), (0.0, 1.0), (1.0, 0.5), ("a", "b"), (0.1, float("inf"))],
        ),
        *(
            (key, "one or more numbers from 0 to below 1", [(), (1.0,), (-0.1,), ("a",), (float("nan"),)])
            for key in ("prune.token_levels", "optim.milestones")
        ),
        *(
            (key, f"(regex, {value}) pairs", [(("a",),), ((1, 2.0),), (("(", True),), (("a", other),)])
            for key, value, other in (
                ("trainable", "True or False", 1.0),
                ("optim.rate_rules", "number", True),
                ("optim.decay_rules", "number", "fast"),
                ("optim.decay_rules", "number", float("inf")),
            )
        ),
    ],
)
def test_values_that_a_key_does_not_allow(refusal, key, takes, values):
    for value in values:
        assert listed_for(refusal, key, value) == [f"{key} is {value!r} and must be {takes}"]


def test_keys_that_do_not_exist_are_mistakes(refusal):
    assert mistakes(refusal, train__epocs=3) == ["train.epocs does not exist", "did you mean 'epochs'?"]


def test_terms_must_be_given_by_the_head(refusal):
    needs = mistakes(refusal, loss__terms={"logits": 0.0, "co": 1.0, "dc": 1.0})
    assert needs == ["loss.terms names co, dc, which head linear does not compute (it computes logits, cls)"]
    assert mistakes(refusal, loss__terms__logits=0.0) == ["loss.terms has no term with a weight other than 0"]


def test_a_head_may_define_terms_of_its_own(refusal):
    config = apply_overrides(default_config(), [("loss.terms.mine", "0.5")])
    assert config.loss.terms.mine == 0.5
    config.loss.terms.other = 1.0
    assert from_json(to_json(config)) == config
    assert "loss.terms names mine, other, which head linear does not compute (it computes " in refusal(validate, config)
    config.loss.terms.mine = config.loss.terms.other = 0.0
    assert "loss.terms names mine, other" in refusal(validate, config), "a misspelt term would not be switched off"
    del config.loss.terms["mine"], config.loss.terms["other"]
    validate(config)
    assert refusal(apply_overrides, config, [("loss.terms.mine", "much")]).endswith(
        "takes a number such as 0.0, not 'much'"
    )
    config.loss.terms.third = "much"
    assert "loss.terms.third is 'much' and must be a number" in refusal(validate, config)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eval__select_on": "test", "data__test_splits": ()}, "eval.select_on=test needs data.test_splits"),
        (
            {"eval__select_on": "none", "data__val_split": "", "data__test_splits": ()},
            "data.val_split and data.test_splits are both empty, so that there is nothing to evaluate",
        ),
        *(
            (
                {"data__val_fraction": 0.1, "data__val_split": name, "eval__select_on": "none"},
                "data.val_fraction holds out data.val_split, which should have a name of its own, such as val",
            )
            for name in ("", "train")
        ),
    ],
)
def test_splits_that_do_not_fit_together(refusal, changes, sentence):
    assert mistakes(refusal, **changes) == [sentence]


@pytest.mark.parametrize(("head", "count"), [("linear", 1), ("query", 1), ("group_linear", 0), ("routed_experts", 0)])
def test_group_prompts_of_a_head_without_groups_warn(head, count):
    config = default_config()
    config.model.prompts.kind, config.model.head.kind = "group", head
    assert sum("does not use label groups" in line for line in find_warnings(config)) == count


def test_the_exponent_of_focal_is_not_that_of_the_asymmetric_loss():
    config = default_config()
    config.loss.kind, config.loss.gamma_neg = "focal", 3.0
    assert find_warnings(config) == [
        "loss.gamma_neg=3 is for the asymmetric loss; the exponent of focal is loss.gamma, which is 2"
    ]
    config.loss.gamma_neg = default_config().loss.gamma_neg
    assert find_warnings(config) == []


@pytest.mark.parametrize(
    ("key", "settings", "reason"),
    [
        ("loss.gamma", {}, "loss.kind is asymmetric"),
        ("loss.gamma", {"loss.kind": "hill"}, ""),
        ("loss.gamma_neg", {"loss.kind": "bce"}, "loss.kind is bce"),
        ("loss.prior", {"loss.kind": "csl"}, "loss.unknown is auto"),
        ("loss.prior", {"loss.kind": "csl", "loss.unknown": "selective"}, ""),
        ("optim.warmup_steps", {}, "optim.schedule is one_cycle"),
        ("optim.warmup_steps", {"optim.schedule": "cosine"}, ""),
        ("model.head.routing.gate", {}, "model.head.kind is linear"),
        ("model.head.routing.gate", {"model.head.kind": "routed_experts"}, ""),
        ("model.prompts.kept_tokens", {"model.prompts.kind": "e2vpt"}, "model.prompts.pruning is none"),
        ("data.separator", {}, "data.name is digits"),
        ("data.separator", {"data.name": "csv"}, ""),
        ("data.table", {"data.name": "cvat"}, ""),
        ("data.table", {}, "data.name is digits"),
        ("data.root", {}, "data.name is digits"),
        ("data.root", {"data.name": "voc2007"}, ""),
        ("loss.scale", {"train.fit": "logistic"}, "train.fit is logistic"),
        ("augment.mix_alpha", {}, "augment.mix is none"),
        ("thresholds.precision", {}, "thresholds.goal is f1"),
        ("optim.learning_rate", {"train.fit": "logistic"}, "train.fit is logistic"),
        ("data.difficult_train", {"train.fit": "logistic"}, ""),
        ("model.adapters.lora.rank", {}, ""),
    ],
)
def test_keys_without_an_effect_are_named(key, settings, reason):
    config = apply_overrides(default_config(), [*settings.items()])
    assert find_unused(config, [key]) == ([f"{key} has no effect, because {reason}"] if reason else [])


def test_the_settings_that_a_key_is_for_are_values_of_other_keys():
    """`find_unused` reads them in the documentation of the key."""
    choices = {name for key in KEYS.values() if isinstance(key, ChoiceKey) for name in key.choices}
    known = choices | {f"{name.rpartition('.')[2]}={name_of}" for name, key in KEYS.items() for name_of in choices}
    for name, entry in {**SECTIONS, **KEYS}.items():
        if begin := re.match("(?:For|Except for) ([^:]+): ", entry.doc):
            others = set(re.split(", | and ", begin[1])) - known
            assert others <= {"labeling tools", "two sides"}, name


def test_a_config_starts_from_the_defaults(refusal):
    config = default_config()
    del config.train, config.optim
    assert refusal(validate, config) == "the config lacks optim, train; let it start from default_config()"
