"""Configs that are refused: on the command line, in files, in run folders, and by validation."""

import functools
import math
import operator
from pathlib import Path

import pytest
from helpers.documents import CONFIGS
from helpers.refusals import Refusal, each
from ml_collections import ConfigDict

from mlmoe_jax.config import (
    apply_overrides,
    default_config,
    from_json,
    load_config,
    loading,
    parse_arg,
    use_adapter,
    validate,
)
from mlmoe_jax.config.loading import flatten
from mlmoe_jax.config.table import KEYS
from mlmoe_jax.data.sources.catalog import DATA_SETS
from mlmoe_jax.models.heads.catalog import HEADS
from mlmoe_jax.runtime.keys import AutoIntegerKey, ChoiceKey, NumberKey


# ------------------------------------------------------------------------------------------------- texts and files
def of_keys(says: str, *pairs: tuple[str, str]) -> Refusal:
    """Keys of the command line and the texts of their values."""
    return Refusal(f"{pairs}", None, lambda _: apply_overrides(default_config(), [*pairs]), says)


def of_type(key: str, text: str, kind: str) -> Refusal:
    return of_keys(f"config key '{key}' takes {kind}, not '{text}'", (key, text))


def of_unknown(key: str, says: str) -> Refusal:
    return of_keys(f"config key '{key}' does not exist; {says}", (key, "1"))


def of_config(reference: str, says: str, file: str = "") -> Refusal:
    """A config by its reference, in a folder with a file mine.py and perhaps one named mine.json of this content."""

    def make(at: Path) -> Path:
        for suffix in ("py", "json"):
            (at / f"mine.{suffix}").write_text(file)
        return at

    def call(at: Path) -> dict:
        with pytest.MonkeyPatch.context() as patch:
            if file:
                patch.setattr(loading, "CONFIG_FOLDER", at)
            return flatten(load_config(reference.replace("{at}", str(at)), []))

    return Refusal(f"{reference} {file}", make, call, says)


def of_json(text: str, says: str, *required: str) -> Refusal:
    read = lambda _: from_json(text, "run/config.json", required=required)  # noqa: E731
    return Refusal(f"stored {text}", None, read, f"run/config.json is damaged: {says}")


def of_choice(reference: str, allowed: str) -> Refusal:
    name, value = reference.rpartition(":")[2].split("=")
    return of_config(reference, f"config argument '{name}' is '{value}' and must be one of {allowed}")


