"""The configuration: every key with its default and its meaning, loading, overrides, and one check of everything.

A config file defines `get_config(arg="") -> ConfigDict`, starting from `default_config()`. What follows a colon in
`--config=file.py:dataset=digits,epochs=3` is handed to it; `parse_arg` splits it.
"""

import ast
import difflib
import importlib.util
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError

_PACKAGE = Path(__file__).resolve().parent
# An installed package carries the configs inside; a checkout has them beside the package.
CONFIG_FOLDER = next((f for f in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if f.is_dir()), _PACKAGE)


def default_config() -> ConfigDict:
    """Return the defaults of every key; methods and data sets change what they need."""
    config = ConfigDict()
    config.seed = 0  # of initial weights, order of the images, augmentation and label grouping

    config.data = data = ConfigDict()
    data.name = "digits"  # digits | digits_single | voc2012 | voc2007 | coco2014 | nuswide | vg256 | vg500
    #                       csv | jsonl | folders | coco_json | packed | tfds:NAME, such as tfds:coco/2014
    data.root = ""  # folder of the data set; not used by digits
    data.table = "{split}.csv"  # csv, jsonl, coco_json: the file with the labels, below root; {split}: the split's name
    data.images = ""  # csv, jsonl, coco_json: the folder below root where the table's paths start; may hold {split}
    data.image_column = "image"  # csv, jsonl: the column, or key, of the image's path
    data.label_column = "labels"  # csv, jsonl: that of its label names; "" = one column a class, 1, 0 or empty
    data.separator = ";"  # csv: between label names
    data.classes = ""  # csv, jsonl, vg500: a text file below root, one class a line; "" = the names in the table
    data.train_split = "train"
    data.val_split = "val"  # "" = none
    data.test_splits = ("test",)  # evaluated at the end
    data.val_fraction = 0.0  # of the training split, drawn by `seed` and held out as val_split; 0 = it has its own
    data.image_size = 64  # pixels, square
    data.resize = "square"  # square (whatever the aspect) | crop (short side, then the centre)
    data.crop_fraction = 0.875  # crop: the side of the centre crop as a fraction of the resized short side
    data.reduced_decoding = False  # decode a large JPEG at 1/2, 1/4 or 1/8; faster, not what the papers did
    data.bad_images = "error"  # an image that is missing or unreadable: error (stop) | skip (count and list it)
    data.difficult = "negative"  # what a label marked difficult counts as: negative | ignore | positive
    data.keep_empty = False  # keep images without any positive label (own tables and folders always do)
    data.workers = 0  # processes that decode, resize and augment; 0 = threads of this one
    data.threads = 2  # in each process

    config.augment = augment = ConfigDict()  # for training batches only, in the order of these keys
    augment.where = "device"  # device (batched, jitted) | host (faster where the device is a CPU)
    #                           geometry and margin are always the host's
    augment.geometry = "none"  # none (data.resize) | random_resized_crop | multi_scale_crop (ML-GCN's)
    augment.crop_scale = (0.08, 1.0)  # random_resized_crop: share of the area
    augment.crop_ratio = (0.75, 1.3333333333333333)  # random_resized_crop: width / height
    augment.margin = 0  # multi_scale_crop: pixels by which a square resize before it exceeds image_size (ADD-GCN: 64)
    augment.flip = False  # left to right, every second image
    augment.shift = 0.0  # largest translation as a fraction of the side, borders repeated
    augment.contrast = 0.0  # factor drawn from 1 ± this
    augment.brightness = 0.0  # likewise
    augment.saturation = 0.0  # likewise
    augment.cutout = 0.0  # side of the square hole as a fraction of the image's (ML-VPT: 0.5); 0 = off
    augment.randaugment = "none"  # none | uda (ML-VPT's) | standard
    augment.randaugment_ops = 2  # standard: ops an image
    augment.randaugment_magnitude = 9  # standard: of 10

    config.model = model = ConfigDict()
    model.dtype = "float32"  # of matrix products: float32 | bfloat16; parameters stay float32
    model.remat = False  # compute each block of the backbone again in the backward pass: less memory, more time
    model.frozen_dtype = "float32"  # in which frozen weights are kept: float32 | bfloat16 (half the memory)
    model.matmul_precision = "default"  # jax_default_matmul_precision: default | high | highest (TPU: bf16 passes)

    model.backbone = backbone = ConfigDict()
    backbone.name = "vit_digits"  # a name of mlmoe_jax.pretrained.catalog
    backbone.weights = "auto"  # auto (package, cache, download) | none (random) | a file
    backbone.batch_norm = "frozen"  # ResNet: frozen | running (affine learns) | trainable (statistics of the batch)
    backbone.final_norm = "auto"  # read features after the last LayerNorm: yes | no | auto (as the papers do)

    model.prompts = prompts = ConfigDict()
    prompts.kind = "none"  # none | group (deep prompts, one set a label group and side)
    prompts.num_groups = 5  # label groups a side
    prompts.per_group = 3  # prompts, and experts, a group
    prompts.mask = "all_prompts"  # none | all_prompts (code) | cross_group (paper)
    prompts.groups = "computed"  # computed from the training labels | published | a .json file {"co": [..], "dc": [..]}
    prompts.tau_co = 2.0  # root applied to conditional probabilities before clustering, co-occurrence side
    prompts.tau_dc = 3.0  # the same, discriminative side

    model.head = head = ConfigDict()
    head.kind = "linear"  # linear | group_experts (ML-VPT)
    head.pool = "cls"  # linear: classifies the cls token | patches (each, then a smooth maximum) | both
    head.expert_hidden = 5  # width of an expert's hidden layer
    head.activation = "gelu"  # of the experts: gelu (code) | relu (paper)
    head.gate_bias = "unused"  # unused (code: allocated and left out) | used (paper)
    head.combine = "mean_logit"  # mean_logit (code) | mean_probability (paper)
    head.shared_classifier = False  # one classifier for both sides, as the paper's eq. 16 prints it

    config.trainable = ((r"^backbone/", False), (r"", True))  # ordered (regex, bool) over parameter paths

    config.loss = loss = ConfigDict()
    loss.kind = "asymmetric"  # asymmetric | bce | focal | softmax (one known label an image)
    loss.gamma_neg = 2.0  # asymmetric: focusing of negatives; focal: the focusing of both
    loss.gamma_pos = 0.0
    loss.clip = 0.0  # asymmetric: probability margin of negatives
    loss.eps = 1e-5  # asymmetric: floor inside the logarithm
    loss.detach = True  # no gradient through the focal weight
    loss.positive_weight = 1.0  # bce: factor on positives; 0 = negatives/positives of each training label
    loss.reduce = "mean"  # mean | sum over images and labels
    loss.scale = 1000.0
    loss.terms = terms = ConfigDict({"logits": 1.0})  # weights of what the head gives; logits: any head
    terms.cls = terms.patches = 0.0  # linear
    terms.co = terms.dc = terms.co_gate = terms.dc_gate = 0.0  # group_experts

    config.optim = optim = ConfigDict()
    optim.name = "adamw"  # adamw | sgd | muon
    optim.learning_rate = 1e-3
    optim.schedule = "one_cycle"  # one_cycle (torch's, cycling beta1) | cosine | constant
    optim.warmup_steps = 0  # cosine and constant: a linear rise from 0
    optim.weight_decay = 1e-2
    optim.b1 = 0.9  # overridden by one_cycle's cycle 0.95 → 0.85 → 0.95
    optim.b2 = 0.999
    optim.eps = 1e-8
    optim.clip_norm = 0.0  # of the trainable gradients together; 0 = off
    optim.rate_rules = ()  # ordered (regex, factor) over parameter paths
    optim.decay_rules = ()  # ordered (regex, factor) over parameter paths
    optim.muon_rules = ((r"^backbone/.*/kernel$", True), (r"", False))  # muon: which matrices; AdamW moves the rest

    config.ema = ema = ConfigDict()
    ema.decay = 0.9997  # a step; 0 = no moving average is reported

    config.train = train = ConfigDict()
    train.epochs = 40
    train.batch_size = 64  # over all devices
    train.log_every = 20  # steps
    train.patience = 0  # stop after more than this many evaluations without a better raw or EMA mAP; 0 = off
    train.save_backbone = False  # write backbone.safetensors (float16) at the end

    config.eval = evaluation = ConfigDict()
    evaluation.batch_size = 256
    evaluation.every_epochs = 1
    evaluation.select_on = "val"  # val | test (as the papers do) | none (the last EMA weights)
    evaluation.threshold = 0.5  # on probabilities, for CP CR CF1 OP OR OF1 and for predict

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every_epochs = 1.0
    checkpoint.keep = 2
    checkpoint.include_frozen = "auto"  # auto (unless a published file has them) | always | never

    config.pack = pack = ConfigDict()  # --mode=pack
    pack.shard_images = 1024  # images a shard
    pack.short_side = 0  # pixels; larger images are stored smaller, as JPEG; 0 = every file as it is
    pack.quality = 95  # of those JPEGs
    pack.processes = 0  # that read and write; 0 = one a core

    config.mesh = mesh = ConfigDict()  # devices along each axis; -1 = all that remain
    mesh.data = -1
    mesh.fsdp = 1
    mesh.expert = 1
    return config


