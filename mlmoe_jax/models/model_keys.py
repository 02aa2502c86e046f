"""Keys of the backbone, of the adapters, and of how the whole model is computed."""

from mlmoe_jax.models.adapters.catalog import ADAPTERS, PROMPT_KEYS
from mlmoe_jax.models.heads.catalog import HEAD_KEYS
from mlmoe_jax.runtime.keys import ChoiceKey, FlagKey, PathKey, TextKey, others, section

BACKBONE_KEYS = section(
    "The network that turns an image into tokens, usually pretrained and frozen.",
    name=TextKey(
        "vit_digits", "Backbone, such as dinov2_vitb14, dinov3_vitb16, clip_vitb16 or resnet101.", required=True
    ),
    weights=PathKey(
        "auto",
        "Weights: auto is the published file, none is random, anything else a path.",
        stages=("model", "encode"),
        shared="value",
    ),
    canonical_texts=FlagKey(
        False,
        "Encode label names and templates in lower case and without punctuation, as big_vision's zero-shot evaluator "
        "does; its demo and transformers keep punctuation.",
        stages=("model", "encode"),
        only_if={"model.head.names": others("")},
    ),
    batch_norm=ChoiceKey(
        "frozen",
        "What trains in the batch normalization of a CNN.",
        choices={
            "frozen": "nothing",
            "running": "scale and bias, fixed statistics",
            "trainable": "scale and bias, statistics of the batch",
        },
    ),
    normalization=ChoiceKey(
        "auto",
        "Mean and standard deviation of the channels of an image.",
        choices={"auto": "as the weights were trained", "imagenet": "ImageNet's", "unit": "0 and 1: pixels in 0 … 1"},
    ),
)

# One section per adapter. A config has the sections of the adapters that it uses.
ADAPTER_SECTIONS = section(
    "Adapters beside the prompts; setting a key, or --config.model.adapters=NAME, adds the adapter.",
    **{
        name: section(adapter.doc, optional=True, **adapter.keys)
        for name, adapter in ((name, ADAPTERS.component(name)) for name in ADAPTERS)
    },
)

MODEL_KEYS = section(
    "The model: a backbone, prompts inside it, and a head on top.",
    stages=("model",),
    shared="value",
    dtype=ChoiceKey(
        "auto",
        "Type of matrix products; trainable parameters stay in float32.",
        choices={
            "auto": "bfloat16 on a GPU or TPU, float32 on a CPU; a resumed run keeps its type",
            "float32": "float32",
            "bfloat16": "bfloat16",
        },
    ),
    remat=FlagKey(
        False, "Recompute the backbone's blocks in the backward pass: less memory, more time.", on_resume="reported"
    ),
    frozen_dtype=ChoiceKey(
        "auto",
        "Type of the stored frozen weights; bfloat16 halves their memory.",
        choices={
            "auto": "bfloat16 if training and evaluation compute in it, else float32",
            "float32": "float32",
            "bfloat16": "bfloat16",
        },
    ),
    matmul_precision=ChoiceKey(
        "default",
        "JAX's jax_default_matmul_precision, for float32 products on a TPU or GPU.",
        choices={
            "default": "the device's fastest",
            "high": "three bfloat16 passes on a TPU",
            "highest": "full float32",
        },
    ),
    kernels=ChoiceKey(
        "auto",
        "What computes convolutions, pooling and attention; results differ by rounding, and infinities may be nan.",
        choices={"auto": "the quickest known implementation per device", "xla": "XLA's own operations"},
        on_resume="reported",
        shared="record",
    ),
    backbone=BACKBONE_KEYS,
    prompts=PROMPT_KEYS,
    adapters=ADAPTER_SECTIONS,
    head=HEAD_KEYS,
)
