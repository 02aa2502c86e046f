"""Settings of the methods that read a feature map: label queries with or without experts, label graphs, sequences.

Each `use_…` sets the architecture of one method. Its config file adds the published recipe.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.config.loading import option
from mlmoe_jax.config.recipes.benchmarks import evaluate_like, follow, method_config, train_on_digits
from mlmoe_jax.config.recipes.prompt_tuning import prompt_tuning_config
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.models.heads.dr_moe import SETTINGS
from mlmoe_jax.models.heads.query import Q2L_SETTINGS
from mlmoe_jax.runtime.keys import ChoiceKey, FlagKey

PUBLISHED = {"published": "as in the paper"}
TUNE = ChoiceKey(
    "auto",
    "Whether the backbone is trained.",
    choices={"auto": "a CNN is, as published, and a ViT is not", "yes": "it is trained", "no": "it is frozen"},
)


def feature_map_config(
    arg: str,
    *,
    dataset: str = "coco2014",
    backbone: str = "resnet101",
    resolution: int = 448,
    tune: str = "auto",
    presets: Mapping[str, str] = PUBLISHED,
    **further: Any,
) -> tuple[ConfigDict, ConfigDict]:
    """Return a config for a method that reads a feature map, and the options parsed from `arg`.

    `arg` has the options of `method_config` and the option `tune`, described in `tune_backbone`. The argument `tune` is
    the default of this option. `method_config` describes all other arguments, and the errors.
    """
    common = {"dataset": dataset, "backbone": backbone, "resolution": resolution, "presets": presets}
    config, options = method_config(arg, **common, tune=replace(TUNE, default=tune), **further)
    tune_backbone(config, options.tune)
    config.loss.kind, config.loss.scale = "bce", 1.0
    config.ema.decay = 0.0
    return config, options


def tune_backbone(config: ConfigDict, tune: str, *, frozen: tuple[tuple[str, bool], ...] = ()) -> None:
    """Set `config.trainable`, in place, so that the backbone is fine-tuned or frozen.

    Args:
      tune: "yes" fine-tunes the backbone, "no" freezes it, and "auto" fine-tunes a CNN and freezes a ViT. If the config
        gets another backbone later, "auto" follows it.
      frozen: rules (regular expression, False) for the parts of a fine-tuned backbone that stay frozen.
    """

    def rules(name: str) -> tuple[tuple[str, bool], ...]:
        return (*frozen, (r"", True)) if is_tuned(tune, name) else (*frozen, (r"^backbone/", False), (r"", True))

    follow(config, "trainable", rules, "model.backbone.name")


def train_batch_norm(config: ConfigDict, tune: str) -> None:
    """Make the backbone's batch normalization trainable if `tune_backbone` fine-tunes the backbone, or else frozen.

    The config is modified. A backbone without batch normalization gets "frozen", which has no effect on it.
    """

    def mode(name: str) -> str:
        present = catalog.entry(name).shape.batch_norm_rule is not None
        return "trainable" if present and is_tuned(tune, name) else "frozen"

    follow(config, "model.backbone.batch_norm", mode, "model.backbone.name")


def is_tuned(tune: str, backbone: str) -> bool:
    """Return whether the backbone named `backbone` is fine-tuned; `tune` is described in `tune_backbone`."""
    return tune == "yes" or (tune == "auto" and not isinstance(catalog.entry(backbone).shape, ViTShape))


def shrink_for_digits(config: ConfigDict, *, rate: float) -> ConfigDict:
    """Set a small head and the recipe `train_on_digits` with learning rate `rate`, in place; return the config."""
    head = config.model.head
    head.decoder.width, head.decoder.heads, head.decoder.hidden = 0, 4, 256
    head.routing.expert_hidden = head.routing.gate_hidden = 32
    head.graph.hidden, head.graph.vector_width = 128, 10
    head.sequence.hidden, head.sequence.embedding, head.sequence.max_labels = 128, 32, 5
    train_on_digits(config, rate=rate)
    return config


def use_q2l(config: ConfigDict) -> None:
    """Set the head (one encoder layer, two decoder layers without self-attention) and the loss of Query2Label.

    Source: Liu et al., 2021.
    """
    config.model.head.kind = "query"
    config.model.head.decoder.update({"width": 0, **Q2L_SETTINGS})
    config.loss.kind, config.loss.scale = "asymmetric", 1000.0


def use_routed_experts(config: ConfigDict, preset: str) -> None:
    """Set the head of DR-MoE or of a related method, in place.

    The presets are "recommended" and "literal" (DR-MoE), "static" (the ablation of DR-MoE), and "hsq" (a reconstruction
    of HSQ, Hybrid Sharing Query, which has no published code).
    """
    config.model.head.kind = "routed_experts"
    config.model.head.routing.update(SETTINGS[preset])


def mlmoe_config(arg: str, *, backbone: str) -> ConfigDict:
    """Return a config for MLMoE: label queries that attend to the patch tokens of a ViT, and experts.

    `arg` has the options of `prompt_tuning_config`, `prompts` (whether the ViT has group prompts, which the label
    queries also attend to) and `gates` (a value of `model.head.routing.gate`). On `digits`, the default backbone is
    vit_digits instead of `backbone`.
    """
    prompts = FlagKey(True, "Group prompts; without them, label queries and experts read a frozen ViT.")
    further = {"prompts": prompts, "gates": option("model.head.routing.gate")}
    config, options = prompt_tuning_config(arg, digits_rate=1e-3, backbone=backbone, **further)
    use_routed_experts(config, "recommended")
    config.model.head.routing.gate = options.gates
    config.model.head.routing.entropy = "off"  # DR-MoE's weight is negligible at this scale of the loss
    config.model.head.decoder.encoder_layers = 0  # the blocks of the ViT are the encoder
    config.model.head.decoder.decoder_layers = 1
    if options.prompts:
        config.model.prompts.kind = "group"
    if options.dataset == "digits":
        shrink_for_digits(config, rate=1e-3)
    return config


def set_q2l_training(config: ConfigDict, tune: str) -> None:
    """Set the training recipe of Query2Label on a ResNet, in place; `tune` is described in `tune_backbone`.

    The recipe is AdamW, a one-cycle schedule and 80 epochs. The stem and the first stage are frozen. Images without
    labels are kept, except in VG256, whose split is drawn from the images with labels.
    """
    tune_backbone(config, tune, frozen=((r"^backbone/(stem|stages/0)/", False),))
    config.data.keep_empty = config.data.name != "vg256"
    config.augment.cutout, config.augment.randaugment = 0.5, "uda"
    config.optim.learning_rate = 1e-4
    config.train.epochs, config.train.batch_size, config.train.patience = 80, 64, 8
    config.ema.decay = 0.9997


def set_gcn_training(config: ConfigDict, tune: str, *, rate: float, epochs: int) -> None:
    """Set the training recipe of ML-GCN and ADD-GCN, in place; `tune` is described in `tune_backbone`.

    The recipe is SGD with learning rate `rate`, a tenth of it for the backbone, and gradients clipped at norm 10.
    Difficult labels, which only VOC has, are positive in training and left out of the AP.
    """
    config.data.difficult_train, config.data.difficult_eval = "positive", "ignore"
    evaluate_like(config, "mlgcn")
    config.optim.name, config.optim.b1 = "sgd", 0.9
    config.optim.learning_rate, config.optim.weight_decay, config.optim.clip_norm = rate, 1e-4, 10.0
    config.optim.rate_rules = ((r"^backbone/", 0.1),)
    config.optim.schedule = "multi_step"
    train_batch_norm(config, tune)
    config.augment.geometry, config.augment.flip = "multi_scale_crop", True
    config.train.epochs, config.train.batch_size = epochs, 16
    config.eval.batch_size = 16