def parse_arg(arg: str, **defaults: Any) -> ConfigDict:
    """Split `key=value,key=value` by `defaults`, which name the keys and give their types.

    Raises UserError for a key that is not among them, or a value of another type.
    """
    options = ConfigDict(defaults)
    seen: set[str] = set()
    for item in filter(None, arg.split(",")):
        key, equals, text = item.partition("=")
        if not equals:
            takes = f"it takes {', '.join(defaults)}" if defaults else "this config takes none"
            raise UserError(f"'{item}' after the config's colon is not key=value; {takes}")
        if key in seen:
            raise UserError(f"config argument '{key}' is given twice")
        seen.add(key)
        set_key(options, key, text, what="config argument")
    return options


def load_config(reference: str, overrides: list[tuple[str, str]]) -> ConfigDict:
    """Load `path.py:arg` or a bare name in configs/, and apply `overrides` ("a.b", "text").

    Raises UserError for a file or key that is not there and for a value of another type.
    """
    location, _, arg = reference.partition(":")
    path = _find_config(location)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None:
        raise UserError(f"config {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"config {path} is not valid Python: line {error.lineno}, {error.msg}") from error
    if not hasattr(module, "get_config"):
        raise UserError(f"config {path} defines no get_config(arg) function")
    return apply_overrides(module.get_config(arg), overrides)


def _find_config(location: str) -> Path:
    candidates = [Path(location), Path(f"{location}.py"), CONFIG_FOLDER / location, CONFIG_FOLDER / f"{location}.py"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = sorted(path.stem for path in CONFIG_FOLDER.glob("*.py"))
    raise UserError(f"there is no config '{location}'{_suggestion(Path(location).stem, names)}")


def apply_overrides(config: ConfigDict, overrides: list[tuple[str, str]]) -> ConfigDict:
    """Set ("a.b", "text") pairs, each text read as the type of the key's default."""
    seen: set[str] = set()
    for key, text in overrides:
        if key in seen:
            raise UserError(f"--config.{key} is given twice")
        seen.add(key)
        set_key(config, key, text, what="config key")
    return config


def set_key(config: ConfigDict, key: str, text: str, *, what: str) -> None:
    """Set dotted `key` to `text` read as the type of the present value; UserError names what is wrong."""
    *parents, leaf = key.split(".")
    node = config
    for depth, name in enumerate([*parents, leaf]):
        if not isinstance(node, ConfigDict) or name not in node:
            known = list(node) if isinstance(node, ConfigDict) else []
            prefix = ".".join([*parents, leaf][:depth])
            where = f" under '{prefix}'" if prefix else ""
            raise UserError(f"{what} '{key}' does not exist: no '{name}'{where}{_suggestion(name, known)}")
        parent, node = node, node[name]
    if isinstance(node, ConfigDict):
        raise UserError(f"{what} '{key}' is a section; set one of {', '.join(f'{key}.{name}' for name in node)}")
    parent[leaf] = _read(text, node, f"{what} '{key}'")


def _read(text: str, present: Any, what: str) -> Any:
    try:
        if isinstance(present, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(present, tuple):
            if text[:1] not in ("(", "["):
                kind = float if present and all(isinstance(value, float) for value in present) else str
                return tuple(kind(part) for part in text.split(",") if part)
            value = ast.literal_eval(text)
            return tuple(_tuples(item) for item in value) if isinstance(value, tuple | list) else (value,)
        return type(present)(text)
    except (ValueError, KeyError, SyntaxError) as error:
        raise UserError(f"{what} takes a {type(present).__name__} such as {present!r}, not '{text}'") from error


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; there are {', '.join(known)}" if known else ""


def to_json(config: ConfigDict) -> str:
    """Return the config as JSON text, which `from_json` turns back into the same config."""
    return json.dumps(config.to_dict(), indent=2)


def from_json(text: str) -> ConfigDict:
    """Read a stored config over the defaults, so that keys added since it was written have their default."""
    config = default_config()

    def merge(node: ConfigDict, stored: dict) -> None:
        for key, value in stored.items():
            if isinstance(value, dict):
                merge(node[key], value)
            else:
                node[key] = _tuples(value) if isinstance(value, list) else value

    try:
        merge(config, json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the stored config is damaged: {str(error).partition('. ')[0]}") from error
    return config


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


_CHOICES = {
    "data.resize": ("square", "crop"),
    "data.bad_images": ("error", "skip"),
    "augment.where": ("device", "host"),
    "augment.geometry": ("none", "random_resized_crop", "multi_scale_crop"),
    "augment.randaugment": ("none", "uda", "standard"),
    "data.difficult": ("negative", "ignore", "positive"),
    "model.dtype": ("float32", "bfloat16"),
    "model.frozen_dtype": ("float32", "bfloat16"),
    "model.backbone.final_norm": ("auto", "yes", "no"),
    "model.backbone.batch_norm": ("frozen", "running", "trainable"),
    "model.matmul_precision": ("default", "high", "highest"),
    "model.prompts.kind": ("none", "group"),
    "model.prompts.mask": ("none", "all_prompts", "cross_group"),
    "model.head.kind": ("linear", "group_experts"),
    "model.head.pool": ("cls", "patches", "both"),
    "model.head.activation": ("gelu", "relu"),
    "model.head.gate_bias": ("unused", "used"),
    "model.head.combine": ("mean_logit", "mean_probability"),
    "loss.kind": ("asymmetric", "bce", "focal", "softmax"),
    "loss.reduce": ("mean", "sum"),
    "optim.name": ("adamw", "sgd", "muon"),
    "optim.schedule": ("one_cycle", "cosine", "constant"),
    "eval.select_on": ("val", "test", "none"),
    "checkpoint.include_frozen": ("auto", "always", "never"),
}
_POSITIVE = (
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
    "pack.shard_images",
    "pack.quality",
    "train.epochs",
    "train.batch_size",
    "train.log_every",
    "eval.batch_size",
    "eval.every_epochs",
    "checkpoint.every_epochs",
    "checkpoint.keep",
)
_RULES = ("trainable", "optim.rate_rules", "optim.decay_rules", "optim.muon_rules")
_FRACTION = (
    "data.val_fraction",
    "data.crop_fraction",
    "augment.shift",
    "augment.contrast",
    "augment.brightness",
    "augment.saturation",
    "augment.cutout",
    "ema.decay",
    "eval.threshold",
)


def validate(config: ConfigDict) -> None:
    """Raise one UserError that lists every mistake in the config."""
    flat = flatten(config)
    wrong = [
        f"{key} is {flat[key]!r}, which is none of {', '.join(choices)}"
        for key, choices in _CHOICES.items()
        if flat[key] not in choices
    ]
    wrong += [f"{key} is {flat[key]!r} and must be above 0" for key in _POSITIVE if not flat[key] > 0]
    wrong += [f"{key} is {flat[key]!r} and must be within 0 and 1" for key in _FRACTION if not 0 <= flat[key] <= 1]
    wrong += [
        f"{key} is {flat[key]!r} and must be (regex, value) pairs"
        for key in _RULES
        if not all(isinstance(rule, tuple | list) and len(rule) == 2 for rule in flat[key])
    ]
    if config.model.head.kind == "group_experts" and config.model.prompts.kind != "group":
        wrong.append("model.head.kind=group_experts reads group prompts: set model.prompts.kind=group")
    pooled = {"cls", "patches"} if config.model.head.pool == "both" else {config.model.head.pool}
    produced = {"linear": {"logits", *pooled}, "group_experts": {"logits", "co", "dc", "co_gate", "dc_gate"}}
    terms = {name for name, weight in config.loss.terms.items() if weight}
    if not terms:
        wrong.append("loss.terms has no term with a weight other than 0")
    elif missing := terms - produced.get(config.model.head.kind, terms):
        wrong.append(
            f"loss.terms names {', '.join(sorted(missing))}, which head {config.model.head.kind} does not give"
        )
    if config.data.val_fraction and not config.data.val_split:
        wrong.append("data.val_fraction holds out data.val_split, which is empty")
    counts = ("data.workers", "pack.short_side", "pack.processes", "augment.margin")
    wrong += [f"{key} is {flat[key]!r} and must be 0 or more" for key in counts if flat[key] < 0]
    for key in ("augment.crop_scale", "augment.crop_ratio"):
        pair = flat[key]
        if not (len(pair) == 2 and all(isinstance(v, int | float) for v in pair) and 0 < pair[0] <= pair[1]):
            wrong.append(f"{key} is {pair!r} and must be two numbers above 0, the smaller one first")
    if config.data.bad_images == "skip" and config.model.backbone.batch_norm == "trainable":
        wrong.append(
            "model.backbone.batch_norm=trainable would count the blanks that data.bad_images=skip leaves, so take "
            "batch_norm=running, or leave bad images out with --mode=pack"
        )
    if config.pack.quality > 100:
        wrong.append(f"pack.quality is {config.pack.quality} and must be at most 100")
    if config.eval.select_on == "val" and not config.data.val_split:
        wrong.append("eval.select_on=val needs data.val_split")
    if config.eval.select_on == "test" and not config.data.test_splits:
        wrong.append("eval.select_on=test needs data.test_splits")
    if not config.data.val_split and not config.data.test_splits:
        wrong.append("data.val_split and data.test_splits are both empty, so that there is nothing to evaluate")
    if wrong:
        raise UserError("the config has mistakes: " + "; ".join(wrong))


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Return {"a.b": value} over all sections."""
    flat = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, ConfigDict) else {name: value}
    return flat
