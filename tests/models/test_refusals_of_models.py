"""What models and their parts refuse: sentences for a user, and errors for who calls them."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers.drawn import drawn
from helpers.prompts import WITHOUT_PROMPTS
from helpers.query_heads import decoder_settings
from helpers.refusals import Refusal, each

from mlmoe_jax.config import default_config, load_config, use_adapter, validate
from mlmoe_jax.data.labels.counts import TrainingLabels
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models import missing_labels, rules
from mlmoe_jax.models.adapter_merge import merge_adapters
from mlmoe_jax.models.adapters.catalog import ADAPTERS
from mlmoe_jax.models.backbones.convnext import ConvNeXtShape
from mlmoe_jax.models.backbones.resnet import ResNetShape
from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.models.block_features import block_features
from mlmoe_jax.models.build import Classifier, build_model
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.layers.batch_norm import BatchNorm
from mlmoe_jax.models.layers.dispatch import convolve
from mlmoe_jax.models.outputs import Features, Prediction, Prompts
from mlmoe_jax.models.params import ModelDef, split_trainable
from mlmoe_jax.models.query_decoder import QueryDecoder
from mlmoe_jax.training.objective import Objective


def of_key(name: str, key: str, value: str, *says: str, method: str = "vpt") -> Refusal:
    """A key of the config of a method, with a value with which the config or its model cannot be made."""

    def build():
        config = load_config(f"{method}:dataset=digits", [(key, value)])
        validate(config)
        build_model(config, synthetic_label_space(3, 1), rngs=nnx.Rngs(0))

    return Refusal(name, None, lambda _: nnx.eval_shape(build), *says)


def of_settings(adapter: str, key: str, value: object, says: str) -> Refusal:
    """A setting of an adapter that makes no sense."""

    def call(_):
        config = load_config(f"{adapter}:dataset=digits", [])
        use_adapter(config, adapter, **{key: value})
        validate(config)

    return Refusal(f"{adapter}: {key}={value}", None, call, f"model.adapters.{adapter}.{key} ", says)


def of_merge(adapter: str, settings: dict, *says: str, **shape) -> Refusal:
    """An adapter of a tiny ViT that cannot be merged."""
    shape = ViTShape(width=16, depth=2, heads=2, patch=8, native=16, **shape)

    def build():
        config = default_config()
        use_adapter(config, adapter, **settings)
        made = ADAPTERS[adapter].from_config(config.model.adapters[adapter], shape, dtype=None, rngs=nnx.Rngs(0))
        parts = shape.build(rngs=nnx.Rngs(0)), WITHOUT_PROMPTS, LinearHead(16, 3, rngs=nnx.Rngs(0))
        return Classifier(*parts, final_norm=True, precision="default", adapters={adapter: made})

    return Refusal(f"merged {adapter}", None, lambda _: merge_adapters(drawn(build)), *says)


def of_decoder(name: str, says: str, **options) -> Refusal:
    """A query decoder of sizes that do not fit together."""
    build = lambda: QueryDecoder(12, 5, decoder_settings(**options), rngs=nnx.Rngs(0))  # noqa: E731
    return Refusal(name, None, lambda _: nnx.eval_shape(build), says)


def of_loss(name: str, kind: str, says: str, call, codes: np.ndarray | None) -> Refusal:
    """A loss with a value per training image and label, of which 19 have space."""
    loss, labels = default_config().loss, None if codes is None else TrainingLabels(codes, "negative")
    loss.kind = kind
    few = lambda _: mock.patch.object(missing_labels, "MOST_VALUES", 19)  # noqa: E731
    return Refusal(name, few, lambda _: call(Objective(loss, labels)), says)


def evaluate(objective: Objective) -> None:
    ones = np.ones((5, 4), np.float32)
    objective(Prediction(jnp.zeros((5, 4))), {"label": ones, "label_mask": ones, "mask": ones[:, 0]})


BACKBONES = {
    "ViT": ViTShape(width=16, depth=1, heads=2, patch=7, native=14),
    "ResNet": ResNetShape((1, 1, 1, 1), stem=4),
    "ConvNeXt": ConvNeXtShape((1, 1), (4, 8)),
}


def of_backbone(name: str, shape: str, *says: str, pixels: tuple[int, int] = (35, 35), prompts=None, **read) -> Refusal:
    """A backbone that is called with an image of a size, prompts, or the names of features that it cannot give."""

    def run():
        return BACKBONES[shape].build(rngs=nnx.Rngs(0))(jnp.zeros((1, *pixels, 3)), prompts, **read)

    return Refusal(name, None, lambda _: jax.eval_shape(run), *says, error=ValueError)


def of_blocks(name: str, build, says: str) -> Refusal:
    """A block that a backbone does not have."""
    call = lambda _: block_features(drawn(lambda: build(rngs=nnx.Rngs(0))), jnp.zeros((1, 14, 14, 3)), [5])  # noqa: E731
    return Refusal(name, None, call, says, error=ValueError)


def one_value_per_channel(_):
    norm = BatchNorm(4, mode="trainable")
    norm.train()
    norm(jnp.ones((1, 1, 1, 4)))


def dilated(_):
    options = {"lhs_dilation": (1, 1), "rhs_dilation": (2, 2), "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    convolve(jnp.ones((1, 8, 8, 4)), jnp.ones((3, 3, 1, 4)), (1, 1), "SAME", **options, feature_group_count=4)


def merged_in_part(_):
    definition, params, _ = ModelDef.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    definition.merge({"kernel": params["kernel"]})


CODES, ADAPTER = np.full((5, 4), -1, np.int8), "model.adapters.lora"
ALL_OR_MORE, ONE_OR_MORE = "must be one or more of all, patch_em", "must be one or more of query, key, value, "
BACKBONE, LORA = "model.backbone.name", "LoRA (rank 8; query, value)"
REFUSALS = [
    of_key("another adapter", "model.adapters.loar.rank", "4", "'model.adapters.loar.rank' does not exist; did you"),
    of_key("another setting", f"{ADAPTER}.rnak", "4", f"key '{ADAPTER}.rnak' does not exist; did you mean 'rank'?"),
    of_key("a word as rank", f"{ADAPTER}.rank", "x", f"'{ADAPTER}.rank' takes an integer of at least 1 and "),
    of_key("an unknown name", "model.adapters", "loar", "there is no adapter 'loar'; did you mean 'lora'?"),
    of_key("a section's value", ADAPTER, "8", f"'{ADAPTER}' is a section with rank, "),
    of_key("a large rank", f"{ADAPTER}.rank", "129", f"{ADAPTER}.rank is 129, above the width 128 of query; take a"),
    of_key("changed features", "data.cache_features", "float32", f"but {LORA} change them", method="lora"),
    of_key("no ViT for LoRA", BACKBONE, "resnet50", f"of {LORA} must be a ViT, and resnet50 is not one", method="lora"),
    of_key("no ViT for prompts", BACKBONE, "convnext_tiny", "deep prompts must be a ViT, and convnext_tiny is not one"),
    of_settings("lora", "targets", ("query", "kye"), ONE_OR_MORE),
    of_settings("lora", "targets", (), ONE_OR_MORE),
    of_settings("lora", "targets", ("key", "key"), ONE_OR_MORE),
    of_settings("lora", "rank", 0, "is 0 and must be an integer of at least 1 and at most 4,096"),
    of_settings("lora", "dropout", 2.0, "is 2.0 and must be a number of at least 0 and at most 1"),
    of_settings("lora", "rnak", 3, "does not exist; did you mean 'rank'?"),
    of_settings("dora", "targets", ("kye",), ONE_OR_MORE),
    of_settings("bitfit", "targets", ("all", "kye"), ALL_OR_MORE),
    of_settings("ssf", "targets", ("key", "key"), ALL_OR_MORE),
    of_settings("adaptformer", "input", "x", "must be one of normed, residual"),
    of_merge("adaptformer", {}, "the adapter adaptformer is not linear, so it cannot be merged; leave --merge out"),
    of_merge("ssf", {"targets": ("key",)}, "blocks/0/key needs a bias, which this backbone lacks", key_bias=False),
    of_decoder("heads", "9 cannot be divided among 2 heads", width=9, heads=2, style="ml_decoder"),
    of_decoder("positions", "multiple of 4, not 10", width=10, heads=2),
    of_loss("estimates in an evaluation", "role", "which only a training has", evaluate, CODES),
    of_loss("corrections in an evaluation", "ll_cp", "which only a training has", evaluate, CODES),
    of_loss("no space for estimates", "role", "5 training images and 4 labels", Objective.learned, CODES),
    of_loss("no space for corrections", "ll_cp", "5 training images and 4 labels", Objective.noted, CODES),
    of_loss("no training labels", "role", "pass the labels to make_loss", Objective.learned, None),
    *(
        Refusal(name, None, call, says)
        for name, call, says in (
            ("parameters", lambda _: split_trainable({"a": 1, "b": 1}, (("a", False),)), "no rule matches b; "),
            ("two paths", lambda _: rules.assign([["b$", 1], ["c", None]], ("a", "b", "d")), "no rule matches a, d; "),
            ("a pattern", lambda _: rules.first_match([("(", 1)], "a", 0), "the rule '(' is not a regular expression"),
        )
    ),
    # Errors of who calls, not of a user.
    of_backbone("prompts without prompts", "ViT", "cannot read ['prompts'] without prompts", read=("prompts",)),
    of_backbone("a feature that no ViT has", "ViT", "cannot read ['pixels']", read=("pixels",)),
    of_backbone("a part of a patch", "ViT", "not a multiple of the patch size 7", pixels=(13, 14)),
    of_backbone("prompts of a ResNet", "ResNet", "takes no prompts", prompts=Prompts(np.zeros((1, 1, 2, 4)))),
    of_blocks("a block that is not there", BACKBONES["ViT"].build, "no block 5; the blocks are numbered from 0 to 0"),
    of_blocks("blocks of a ResNet", BACKBONES["ResNet"].build, "no transformer blocks"),
    of_backbone("a small image", "ConvNeXt", "images of 33×3 pixels are smaller than the stride 8", pixels=(33, 3)),
    *(
        of_backbone(f"{read} of a ResNet", "ResNet", "has cls, patches and mean; cannot read", read=read)
        for read in (("cls", "prompts"), ("pixels",), ())
    ),
    *(
        Refusal(name, None, call, says, error=KeyError if name == "a missing path" else ValueError)
        for name, call, says in (
            ("one value per channel", one_value_per_channel, "more than one value per channel"),
            ("a dilation", dilated, "no dilation"),
            ("no features", lambda _: Features(None, None, None, (0, 0)).pooled(), "there are no features"),
            ("a missing path", merged_in_part, "bias"),
            ("other variables", lambda _: ModelDef.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0))), "only, not ['rngs/"),
        )
    ),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)
