"""Validation of the whole config: each key on its own, and settings that must fit together."""

from collections.abc import Collection

from ml_collections import ConfigDict

from mlmoe_jax.config.defaults import flatten, why_unknown
from mlmoe_jax.config.table import CONFIG, KEYS, entry_named, key_named
from mlmoe_jax.data.labels import hidden
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.adapters.catalog import (
    ADAPTERS,
    PROMPT_KINDS,
    active_adapters,
    describe_adapters,
    prompts_class,
)
from mlmoe_jax.models.heads.catalog import HEADS, head_class
from mlmoe_jax.models.loss_catalog import LOSSES
from mlmoe_jax.runtime.keys import KeyValues, format_value

_OF_TRAINED_MODELS = ("data", "image", "score", "measure", "report", "serve")  # the stages that such a model may run


def validate(config: ConfigDict) -> None:
    """Raise one UserError that lists all mistakes in the config, if there are any."""
    if missing := CONFIG.entries.keys() - config.keys():
        raise UserError(f"the config lacks {', '.join(sorted(missing))}; let it start from default_config()")
    checks = (_key_mistakes, _model_mistakes, _data_mistakes, _loss_mistakes, _cache_mistakes, _fit_mistakes)
    if mistakes := [mistake for check in checks for mistake in check(config)]:
        raise UserError("the config has mistakes: " + "; ".join(mistakes))


def find_warnings(config: ConfigDict) -> list[str]:
    """Return warnings, one sentence each, about settings that are valid but probably not intended."""
    messages, loss = head_class(config).warnings(config), config.loss
    if loss.kind == "focal" and loss.gamma_neg != KEYS["loss.gamma_neg"].default:
        messages.append(
            f"loss.gamma_neg={loss.gamma_neg:g} is for the asymmetric loss; the exponent of focal is loss.gamma, which "
            f"is {loss.gamma:g}"
        )
    if config.data.bad_images == "skip" and has_batch_statistics(config):
        messages.append(
            "trained batch normalization would count the blank of an unreadable image, so in training "
            "data.bad_images=skip leaves out only missing images, and an unreadable image is an error"
        )
    if prompts_class(config).uses_groups and not head_class(config).uses_groups:
        messages.append(
            f"model.head.kind={config.model.head.kind} does not use label groups, so group prompts differ from deep "
            "prompts only in the attention mask"
        )
    return messages


def find_unused(config: ConfigDict, overrides: KeyValues) -> list[str]:
    """Return one sentence for each key in `overrides` that has no effect, because of the values of other keys."""
    values, messages = flatten(config), []
    for name, _ in overrides:
        entry = entry_named(name)
        for condition, wanted in entry.only_if.items() if entry else ():
            if (value := values[condition]) not in wanted:
                messages.append(f"{name} has no effect, because {condition} is {format_value(value) or 'empty'}")
                break
    return messages


def find_unread(overrides: KeyValues, stages: Collection[str]) -> list[str]:
    """Return the names of the existing keys and sections in `overrides` that no stage in `stages` reads.

    `stages` are the parts of the program that a command runs, names in `runtime.stages.STAGES`.
    """
    entries = {name: entry_named(name) for name, _ in overrides}
    return [name for name, entry in entries.items() if entry and not set(entry.stages) & set(stages)]


def require_changeable(overrides: KeyValues) -> None:
    """Raise UserError if a key in `overrides` must keep its trained value, or has no effect on a trained model."""
    for name, value in overrides:
        if (entry := entry_named(name)) and "model" in entry.stages:
            raise UserError(f"--config.{name} cannot differ from the trained run's; leave it out")
        if find_unread([(name, value)], _OF_TRAINED_MODELS):
            raise UserError(f"--config.{name} has no effect on a trained model; leave it out")


def has_batch_statistics(config: ConfigDict) -> bool:
    """Return whether the backbone or the head normalizes with batch statistics in training."""
    return _trains_batch_norm(config) or head_class(config).batch_statistics


def _trains_batch_norm(config: ConfigDict) -> bool:
    """Return whether the backbone has trainable batch normalization; False if the backbone is unknown."""
    from mlmoe_jax.models.backbones.catalog import CATALOG  # imports jax, which --help does without

    settings = config.model.backbone
    entry = CATALOG.get(settings.name)
    return settings.batch_norm == "trainable" and entry is not None and entry.shape.batch_norm_rule is not None


def _key_mistakes(config: ConfigDict) -> list[str]:
    wrong = []
    for name, value in flatten(config).items():
        key = key_named(name)
        if key is None:
            wrong.append(f"{name} {why_unknown(name)}")
        elif not key.allows(value):
            wrong.append(f"{name} is {value!r} and must be {key.allowed}{key.hint(value)}")
    return wrong


def _data_mistakes(config: ConfigDict) -> list[str]:
    data, select_on, wrong = config.data, config.eval.select_on, []
    if data.val_fraction and data.val_split in ("", data.train_split):
        wrong.append("data.val_fraction holds out data.val_split, which should have a name of its own, such as val")
    if select_on == "val" and not data.val_split:
        wrong.append("eval.select_on=val needs data.val_split")
    if select_on == "test" and not data.test_splits:
        wrong.append("eval.select_on=test needs data.test_splits")
    if config.thresholds.per == "category" and not data.categories:
        wrong.append("thresholds.per=category needs data.categories")
    if not data.val_split and not data.test_splits and config.train.fit != "logistic":
        wrong.append("data.val_split and data.test_splits are both empty, so that there is nothing to evaluate")
    return wrong


