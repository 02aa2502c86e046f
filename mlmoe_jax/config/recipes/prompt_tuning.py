"""Settings of the methods that tune prompts in a frozen ViT, and of their baselines.

Each difference between the ML-VPT paper and its authors' code is one key. A preset sets all of these keys. `code` is
the default, because the published numbers come from the code.
"""

import functools
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.config.defaults import use_adapter
from mlmoe_jax.config.loading import option
from mlmoe_jax.config.recipes.benchmarks import evaluate_like, follow, method_config, train_on_digits
from mlmoe_jax.models.adapters.catalog import ADAPTERS
from mlmoe_jax.runtime.keys import ChoiceKey

ML_VPT_PRESETS = {
    "code": "as in the code and the configs of ML-VPT's authors",
    "paper": "as in the text of their paper: learning rate 5e-4 and EMA 0.9997 everywhere, images normalized as in the "
    "training of the backbone",
}
VIT_B16 = {  # the weights of ViT-B/16 in the papers
    "in1k": "supervised, on ImageNet-21k, then on ImageNet-1k",
    "in21k": "supervised, on ImageNet-21k",
    "mae": "MAE",
    "mocov3": "MoCo v3",
}

# Types of the matmuls in training and in evaluation. The authors use PyTorch's autocast, with bfloat16 in training and
# the default, float16, in evaluation. Their paper does not say so.
PRECISIONS = {
    "auto": ("auto", "same", "float32 on a CPU, otherwise bfloat16"),
    "float32": ("float32", "same", "float32 everywhere"),
    "authors": ("bfloat16", "float16", "bfloat16, and float16 in evaluation"),
}
PRECISION = ChoiceKey(
    "auto", "Type of the matmuls.", choices={name: meaning for name, (*_, meaning) in PRECISIONS.items()}
)

GATE_BIAS = r"^head/(co|dc)/gate/bias$"


def prompt_tuning_config(
    arg: str, *, digits_rate: float, backbone: str = "dinov2_vitb14", **further: Any
) -> tuple[ConfigDict, ConfigDict]:
    """Return a config with the common recipe of the ML-VPT paper's comparison, and the options parsed from `arg`.

    On `digits`, the default backbone is vit_digits, the learning rate `digits_rate`, and training takes 8 epochs. On
    other data sets, the default backbone is `backbone`, and the recipe is the published one: AdamW with weight decay
    0.01 on all trainable parameters, a one-cycle schedule, 40 epochs, batches of 64, cutout and RandAugment, and EMA.
    Raw and EMA weights are evaluated after each epoch, and selected on the test split. With the preset `code`, the
    learning rate and the normalization are functions of the backbone and the image size, even if these change later.

    `arg` has the options of `method_config`, `precision` (a name in PRECISIONS), and the options in `further`, which
    may also have arguments of `method_config`. Raises UserError if an option or a value is unknown.
    """
    common = {"dataset": "coco2014", "backbone": backbone, "resolution": 224, "presets": ML_VPT_PRESETS}
    config, options = method_config(arg, **common, precision=PRECISION, **further)
    config.model.dtype, config.eval.dtype, _ = PRECISIONS[options.precision]
    if options.dataset == "digits":
        train_on_digits(config, rate=digits_rate)
        config.model.prompts.count = 18  # equals 3 groups of 3 on both sides
    else:
        _set_published_training(config, options)
    return config, options


def _set_published_training(config: ConfigDict, options: ConfigDict) -> None:
    """Set training and evaluation for a data set other than `digits`, by the options `preset` and `dataset`."""
    evaluate_like(config, "mlvpt", metric="mAP_envelope")
    config.data.truncated = "read"  # as the authors' code opens images
    config.augment.cutout, config.augment.randaugment = 0.5, "uda"
    config.train.patience = 6
    if options.preset == "paper":
        config.optim.learning_rate, config.ema.decay = 5e-4, 0.9997
    else:
        follow(config, "model.backbone.normalization", published_normalization, "model.backbone.name")
        rate = functools.partial(published_rate, options.dataset)
        follow(config, "optim.learning_rate", rate, "model.backbone.name", "data.image_size")