TAKES = "this config takes dataset, "
FRACTIONS = "one or more numbers from 0 to below 1 such as 0.6,0.8"
RULES = "(regex, True or False) pairs such as (('^backbone/', False), ('', True))"
TEXTS = [
    of_type("augment.flip", "maybe", "true or false such as false"),
    of_type("train.epochs", "1.5", "an integer above 0 such as 40"),
    of_type("optim.learning_rate", "fast", "a number above 0 such as 0.001"),
    of_type("optim.milestones", "half", FRACTIONS),
    of_type("optim.milestones", "({[]: 1},)", FRACTIONS),
    of_type("data.test_splits", "('test'", "strings separated by commas such as test"),
    of_type("trainable", "[backbone]", RULES),
    of_type("loss.terms.mine", "much", "a number such as 0.0"),
    *(of_type(key, "many", f"{KEYS[key].allowed} such as auto") for key in ("data.threads", "data.workers")),
    of_unknown("optim.lerning_rate", "did you mean 'learning_rate'?"),
    of_unknown("optim.lr", "there are name, learning_rate, schedule, "),
    of_unknown("optimm.learning_rate", "did you mean 'optim.learning_rate'?"),
    of_unknown("learning_rate", "did you mean 'optim.learning_rate'?"),
    of_unknown("prompts.num_groups", "did you mean 'model.prompts.num_groups'?"),
    of_unknown("optm", "did you mean 'optim'?"),
    of_unknown("mesh.zzz", "there are fsdp, expert"),
    of_unknown("model.promts", "did you mean 'prompts'?"),
    of_unknown("zzz", "there are seed, init_from, trainable, data, augment, "),
    of_unknown("seed.first", "there are seed, init_from, trainable, data, augment, "),
    of_keys("config key 'mesh' is a section with fsdp, expert; set one of them", ("mesh", "4")),
    of_keys("--config.seed is given twice", ("seed", "1"), ("train.epochs", "2"), ("seed", "1")),
    of_config("mien", "there is no config 'mien'; did you mean 'mine'?", "x = 1"),
    of_config("configs/zzz.py", "there is no config 'configs/zzz.py'; there are mine", "x = 1"),
    of_config("{at}/mine.py", "config {at}/mine.py is not valid Python: line 2, ", "x = 1\ny = (\n"),
    of_config("{at}/mine.py", "config {at}/mine.py defines no get_config(arg) function", "x = 1"),
    of_config("{at}/mine.json", "config {at}/mine.json defines no get_config(arg) function", '{"seed": false}'),
    of_config("vpt:variant", f"'variant' after the config's colon is not key=value; {TAKES}"),
    of_config("vpt:zzz=1", f"config argument 'zzz' does not exist; {TAKES}"),
    of_config("vpt:zzz=2", "precision, prompts, dropout, pool, variant, project; see mlmoe --help=config:vpt"),
    of_config("vpt:varian=deep", "'varian' does not exist; did you mean 'variant'; see mlmoe --help=config:vpt"),
    of_config("vpt:variant=deep,variant=deep", "config argument 'variant' is given twice"),
    of_config("vpt:project=x", "config argument 'project' takes an integer of at least 0 such as 0, not 'x'"),
    Refusal(
        "an argument of a config without any",
        None,
        lambda _: parse_arg("a=1"),
        "config argument 'a' does not exist; this config takes no arguments",
    ),
    *(of_config(f"{path.stem}:not_an_option=1", "argument 'not_an_option' does not exist") for path in CONFIGS),
    of_json('{"seed": ', "Expecting value"),
    of_json('["seed"]', ""),
    of_json('{"train": 1}', ""),
    of_json('{"train": {"epochs": "many"}}', "Could not override field 'epochs'"),
    of_json("{}", "it has no 'data.name'", "data.name"),
    of_json('{"model": {"backbone": {"name": "vit_digits"}}}', "it has no 'data.name'", "data.name"),
    # ---------------------------------------------------------------------------------- arguments of our configs
    of_choice("vpt:variant=middle", "deep, shallow"),
    of_choice("vpt:precision=half", "auto, float32, authors"),
    of_config("lora:targets=query+valu", "query, key, value, output, fc1, fc2, each once; did you mean 'value'?"),
    of_config(
        "lora:targets=query+query", "'query+query' and must be one or more of query, key, value, output, fc1, fc2"
    ),
    of_choice("gvpt:sides=left", "both, co, dc"),
    of_choice("e2vpt:preset=mine", "code, paper, held_out"),
    of_choice("mlvpt_digits:preset=mine", "code, paper, held_out"),
    of_choice("drmoe_resnet101:preset=best", "recommended, literal, static, hsq, held_out"),
    of_choice("q2l_resnet101:tune=perhaps", "auto, yes, no"),
    of_choice("mlgcn_resnet101:schedule=mine", "code, paper"),
    of_choice("vpt:selection=fair", "published, held_out"),
    of_choice("q2l_resnet101:preset=code", "published, held_out"),
    of_choice("mlvpt_vit:backbone=vit_b16_mae", "in1k, in21k, mae, mocov3"),
    of_config(
        "linear_probe:dataset=digits,root=photos",
        "dataset=digits has no files, so root=photos has no effect; leave one of them out",
    ),
    of_config(
        "mlgcn_resnet101:backbone=resnet999",
        "there is no backbone 'resnet999' for model.backbone.name; did you mean 'resnet",
    ),
]


@each(TEXTS)
def test_texts_and_files_that_are_no_config(case, tmp_path):
    case.check(tmp_path)


# ---------------------------------------------------------------------------------------------------------- validation
MISTAKES = "the config has mistakes: "


