"""What the configs of the methods set: as published, and following other keys until they are set themselves."""

import copy

import pytest

from mlmoe_jax.config import default_config, flatten, from_json, load_config, to_json
from mlmoe_jax.config.recipes.benchmarks import follow
from mlmoe_jax.models.rules import first_match

HEAD = ((r"^backbone/", False), (r"", True))
EVERYTHING = ((r"", True),)
STEM = (r"^backbone/(stem|stages/0)/", False)
VIT = "model.backbone.name=dinov2_vits14"
TUNING = ("mlgcn", "addgcn", "drmoe", "ml_decoder")
# key -> the config, and further keys, as on the command line -> its value
VALUES = {
    "optim.learning_rate": {
        "mlvpt_dinov2:dataset=coco2014": 1e-4,
        "mlvpt_dinov2:dataset=coco2014,backbone=dinov2_vits14": 5e-4,
        "mlvpt_dinov2:dataset=nuswide": 5e-4,
        "mlvpt_dinov2:dataset=vg256": 1e-4,
        "mlvpt_dinov2:dataset=voc2007": 5e-4,
        "mlvpt_dinov2:dataset=voc2007,resolution=448": 1e-4,
        "mlvpt_dinov2:dataset=vg256,preset=paper": 5e-4,
        "q2l_resnet101": 1e-4,
        "mlgcn_resnet101": 0.1,
        # follows the backbone and the resolution, unless it is given
        f"mlvpt_dinov2 {VIT}": 5e-4,
        f"mlvpt_dinov2:preset=paper {VIT}": 5e-4,
        "mlvpt_dinov2:backbone=dinov2_vits14 model.backbone.name=dinov2_vitb14": 1e-4,
        "vpt:dataset=voc2007 data.image_size=448": 1e-4,
        f"mlvpt_dinov2 {VIT} optim.learning_rate=0.01": 0.01,
        f"mlvpt_dinov2 optim.learning_rate=0.01 {VIT}": 0.01,
    },
    # by the rule of the authors of ML-VPT
    "ema.decay": {
        "vpt:dataset=coco2014": 0.9998452,
        "vpt:dataset=nuswide": 0.9998988,
        "vpt:dataset=voc2007": 0.9974590,
        "vpt:dataset=voc2012": 0.9974590,
        "vpt:dataset=vg256": 0.9978910,
        "mlvpt_dinov2:preset=paper": 0.9997,
        "q2l_resnet101": 0.9997,
    },
    # Papers average with a constant decay; on images of one's own, there is no paper to follow.
    "ema.warmup": {
        **{f"{name}:dataset=coco2014": False for name in ("vpt", "q2l_resnet101", "pat_resnet101")},
        "mlvpt_dinov2:preset=paper": False,
        "mlvpt_digits": False,
        "pretrain_digits": False,
        **{f"{name}:dataset=own": True for name in ("vpt", "q2l_resnet101", "pat_resnet101")},
        "own_csv:backbone=resnet50,fit=steps": True,
        "own_csv:backbone=dinov2_vits14": True,
    },
    "data.name": {
        "vpt:dataset=own": "csv",
        "vpt:dataset=own,table=a.jsonl": "jsonl",
        "vpt:dataset=own data.table=a.jsonl": "jsonl",
        "vpt:dataset=own data.name=folders": "folders",
        "own_csv:backbone=resnet50,table=a.jsonl": "jsonl",
    },
    "data.table": {"vpt:dataset=own": "labels.csv"},
    "data.root": {"vpt:dataset=own,root=photos": "photos"},
    "data.label_column": {"vpt:dataset=own,label_column=": ""},
    "optim.name": {"q2l_resnet101": "adamw", "drmoe_resnet101": "adam", "mlgcn_resnet101": "sgd"},
    "optim.weight_decay": {"drmoe_resnet101": 1e-5},
    "optim.milestones": {"drmoe_resnet101": (0.6, 0.8)},
    "optim.clip_norm": {"mlgcn_resnet101": 10.0},
    "optim.rate_rules": {"mlgcn_resnet101": ((r"^backbone/", 0.1),)},
    "train.epochs": {"q2l_resnet101": 80},
    "train.batch_size": {"drmoe_resnet101:dataset=voc2007": 16},
    "loss.kind": {"q2l_resnet101": "asymmetric"},
    "loss.scale": {"q2l_resnet101": 1000.0},
    "loss.gamma_neg": {"ml_decoder_resnet101": 4.0},
    "loss.clip": {"ml_decoder_resnet101": 0.05},
    "loss.reduce": {"ml_decoder_resnet101": "sum"},
    "data.keep_empty": {
        "q2l_resnet101": True,
        "hsq_resnet101": True,  # is rebuilt after Query2Label
        "q2l_resnet101:dataset=vg256": False,  # its split has no empty images
        "hsq_resnet101:dataset=vg256": False,
    },
    "data.difficult_train": {
        **{f"{name}_resnet101:dataset=voc2007": "positive" for name in ("mlgcn", "addgcn")},
        **{f"{name}_resnet101:dataset=voc2007": "negative" for name in ("splicemix", "csra", "pat")},
    },
    "data.difficult_eval": {
        **{f"{name}_resnet101:dataset=voc2007": "ignore" for name in ("mlgcn", "addgcn", "splicemix", "csra")},
        "pat_resnet101:dataset=voc2007": "negative",
    },
    # Only ML-VPT and PAT set PIL's LOAD_TRUNCATED_IMAGES.
    "data.truncated": {"vpt": "read", "pat_resnet101": "read", "q2l_resnet101": "refuse", "csra_resnet101": "refuse"},
    "train.patience": {"mlmoe_dinov2": 6, "q2l_resnet101": 8, "hsq_resnet101": 8, "pat_resnet101": 1},
    "augment.contrast": {"drmoe_resnet101": 0.4},
    "augment.hue": {"drmoe_resnet101": 0.1},
    "augment.jitter_order": {"drmoe_resnet101": "random"},
    "augment.margin": {"addgcn_resnet101": 64},
    "augment.randaugment": {"ml_decoder_resnet101": "uda"},
    "augment.cutout": {"ml_decoder_resnet101": 0.5},
    "trainable": {
        "mlgcn_resnet101": EVERYTHING,
        f"mlgcn_resnet101 {VIT}": HEAD,
        f"mlgcn_resnet101:tune=yes {VIT}": EVERYTHING,
        "mlgcn_resnet101:tune=no": HEAD,
        "q2l_resnet101": (STEM, *EVERYTHING),
        f"hsq_resnet101 {VIT}": (STEM, *HEAD),
    },
    # Only a tuned backbone trains it: a frozen one would drift from its weights, and its features could not be cached.
    "model.backbone.batch_norm": {
        **{f"{name}_resnet101": "trainable" for name in TUNING},
        **{f"{name}_resnet101:tune=no": "frozen" for name in TUNING},
        **{f"{name}_resnet101 {VIT}": "frozen" for name in TUNING},
        **{f"{name}_resnet101:tune=no model.backbone.batch_norm=running": "running" for name in TUNING},
        "finetune:backbone=resnet101,dataset=coco2014": "trainable",
        "finetune:backbone=efficientnet_lite0,dataset=coco2014": "trainable",
        "finetune:dataset=coco2014": "frozen",
    },
    "model.backbone.normalization": {
        "mlvpt_vit:backbone=in21k,preset=code": "imagenet",
        "mlvpt_vit:backbone=in21k,preset=paper": "auto",
        # ML-Decoder tunes its backbone on pixels in 0 to 1
        "ml_decoder_resnet101": "unit",
        f"ml_decoder_resnet101 {VIT}": "auto",
        f"ml_decoder_resnet101 {VIT} model.backbone.normalization=unit": "unit",
        "ml_decoder_resnet101:dataset=digits": "auto",
    },
    "model.dtype": {
        "mlvpt_dinov2": "auto",
        "mlvpt_dinov2:precision=float32": "float32",
        "mlvpt_dinov2:precision=authors": "bfloat16",
    },
    "eval.dtype": {"mlvpt_dinov2:precision=float32": "same", "vpt:dataset=digits,precision=authors": "float16"},
    "data.image_size": {"vpt:dataset=digits,resolution=448": 448, "lora:dataset=voc2007,resolution=224": 224},
    "model.backbone.name": {
        "vpt:dataset=digits": "vit_digits",
        "lora:dataset=voc2007": "dinov2_vitb14",
        "mlvpt_dinov3:root=x": "dinov3_vitb16",
        "mlmoe_dinov3:root=x": "dinov3_vitb16",
    },
}