def _loss_mistakes(config: ConfigDict) -> list[str]:
    """Return error messages about settings of the loss and of the labels that contradict each other."""
    data, settings = config.data, config.loss
    if wrong := hidden.find_mistake(data.known_positives):
        return [wrong]
    if settings.kind not in LOSSES or not any(settings.terms.values()):
        return []
    loss = LOSSES[settings.kind]
    wrong = loss.mistakes(config)
    if settings.unknown in ("selective", "normalize") and settings.unknown not in loss.modes:
        wrong.append(f"loss.unknown={settings.unknown} is a mode of csl: set loss.kind=csl, or loss.unknown=auto")
    if not loss.reads_negatives(settings) and data.known_positives != hidden.ALL:
        wrong.append(
            f"data.known_positives={data.known_positives} makes all other training labels unknown, which loss.kind="
            f"{settings.kind} leaves out: set loss.unknown=negative, or a loss.kind for missing labels"
        )
    if loss.reads_negatives(settings) and data.difficult_train == "ignore":
        wrong.append(
            "data.difficult_train=ignore makes difficult labels unknown, which the loss counts as absent: set "
            "data.difficult_train=negative or positive"
        )
    return wrong


def _cache_mistakes(config: ConfigDict) -> list[str]:
    """Return error messages about settings that prevent caching, because they would change features in training."""
    if config.data.cache_features == "no":
        return []
    wrong = []
    resets = [
        f"augment.{name}={key.default}"
        for name, key in CONFIG.entries["augment"].entries.items()
        if config.augment[name] != key.default and not name.startswith(("mix", "splice"))  # features can be mixed
    ]
    if resets:
        wrong.append(f"data.cache_features computes features without augmentation: set {', '.join(resets)}")
    if config.augment.mix not in ("none", "mixup"):
        wrong.append(f"augment.mix={config.augment.mix} needs images: set augment.mix=mixup, or data.cache_features=no")
    if config.model.prompts.kind in PROMPT_KINDS and (adapters := describe_adapters(config)):
        wrong.append(
            f"data.cache_features needs features that do not change in training, but {adapters} change them: set "
            "data.cache_features=no"
        )
    if _trains_batch_norm(config):
        wrong.append(
            "data.cache_features needs features that do not depend on the batch: set "
            "model.backbone.batch_norm=frozen, or data.cache_features=no"
        )
    return wrong


def _fit_mistakes(config: ConfigDict) -> list[str]:
    """Return error messages about settings that contradict `train.fit=logistic`."""
    if config.train.fit != "logistic":
        return []
    head, wrong, otherwise = config.model.head, [], ", or train.fit=steps"
    if head.kind != "cosine" and (head.kind != "linear" or head.pool not in ("cls", "mean")):
        wrong.append(f"train.fit=logistic fits one linear classifier: set model.head.kind=linear, pool=cls{otherwise}")
    if config.data.cache_features == "no":
        wrong.append(f"train.fit=logistic needs fixed features: set data.cache_features=float32{otherwise}")
    if config.augment.mix != "none":
        wrong.append(f"train.fit=logistic has no steps whose batches are mixed: set augment.mix=none{otherwise}")
    if config.loss.kind != "bce" or config.loss.positive_weight != 1 or config.loss.unknown == "negative":
        wrong.append(
            "train.fit=logistic minimizes bce and leaves out unknown labels: set loss.kind=bce, "
            f"loss.positive_weight=1 and loss.unknown=auto{otherwise}"
        )
    return wrong


def _model_mistakes(config: ConfigDict) -> list[str]:
    if config.model.prompts.kind not in PROMPT_KINDS or any(name not in ADAPTERS for name in config.model.adapters):
        return []  # `_key_mistakes` reports them
    wrong = _head_mistakes(config) if config.model.head.kind in HEADS else []
    for adapter, settings in active_adapters(config).values():
        wrong += adapter.mistakes(settings)
    return wrong


def _head_mistakes(config: ConfigDict) -> list[str]:
    kind, head, wrong = config.model.head.kind, head_class(config), []
    if head.needs_group_prompts and not prompts_class(config).uses_groups:
        wrong.append(f"model.head.kind={kind} reads group prompts: set model.prompts.kind=group")
    readers = KEYS["model.head.names"].only_if["model.head.kind"]
    if config.model.head.names and kind not in readers:
        wrong.append(
            f"model.head.names is set, and head {kind} does not read vectors of names; {', '.join(readers)} do"
        )
    if not head.terms(config) and config.augment.mix != "none":
        wrong.append(f"augment.mix interpolates labels, which head {kind} reads as a sequence: set augment.mix=none")
    if config.augment.mix == "splicemix" and (config.train.accumulate > 1 or config.train.batch_size < 4):
        wrong.append(
            "augment.mix=splicemix joins 4 images of a whole batch: set train.accumulate=1, batch_size=4 or more"
        )
    return wrong + _term_mistakes(config, kind, head.terms(config)) + head.mistakes(config)


def _term_mistakes(config: ConfigDict, kind: str, terms: tuple[str, ...]) -> list[str]:
    """Return error messages about `config.loss.terms`. The head `kind` computes the loss terms `terms`."""
    wrong, weighted = [], {name for name, weight in config.loss.terms.items() if weight}
    if terms and not weighted:
        wrong.append("loss.terms has no term with a weight other than 0")
    unknown = {name for name in config.loss.terms if f"loss.terms.{name}" not in KEYS}  # possible typos
    if missing := (weighted | unknown) - set(terms):
        names, known = ", ".join(sorted(missing)), ", ".join(terms) or "none"
        wrong.append(f"loss.terms names {names}, which head {kind} does not compute (it computes {known})")
    return wrong