def of_values(says: str, values: dict, reference: str = "") -> Refusal:
    """Values of keys in the default config or in one of ours; validation lists all mistakes."""

    def call(_):
        config = load_config(reference, []) if reference else default_config()
        for key, value in values.items():
            *sections, leaf = key.split(".")
            if sections[:-1] == ["model", "adapters"]:
                use_adapter(config, sections[-1])
            functools.reduce(operator.getitem, sections, config)[leaf] = value
        validate(config)

    return Refusal(f"{reference} {values}", None, call, says)


def of_value(key: str, takes: str, *values) -> list[Refusal]:
    """Values that a key does not allow, each the first mistake."""
    return [of_values(f"{MISTAKES}{key} is {value!r} and must be {takes}", {key: value}) for value in values]


def of_choices(key: str, choices, hints: dict[str, str]) -> list[Refusal]:
    """Values beyond the choices of a key, and the nearest choice."""
    return [row for value, hint in hints.items() for row in of_value(key, f"one of {', '.join(choices)}{hint}", value)]


FIRST_SMALLER = "two numbers above 0, the smaller one first"
NAN, INFINITE = float("nan"), float("inf")
NO_NAME = "data.val_fraction holds out data.val_split, which should have a name of its own, such as val"
OTHER_TERMS = "which head linear does not compute (it computes logits, cls)"
VALUES = [
    of_values(
        f"{MISTAKES}model.prompts has 3,000 prompts in each block, above 2,000: lower per_group",
        {"model.prompts.kind": "group", "model.prompts.per_group": 300},
    ),
    *(
        row
        for key, one in KEYS.items()
        if isinstance(one, ChoiceKey)
        for row in of_choices(key, one.choices, {"zzz": ""})
    ),
    *of_choices("model.head.kind", HEADS, {"linaer": "; did you mean 'linear'?"}),
    *of_choices(
        "data.name",
        DATA_SETS,
        {
            "digit": "; did you mean 'digits'?",
            "coco14": "; did you mean 'coco2014'?",
            "tfds:": "; did you mean 'tfds:NAME'?",
        },
    ),
    *of_value("seed", "an integer of at least 0 and at most 4,294,967,295", -1),
    *of_value("data.crop_fraction", "a number above 0 and at most 1", 1.1),
    *of_value("data.fill", "three numbers from 0 to 1", (0.5,), (0, 0.5, 1.5)),
    *of_value("data.test_splits", "strings separated by commas", (1,)),
    *of_value("model.prompts.kept_segments", "strings separated by commas", (10, 1)),
    *of_value("augment.crop_scale", FIRST_SMALLER, (0.5,), (0.0, 1.0), (1.0, 0.5), ("a", "b"), (0.1, INFINITE)),
    *(
        row
        for key in ("prune.token_levels", "optim.milestones")
        for row in of_value(key, "one or more numbers from 0 to below 1", (), (1.0,), (-0.1,), ("a",), (NAN,))
    ),
    *(
        row
        for key, value, other in (
            ("trainable", "True or False", 1.0),
            ("optim.rate_rules", "number", True),
            ("optim.decay_rules", "number", "fast"),
            ("optim.decay_rules", "number", INFINITE),
        )
        for row in of_value(key, f"(regex, {value}) pairs", (("a", other),))
    ),
    *of_value("trainable", "(regex, True or False) pairs", (("a",),), ((1, 2.0),), (("(", True),)),
    *of_value("loss.terms.third", "a number", "much"),
    of_values(f"{MISTAKES}train.epocs does not exist; did you mean 'epochs'?", {"train.epocs": 3}),
    of_values(f"{MISTAKES}loss.terms names co, dc, {OTHER_TERMS}", {"loss.terms.co": 1.0, "loss.terms.dc": 1.0}),
    # a misspelt term would not be switched off
    of_values(
        f"{MISTAKES}loss.terms names mine, other, {OTHER_TERMS}", {"loss.terms.mine": 0.0, "loss.terms.other": 0.0}
    ),
    of_values(
        f"{MISTAKES}data.difficult_train=ignore makes difficult labels unknown, which the loss counts as absent",
        {"loss.kind": "an", "data.difficult_train": "ignore"},
    ),
    of_values(
        f"{MISTAKES}data.known_positives=one makes all other training labels unknown, which loss.kind=bce leaves out",
        {"loss.kind": "bce", "data.known_positives": "one"},
    ),
    of_values(f"{MISTAKES}loss.terms has no term with a weight other than 0", {"loss.terms.logits": 0.0}),
    of_values(
        f"{MISTAKES}eval.select_on=test needs data.test_splits", {"eval.select_on": "test", "data.test_splits": ()}
    ),
    of_values(
        f"{MISTAKES}data.val_split and data.test_splits are both empty, so that there is nothing to evaluate",
        {"eval.select_on": "none", "data.val_split": "", "data.test_splits": ()},
    ),
    *(
        of_values(f"{MISTAKES}{NO_NAME}", {"data.val_fraction": 0.1, "data.val_split": name, "eval.select_on": "none"})
        for name in ("", "train")
    ),
    of_values(f"{MISTAKES}thresholds.per=category needs data.categories", {"thresholds.per": "category"}),
    of_values(
        f"{MISTAKES}ema.decay is 1.5 and must be a number of at least 0 and at most 1; "
        "loss.reduce is 'max' and must be one of mean, sum; "
        "optim.rate_rules is ('bias',) and must be (regex, number) pairs; "
        "train.batch_size is 0 and must be an integer above 0; "
        "model.head.kind=group_experts reads group prompts: set model.prompts.kind=group; "
        "eval.select_on=val needs data.val_split",
        {
            "loss.reduce": "max",
            "train.batch_size": 0,
            "ema.decay": 1.5,
            "model.head.kind": "group_experts",
            "optim.rate_rules": ("bias",),
            "data.val_split": "",
        },
    ),
    of_values("digits 0 and 1", {"model.prompts.kept_tokens": "12"}, "e2vpt"),
    of_values("must have 30 digits", {"model.prompts.kept_tokens": "101"}, "e2vpt"),
    of_values("reads group prompts", {"model.head.kind": "group_linear"}, "e2vpt"),
    of_values("set model.prompts.kind=none", {"model.prompts.count": 0}, "vpt"),
    of_values("a label needs an expert", {}, "hsq_resnet101:task=0,shared=0"),
    of_values("routed_experts has one query per label", {"model.head.decoder.queries": 5}, "drmoe_resnet101"),
    of_values(
        "model.head.names is set, and head csra does not read vectors of names; cosine, query, routed_experts, ml_gcn",
        {"model.head.names": "labels.safetensors"},
        "csra_resnet101",
    ),
    of_values(
        "model.head.decoder.queries must be 0, a query per label, with model.head.names",
        {"model.head.names": "labels.safetensors"},
        "ml_decoder_resnet101",
    ),
    of_values(
        "model.head.names and model.head.graph.word_vectors both name vectors of the labels: leave one out",
        {"model.head.names": "labels.safetensors", "model.head.graph.word_vectors": "glove.txt"},
        "mlgcn_resnet101",
    ),
    Refusal(
        "no sections",
        None,
        lambda _: validate(ConfigDict({"seed": 0})),
        "the config lacks augment, calibration,",
    ),
]


@each(VALUES)
def test_values_that_are_not_allowed(case, tmp_path):
    case.check(tmp_path)


@pytest.mark.parametrize("key", [name for name, key in KEYS.items() if isinstance(key, NumberKey)])
def test_numbers_are_within_their_limits(tmp_path, key):
    limits = KEYS[key]
    kind = type(limits.default)
    wrong = [limits.least - 1, limits.most + 1, limits.above, limits.below]
    values = [kind(number) for number in wrong if kind is float or math.isfinite(number)]
    for value in [*values, kind(1e30), *([NAN] if kind is float else [])]:
        if not (isinstance(limits, AutoIntegerKey) and value == limits.AUTO):
            of_values(f"{key} is {value!r} and must be {limits.allowed}", {key: value}).check(tmp_path)