@pytest.mark.parametrize(
    ("key", "command", "value"),
    [(key, command, value) for key, values in VALUES.items() for command, value in values.items()],
)
def test_what_a_config_sets(key, command, value):
    reference, *pairs = command.split()
    assert flatten(load_config(reference, [tuple(pair.split("=")) for pair in pairs]))[key] == value


@pytest.fixture
def config():
    """A config whose learning rate is a thousandth of the batch size times the number of epochs."""
    config = default_config()
    config.train.batch_size, config.train.epochs = 4, 2
    follow(config, "optim.learning_rate", lambda size, epochs: size * epochs / 1000, "train.batch_size", "train.epochs")
    return config


def test_a_copy_follows_its_own_settings(config):
    other = copy.deepcopy(config)
    other.update_from_flattened_dict({"train.batch_size": 10})
    assert (config.optim.learning_rate, other.optim.learning_rate) == (0.008, 0.02)


def test_a_second_rule_replaces_the_first(config):
    follow(config, "optim.learning_rate", lambda size: size / 10, "train.batch_size")
    config.train.epochs, config.train.batch_size = 100, 7
    assert config.optim.learning_rate == 0.7


def test_a_run_stores_the_value(config):
    stored = from_json(to_json(config))
    stored.train.batch_size = 100
    assert stored.optim.learning_rate == 0.008


def test_ml_decoder_decays_matrices_only():
    rules = load_config("ml_decoder_resnet101", []).optim.decay_rules
    names = ("head/decoder/embed/kernel", "backbone/stages/0/0/layer_scale/gamma", "backbone/norm/scale", "a/bias")
    assert [first_match(rules, name, 1.0) for name in names] == [1.0, 0.0, 0.0, 0.0]