def prompts_config(arg: str, **further: Any) -> tuple[ConfigDict, ConfigDict]:
    """Return a config with prompts and a linear classifier, trained with the recipe of `prompt_tuning_config`.

    `arg` has the options of `prompt_tuning_config`, the options in `further`, `prompts` (the number of prompts per
    block), `dropout` (`model.prompts.dropout`) and `pool` (`model.head.pool`).
    """
    config, options = prompt_tuning_config(
        arg,
        digits_rate=1e-2,
        prompts=option(
            "model.prompts.count", default=0, doc="Prompts per block; 0 is 30 (ML-VPT's paper), on digits 18."
        ),
        dropout=option("model.prompts.dropout"),
        pool=option("model.head.pool"),
        **further,
    )
    prompts = config.model.prompts
    prompts.count = options.prompts or prompts.count
    prompts.dropout = options.dropout
    config.model.head.pool = options.pool
    return config, options


def adapter_config(arg: str, name: str, *, digits_rate: float) -> ConfigDict:
    """Return a config with an adapter and a linear classifier, trained with the recipe of `prompt_tuning_config`.

    `arg` has the options of `prompt_tuning_config`, `pool` (`model.head.pool`), `prompts` (the number of deep prompts
    per block in addition to the adapter), and the settings of the adapter `name`.
    """
    own = ADAPTERS.component(name).keys
    prompts = option("model.prompts.count", default=0, doc="Deep prompts per block in addition; 0 is none.")
    further = {"prompts": prompts, "pool": option("model.head.pool"), **own}
    config, options = prompt_tuning_config(arg, digits_rate=digits_rate, **further)
    use_adapter(config, name, **{setting: options[setting] for setting in own})
    if options.prompts:
        config.model.prompts.kind, config.model.prompts.count = "deep", options.prompts
    config.model.head.pool = options.pool
    return config


def published_normalization(backbone: str) -> str:
    """Return the image normalization for a backbone in ML-VPT's code, a value of `model.backbone.normalization`.

    The authors' code normalizes all images with the mean and standard deviation of ImageNet. The result is "imagenet"
    for the backbones of this code. For other backbones it is "auto": the mean and standard deviation with which the
    weights were trained. The preset `paper` uses "auto" for all backbones.
    """
    known = backbone.startswith("dinov2_") or backbone.removeprefix("vit_b16_") in VIT_B16
    return "imagenet" if known else "auto"


def published_rate(dataset: str, backbone: str, resolution: int) -> float:
    """Return the learning rate in the config of ML-VPT's code: 1e-4 or 5e-4. The paper says 5e-4.

    DINOv3-B gets the learning rate of DINOv2-B. `resolution` is the side of the images in pixels.
    """
    slow = {
        "coco2014": backbone in ("dinov2_vitb14", "dinov3_vitb16"),
        "voc2007": resolution == 448,
        "voc2012": resolution == 448,
        "vg256": True,
    }
    return 1e-4 if slow.get(dataset) else 5e-4


def use_ml_vpt(config: ConfigDict, *, preset: str = "code") -> None:
    """Set ML-VPT: group prompts, group-aware experts with one gate per label, and one classifier per side.

    The two sides are the co-occurrence groups and the discriminative groups of labels. The presets `code` (the authors'
    code) and `paper` (the text of the paper) differ as follows:

    * prompt mask: `code` all_prompts, `paper` cross_group.
    * activation of the experts: `code` GELU, `paper` ReLU.
    * bias of the gates: `code` unused, `paper` used.
    * loss terms: `code` four, `paper` two.
    * prediction from the two sides: `code` mean logit, `paper` mean probability.

    The printed equation has one classifier for both sides (ML-VPT, eq. 16), but the text and the parameter count say
    two. Both presets have two classifiers.
    """
    code = preset == "code"
    config.model.prompts.kind = "group"
    config.model.prompts.attention_mask = "all_prompts" if code else "cross_group"
    config.model.head.kind = "group_experts"
    config.model.head.activation = "gelu" if code else "relu"
    config.model.head.gate_bias = "unused" if code else "used"
    config.model.head.combine = "mean_logit" if code else "mean_probability"
    gate_terms = {"co_gate": 1.0, "dc_gate": 1.0} if code else {}
    config.loss.terms = {"logits": 0.0, "co": 1.0, "dc": 1.0, **gate_terms}
    # An unused bias gets no gradient and, as in the authors' code, no decay.
    config.optim.decay_rules = ((GATE_BIAS, 0.0),) if code else ()
