import pytest

from mlmoe_jax.config import (
    apply_overrides,
    default_config,
    find_unused,
    find_warnings,
    flatten,
    from_json,
    to_json,
    validate,
)
from mlmoe_jax.config.reference import describe_config
from mlmoe_jax.config.table import KEYS
from mlmoe_jax.data.sources.catalog import DATA_SETS
from mlmoe_jax.evaluation.metrics.published import EVALUATORS
from mlmoe_jax.models.adapters.group_prompts import SIDES
from mlmoe_jax.models.experts import ACTIVATIONS, EXPERTS
from mlmoe_jax.models.heads.catalog import HEADS
from mlmoe_jax.models.heads.dr_moe import ENTROPY
from mlmoe_jax.models.heads.linear import POOLS
from mlmoe_jax.models.loss_catalog import LOSSES
from mlmoe_jax.models.query_decoder import STYLES
from mlmoe_jax.runtime.keys import AutoIntegerKey


def test_the_defaults_are_valid():
    validate(default_config())


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


@pytest.mark.parametrize("key", ["data.threads", "data.workers"])
def test_a_number_may_be_left_to_the_program(key):
    config = apply_overrides(apply_overrides(default_config(), [(key, "3")]), [(key, "auto")])
    validate(config)
    assert flatten(config)[key] == KEYS[key].default == AutoIntegerKey.AUTO
    assert describe_config(key).startswith(f"{key}=auto (auto or an integer ")


def test_a_head_may_define_terms_of_its_own():
    config = apply_overrides(default_config(), [("loss.terms.mine", "0.5")])
    assert config.loss.terms.mine == 0.5
    assert from_json(to_json(config)) == config


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
        ("augment.mix_alpha", {}, "augment.mix is none"),
        ("thresholds.precision", {}, "thresholds.goal is f1"),
        *(
            (key, {"train.fit": "logistic"}, "train.fit is logistic")
            for key in (
                *("loss.scale", "optim.learning_rate", "ema.decay", "augment.flip", "checkpoint.every_epochs"),
                *("eval.select_on", "eval.every_epochs", "log.tensorboard", "train.epochs"),
            )
        ),
        ("data.difficult_train", {"train.fit": "logistic"}, ""),
        ("model.adapters.lora.rank", {}, ""),
    ],
)
def test_keys_without_an_effect_are_named(key, settings, reason):
    config = apply_overrides(default_config(), [*settings.items()])
    assert find_unused(config, [(key, "")]) == ([f"{key} has no effect, because {reason}"] if reason else [])
